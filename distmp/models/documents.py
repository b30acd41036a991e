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

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask = Tensor | BlockMask


def document_mask(positions: Tensor, x: Tensor) -> Mask | None:
    """Return which tokens each token attends to: those before it in its document, and itself.

    Args:
        positions: Positions of tokens in their documents, int64 [batch, time]. A document begins
            with 0, and the first one of a row may begin in the middle.
        x: Activations, [batch, time, dimension]. They tell whether this only measures memory:
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

    Args:
        documents: Numbers of the documents of tokens, int64 [batch, time].
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    rows, time = documents.shape
    return create_block_mask(attends, rows, None, time, time, device=str(documents.device))


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
    output: Tensor = _flex_attention()(query, key, value, block_mask=mask, enable_gqa=grouped)
    return output


@functools.cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Without compilation, FlexAttention computes the whole matrix of scores.
    return torch.compile(flex_attention)
