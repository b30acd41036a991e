"""The default model: a decoder-only transformer.

It has RMSNorm before each part, rotary positions, SwiGLU and causal scaled-dot-product attention,
like Llama 3. Grouped-query attention and norms of queries and keys are options.
Every module with parameters has a `reset_parameters`, which `Engine` uses to initialize a
model built on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distmp.errors import ConfigError
from distmp.models.linear_cross_entropy import Backend, LossHead, project
from distmp.utils.annotations import Section

_STD = 0.02
# No machine can hold a model with more.
_MOST_LAYERS, _MOST = 10_000, 2**31
# Queries, keys and values.
_Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TransformerConfig(Section, section="model.options"):
    """Dimensions of a transformer. `dimension` is a multiple of twice `heads`.

    Raises:
        ConfigError: If dimensions do not fit together, or an option is invalid.
    """

    vocabulary_size: int
    """Number of token ids."""

    sequence_length: int
    """Longest sequence, in tokens."""

    layers: int
    """Number of blocks."""

    dimension: int
    """Width of the residual stream."""

    heads: int
    """Number of attention heads."""

    hidden: int
    """Width of the hidden layer of the feed-forward part."""

    tied_head: bool = True
    """Whether the embedding is also the output matrix. Small models learn faster with it."""

    rotary_base: float = 10_000.0
    """Approximate ratio of the longest to the shortest wavelength of the rotary positions."""

    key_value_heads: int | None = None
    """Number of heads of keys and values; each serves a group of heads. It divides `heads`. None:
    as many as `heads`."""

    qk_norm: bool = False
    """Whether queries and keys have an RMSNorm, over the width of a head, before their rotation."""

    norm_epsilon: float = 1e-5
    """Added to the mean square in each norm."""

    def _check(self) -> None:
        for name, value in vars(self).items():
            most = _MOST_LAYERS if name == "layers" else _MOST
            counts = name not in ("rotary_base", "norm_epsilon")
            if counts and type(value) is int and not 1 <= value <= most:
                raise ConfigError(f"model.options.{name}", value, f"must be from 1 to {most:,}")
        problem = (
            f"does not divide model.options.dimension = {self.dimension} into heads of even width, "
            "which rotary embeddings need"
        )
        self._require(self.dimension % (2 * self.heads) == 0, "heads", problem)
        problem = (
            f"does not divide model.options.heads = {self.heads}; each head of keys and values "
            "serves the same number of heads"
        )
        self._require(self.heads % self.groups == 0, "key_value_heads", problem)
        # FP32, in which angles and norms are computed, has no larger base.
        self._require(1 <= self.rotary_base <= 1e38, "rotary_base", "use a number from 1 to 1e38")
        self._require(0 <= self.norm_epsilon <= 1, "norm_epsilon", "use a number from 0 to 1")

    @property
    def groups(self) -> int:
        """Number of heads of keys and values."""
        return self.key_value_heads or self.heads


class Projection(nn.Linear):
    """Linear layer without bias and with normally distributed initial weights.

    Args:
        inputs: Number of input features.
        outputs: Number of output features.
        std: Standard deviation of the initial weights.
    """

    def __init__(self, inputs: int, outputs: int, std: float = _STD) -> None:
        self.std = std  # read by the reset that the constructor of Linear calls
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=self.std)


class Head(Projection, LossHead):
    """The output matrix of a model without a tied embedding."""


class TokenEmbedding(nn.Embedding):
    """Embedding with the initial standard deviation of a transformer."""

    own_group = False  # see `distmp.parallel.fsdp_setup.shard`

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=_STD)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, computed in FP32 for any input dtype.

    Its arguments are those of `torch.nn.RMSNorm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight, in the dtype of `x`."""
        # torch computes 16-bit inputs internally in FP32, in one kernel if the weight has the same
        # dtype.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: TransformerConfig, residual_std: float) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        width = config.dimension // config.heads
        self.query_key_value = Projection(config.dimension, (self.heads + 2 * self.groups) * width)
        self.query_norm = RMSNorm(width, config.norm_epsilon) if config.qk_norm else None
        self.key_norm = RMSNorm(width, config.norm_epsilon) if config.qk_norm else None
        self.output = Projection(config.dimension, config.dimension, residual_std)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the attention output, [batch, time, dimension].

        Args:
            x: Residual stream after the norm, [batch, time, dimension].
            cosine: Cosines of the rotary angles, FP32 [time, 1, dimension / heads / 2]; see
                `rotary_tables`.
            sine: Sines of the rotary angles, with the same shape and dtype.
        """
        batch, time, dimension = x.shape
        parts = self.query_key_value(x).view(batch, time, self.heads + 2 * self.groups, -1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = parts.split((self.heads, self.groups, self.groups), dim=2)
            parts = torch.cat((self.query_norm(query), self.key_norm(key), value), dim=2)
        query, key, value = rotate(parts, self.groups, cosine, sine)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.groups != self.heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, time, dimension))


class FeedForward(nn.Module):
    """SwiGLU: a gated hidden layer at each position."""

    def __init__(self, config: TransformerConfig, residual_std: float) -> None:
        super().__init__()
        self.gate_up = Projection(config.dimension, 2 * config.hidden)
        self.down = Projection(config.hidden, config.dimension, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position independently, [..., dimension] -> [..., dimension]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class TransformerBlock(nn.Module):
    """Attention and feed-forward part, each with a norm before it and a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # Scaled so that the variance of the residual stream does not grow with depth.
        residual_std = _STD / (2 * config.layers) ** 0.5
        self.attention_norm = RMSNorm(config.dimension, config.norm_epsilon)
        self.attention = Attention(config, residual_std)
        self.feed_forward_norm = RMSNorm(config.dimension, config.norm_epsilon)
        self.feed_forward = FeedForward(config, residual_std)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the residual stream after this block, [batch, time, dimension]."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Decoder-only transformer. Its blocks are in `blocks`."""

    takes_targets = True
    # With a tied head, this computes the loss.
    loss_backend: Backend | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocabulary_size, config.dimension)
        self.embedding.own_group = not config.tied_head
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dimension, config.norm_epsilon)
        # A tied head is not a module: `to_empty` would turn a shared parameter into two.
        self.head = None if config.tied_head else Head(config.dimension, config.vocabulary_size)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the token after each position.

        Args:
            tokens: Token ids, int64 [batch, time]; time is at most `config.sequence_length`.
            targets: Token ids to predict, int64 [batch, time], for the loss without a tensor of all
                logits; see `distmp.models.linear_cross_entropy`.

        Returns:
            Logits [batch, time, vocabulary_size]; the parameters or autocast determine the dtype.
            With targets, their cross entropy as a sum, FP32, 0-dim.

        Raises:
            ValueError: If the sequence is too long.
        """
        time = tokens.shape[1]
        if time > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {time} tokens, and model.options.sequence_length is"
                f" {self.config.sequence_length}"
            )
        config = self.config
        positions = torch.arange(time, device=tokens.device)
        width = config.dimension // config.heads
        cosine, sine = rotary_tables(positions, width, config.rotary_base)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        x = self.norm(x)
        if self.head is None:
            return project(x, self.embedding.weight, targets, self.loss_backend)
        return self.head(x, targets)


def rotary_tables(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return the tables of rotary positions: cosines and sines.

    They are computed in each forward, which costs little compared to one block. A buffer would be
    rounded by `model.to(torch.bfloat16)`, so that positions beyond 256 would coincide.

    Args:
        positions: Positions of tokens, int64 [..., time].
        width: Width of an attention head.
        base: Approximate ratio of the longest to the shortest wavelength.

    Returns:
        Two FP32 tensors [..., time, 1, width / 2].
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None, None].float() * base ** (-pairs / width)
    return angles.cos(), angles.sin()


def rotate(parts: Tensor, groups: int, cosine: Tensor, sine: Tensor) -> _Heads:
    """Split heads, and rotate those of queries and keys by the angles of their positions.

    A rotation is one of each pair (x[i], x[i + width / 2]).

    Args:
        parts: Heads of queries, keys and values, [batch, time, heads + 2 groups, width].
        groups: Number of heads of keys, and of values.
        cosine: Cosines, FP32 [..., time, 1, width / 2].
        sine: Sines, with the same shape and dtype.

    Returns:
        Rotated queries and keys, and values, with the dtype of `parts`.
    """
    if not torch.compiler.is_compiling():
        tables = _cast_once(cosine, parts.dtype), _cast_once(sine, parts.dtype)
        return _Rotation.apply(parts, groups, *tables)
    cosine, sine = cosine.to(parts.dtype), sine.to(parts.dtype)
    # The compiler makes one kernel of these.
    first, second = parts[:, :, :-groups].chunk(2, dim=-1)
    halves = (first * cosine - second * sine, second * cosine + first * sine)
    rotated = torch.cat(halves, dim=-1)
    return rotated[:, :, :-groups], rotated[:, :, -groups:], parts[:, :, -groups:]


def _cast_once(table: Any, dtype: torch.dtype) -> Tensor:
    """Return a table in a dtype; the blocks of a forward, also recomputed ones, share the cast."""
    if table.dtype != dtype and getattr(table, "cast", table).dtype != dtype:
        table.cast = table.to(dtype)
    return table if table.dtype == dtype else table.cast


class _Rotation(torch.autograd.Function):
    """Computes `rotate` without the copies of `torch.cat`, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, groups: int, cosine: Tensor, sine: Tensor) -> _Heads:
        ctx.save_for_backward(cosine, sine)
        rotated = parts.new_empty(parts[:, :, :-groups].shape)
        _rotate_into(rotated, parts[:, :, :-groups], cosine, sine, 1)
        return rotated[:, :, :-groups], rotated[:, :, -groups:], parts[:, :, -groups:]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        heads = [gradient.shape[2] for gradient in (query, key, value)]
        batch, time, _, width = query.shape
        result = query.new_empty(batch, time, sum(heads), width)
        of_query, of_key, of_value = result.split(heads, dim=2)
        _rotate_into(of_query, query, cosine, sine, -1)
        _rotate_into(of_key, key, cosine, sine, -1)
        of_value.copy_(value)
        return result, None, None, None


def _rotate_into(result: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, direction: int) -> None:
    (first, second), (of_first, of_second) = x.chunk(2, dim=-1), result.chunk(2, dim=-1)
    torch.mul(first, cosine, out=of_first).addcmul_(second, sine, value=-direction)
    torch.mul(second, cosine, out=of_second).addcmul_(first, sine, value=direction)
