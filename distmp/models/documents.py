"""Attention of tokens to their own document only, in sequences packed from several documents."""

# Note [Document masks]
#
# On a GPU, FlexAttention gets the mask as a function and skips the blocks of the matrix of scores
# in which no token attends to another. Elsewhere scaled_dot_product_attention gets a boolean
# matrix, which takes time * time bytes per sequence for all layers together.
#
# `distmp explain` and `strategy: auto` run on fake tensors, where FlexAttention cannot run. On a
# fake GPU they run causal attention without a mask, which keeps the same tensors for backward.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distmp.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask = Tensor | BlockMask

# Tokens per block of a BlockMask, FlexAttention's default.
BLOCK = 128


def document_mask(positions: Tensor, x: Tensor) -> Mask | None:
    """Return which tokens each token attends to: those before it in its document, and itself.

    Args:
        positions: Positions of tokens in their documents, int64 [batch, time]. A document begins
            with 0, and the first one of a row may begin in the middle.
        x: Activations, [batch, time, dimension]. They show whether this only measures memory:
            `FakeTensors` leaves small integers, such as positions, real.

    Returns:
        On a GPU a BlockMask, or None for fake activations; elsewhere bool [batch, 1, time, time].
    """
    if x.is_cuda and isinstance(x, FakeTensor):
        return None
    documents = (positions == 0).cumsum(1)
    if x.is_cuda:
        return block_mask(documents)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def block_mask(documents: Tensor) -> BlockMask:
    """Return the mask of FlexAttention.

    The numbers of documents do not decrease, so the first and the last one of a block determine
    with which blocks it shares a document. `create_block_mask` would allocate several [batch, time,
    time] matrices.

    Args:
        documents: Numbers of the documents of tokens, int64 [batch, time], not decreasing.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def attends(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    time = documents.shape[1]
    # The end of the last block belongs to no document.
    padded = F.pad(documents, (0, -time % BLOCK), value=time + 1)
    first, last = padded[:, None, ::BLOCK], padded[:, None, BLOCK - 1 :: BLOCK]
    diagonal = torch.eye(first.shape[-1], dtype=torch.bool, device=documents.device)
    shared = (first[..., :, None] == last[..., None, :]).tril(-1)
    # Every token attends to every token: both blocks lie in one document.
    full = (last[..., :, None] == first[..., None, :]).tril(-1)
    return BlockMask.from_kv_blocks(
        *_ordered(shared & ~full | diagonal),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(time, time),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected key blocks of each query block, and their indices first.

    Args:
        blocks: Selected blocks, bool [batch, 1, query blocks, key blocks].

    Returns:
        Both int32: [batch, 1, query blocks], and [batch, 1, query blocks, key blocks].
    """
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), indices.int()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
    """Return the result of causal attention, [batch, heads, time, width].

    Args:
        query: [batch, heads, time, width].
        key: [batch, groups, time, width]; groups divides heads.
        value: [batch, groups, time, width].
        mask: Result of `document_mask`; None: every token attends to all before it.
    """
    grouped = key.shape[1] != query.shape[1]
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    output: Tensor = _flex_attention()(query, key, value, mask, grouped)
    return output


@functools.cache
def _flex_attention() -> Any:
    return torch.compile(_compiled_attention)


def _compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, grouped: bool
) -> Tensor:
    """Run FlexAttention, unless torch.compile is disabled: it would hold the matrix of scores.

    Raises:
        ConfigError: If this is not compiled.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_compiling():
        raise ConfigError(
            "positions",
            "of documents",
            "FlexAttention, which masks documents on a GPU, needs torch.compile, which is disabled "
            "here; enable it (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE, set_stance)",
        )
    result: Tensor = flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
    return result
