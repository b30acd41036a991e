"""Gathers weights of narrow linear layers in 8 bits, with FSDP2."""

# Note [Gathering in 8 bits]
#
# A narrow product rounds its weight to 8 bits, or 4. The rounded values can be gathered in place of
# 16-bit ones, and nothing changes: rounding a rounded weight again, with the same scales, returns
# the same values, and bfloat16 represents them exactly. So a gathered parameter is an ordinary
# bfloat16 tensor, and the layer rounds it as it would without this.
#
# The scales have to be those of the full weight. Before each step every rank finds the largest
# magnitudes in its shards, of all layers; one all-reduce makes them those of the full weights.
# From these every rank derives all scales, so no scale is gathered. They are never stale: weights
# change only between steps. Forward passes outside of a step do the same.
#
# gloo does not know 8-bit floating point, so bytes are gathered.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmp.distributed.collectives import all_gather
from distmp.quantization.formats import FORMATS
from distmp.quantization.linear import NarrowState
from distmp.quantization.operands import largest_in_weight, quantize_rows, with_row_scales


class ShardedWeight(NamedTuple):
    """A parameter in the buffer that a group of FSDP gathers.

    Attributes:
        parameter: The sharded parameter.
        elements: Number of elements of each rank, padding included.
        state: The narrow layer that the weight belongs to; None for other parameters.
    """

    parameter: nn.Parameter
    elements: int
    state: NarrowState | None

    @property
    def is_narrow(self) -> bool:
        """Whether both products that use the weight round it."""
        if self.state is None:
            return False
        formats = self.state.formats
        return formats.forward is not None and formats.grad is not None


class LargestMagnitudes:
    """Agrees over ranks on the largest magnitudes of sharded weights.

    Args:
        weights: The weights of narrow layers.
        group: The ranks that share one copy of the model.
        dtype: Dtype in which parameters are gathered.
        device: Device of the model.
    """

    def __init__(
        self,
        weights: Sequence[ShardedWeight],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights = [weight for weight in weights if weight.state is not None]
        self._group = group
        self._dtype = dtype
        self._device = device

    @torch.no_grad()
    def update(self) -> None:
        """Find the largest magnitudes of the current weights; the host does not wait."""
        found = [self._of_shard(weight) for weight in self._weights]
        if not found:
            return
        flat = torch.cat([each.flatten() for each in found])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._group)
        parts = flat.split([each.numel() for each in found])
        for weight, part, each in zip(self._weights, parts, found, strict=True):
            assert weight.state is not None
            if weight.state.largest is None:
                weight.state.largest = torch.empty_like(each)
            weight.state.largest.copy_(part.view_as(each))

    def _of_shard(self, weight: ShardedWeight) -> Tensor:
        assert weight.state is not None
        shard = _local(weight.parameter).to(self._dtype)
        rows, columns = weight.parameter.shape
        first_row = min(self._group.rank() * (weight.elements // columns), rows)
        scaling = weight.state.formats.scaling
        largest = largest_in_weight(shard, scaling, first_row=first_row, rows=rows)
        return largest.to(self._device)


def gather_quantized(
    output: Tensor, shard: Tensor, weights: Sequence[ShardedWeight], group: dist.ProcessGroup
) -> int:
    """Gather a group's parameters, those of narrow layers in 8 bits.

    Args:
        output: The parameters of all ranks, 16-bit of shape [ranks * elements of a rank].
        shard: The parameters of this rank, 16-bit; may be a part of `output`.
        weights: The parameters, in the order of the buffer.
        group: The ranks.

    Returns:
        Number of bytes that a rank sends to each other rank.
    """
    parts = shard.split([weight.elements for weight in weights])
    sent = torch.cat(
        [_encode(part, weight, group.rank()) for part, weight in zip(parts, weights, strict=True)]
    )
    received = torch.empty(group.size() * sent.numel(), dtype=torch.uint8, device=sent.device)
    all_gather(received, sent, group).wait()
    sizes = [_bytes(weight, shard.dtype) for weight in weights]
    columns = received.view(group.size(), -1).split(sizes, 1)
    targets = output.view(group.size(), -1).split([weight.elements for weight in weights], 1)
    for column, target, weight in zip(columns, targets, weights, strict=True):
        _decode(column, target, weight)
    return sent.numel()


def _bytes(weight: ShardedWeight, dtype: torch.dtype) -> int:
    return weight.elements * (1 if weight.is_narrow else dtype.itemsize)


def _encode(part: Tensor, weight: ShardedWeight, rank: int) -> Tensor:
    """Return the bytes of this rank's part of a parameter."""
    if not weight.is_narrow:
        return part.contiguous().view(torch.uint8)
    rows = part.view(-1, weight.parameter.shape[1])
    assert weight.state is not None
    assert weight.state.largest is not None
    formats = weight.state.formats
    operand = quantize_rows(
        rows, formats.operand, formats.scaling, weight.state.largest, rank * len(rows)
    )
    return operand.values.to(operand.number_format.dtype).view(torch.uint8).flatten()


def _decode(column: Tensor, target: Tensor, weight: ShardedWeight) -> None:
    """Write the parameter that the bytes of all ranks, [ranks, bytes of a rank], represent."""
    if not weight.is_narrow:
        target.copy_(column.contiguous().view(target.dtype))
        return
    assert weight.state is not None
    assert weight.state.largest is not None
    formats = weight.state.formats
    codes = column.reshape(-1, weight.parameter.shape[1])
    values = codes.view(FORMATS[formats.operand].dtype).float()
    operand = with_row_scales(values, formats.operand, formats.scaling, weight.state.largest, 0)
    target.copy_(operand.dequantized().view_as(target))


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
