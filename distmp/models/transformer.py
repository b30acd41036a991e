"""The default model: a decoder-only transformer.

RMSNorm before each part, rotary positions, SwiGLU and causal scaled-dot-product attention. Every
module that owns parameters has a `reset_parameters`, so a model built on the meta device gets its
values by `to_empty` and a reset of each module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STD = 0.02


@dataclass(frozen=True)
class TransformerConfig:
    """Dimensions of a transformer. `dimension` is a multiple of twice `heads`."""

    vocabulary_size: int
    """Number of token ids."""

    sequence_length: int
    """Longest sequence, in tokens."""

    layers: int
    """Number of blocks."""

    dimension: int
    """Width of the residual stream."""

    heads: int
    """Attention heads."""

    hidden: int
    """Width inside the feed-forward part."""

    tied_head: bool = True
    """Whether the embedding also serves as the output matrix. Small models learn faster so."""

    rotary_base: float = 10_000.0
    """Ratio, nearly, of the slowest to the fastest wavelength of the rotary positions."""


class Projection(nn.Linear):
    """Linear layer without bias, normally distributed weights.

    Args:
        inputs: Features in.
        outputs: Features out.
        std: Standard deviation of the initial weights.
    """

    def __init__(self, inputs: int, outputs: int, std: float = _STD) -> None:
        self.std = std  # read by the reset that the constructor of Linear calls
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """Embedding with the standard deviation of a transformer's."""

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=_STD)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in FP32 whatever the input is.

    Args:
        dimension: Size of the last dimension.
        epsilon: Added to the mean square.
    """

    def __init__(self, dimension: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(dimension))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) * weight, in the dtype of `x`."""
        # torch computes 16-bit inputs in FP32 inside, in one kernel if the weight has their dtype.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), weight.shape, weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: TransformerConfig, residual_std: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = Projection(config.dimension, 3 * config.dimension)
        self.output = Projection(config.dimension, config.dimension, residual_std)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Mix information over time.

        Args:
            x: [batch, time, dimension].
            cosine: [time, 1, dimension / heads], of the rotary angles (see `rotary_tables`).
            sine: Likewise.

        Returns:
            [batch, time, dimension].
        """
        batch, time, dimension = x.shape
        parts = self.query_key_value(x).view(batch, time, 3 * self.heads, -1)
        turned, value = parts.split((2 * self.heads, self.heads), dim=2)
        query, key = rotate(turned, cosine, sine).transpose(1, 2).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, dimension))
        return output


class FeedForward(nn.Module):
    """SwiGLU: a gated hidden layer at each position."""

    def __init__(self, config: TransformerConfig, residual_std: float) -> None:
        super().__init__()
        self.gate_up = Projection(config.dimension, 2 * config.hidden)
        self.down = Projection(config.hidden, config.dimension, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself, [..., dimension] -> [..., dimension]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output


class TransformerBlock(nn.Module):
    """Attention and feed-forward part, each normalised before and added to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # So that the variance of the residual stream does not grow with depth.
        residual_std = _STD / (2 * config.layers) ** 0.5
        self.attention_norm = RMSNorm(config.dimension)
        self.attention = Attention(config, residual_std)
        self.feed_forward_norm = RMSNorm(config.dimension)
        self.feed_forward = FeedForward(config, residual_std)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the residual stream after this block, [batch, time, dimension]."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Decoder-only transformer. Its blocks are in `blocks`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config.vocabulary_size, config.dimension)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dimension)
        # A tied head is no module of its own: a shared parameter would come apart in `to_empty`.
        self.head = (
            None if config.tied_head else Projection(config.dimension, config.vocabulary_size)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token after each position.

        Args:
            tokens: int64 [batch, time], time at most `config.sequence_length`.

        Returns:
            Logits [batch, time, vocabulary_size], in the dtype that the parameters or autocast
            give them.

        Raises:
            ValueError: If the sequence is too long.
        """
        time = tokens.shape[1]
        if time > self.config.sequence_length:
            raise ValueError(
                f"a sequence of {time} tokens, and model.sequence_length is"
                f" {self.config.sequence_length}"
            )
        width = self.config.dimension // self.config.heads
        cosine, sine = rotary_tables(time, width, self.config.rotary_base, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits


def rotary_tables(
    time: int, width: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tables of rotary positions: cosine, and sine with the signs of a rotation.

    They are computed in each forward, at next to no cost beside one block. A buffer would be
    rounded by `model.to(torch.bfloat16)`, and positions beyond 256 would run together.

    Args:
        time: Number of positions.
        width: Width of an attention head.
        base: Ratio, nearly, of the slowest to the fastest wavelength.
        device: Where to put them.

    Returns:
        Two FP32 tensors [time, 1, width]. Both halves of the last dimension hold the same angles.
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    positions = torch.arange(time, dtype=torch.float32, device=device)
    angles = positions[:, None, None] * base ** (-pairs / width)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + width / 2]) by the angle of its position.

    Args:
        x: [batch, time, heads, width].
        cosine: [time, 1, width].
        sine: [time, 1, width].

    Returns:
        As `x`, in its dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cosine.to(x.dtype) + torch.cat((second, first), dim=-1) * sine.to(x.dtype)
