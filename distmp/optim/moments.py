"""Optimizer moments in 8 bits: FP8 codes with one FP32 scale per block of elements.

The format is that of torchao's `OptimStateFp8`: e4m3 codes in the shape of the parameter, and for
each block of consecutive elements its largest magnitude divided by 448.

A block never crosses a row of the parameter (an index of its first dimension), and shards consist
of full blocks: FSDP2 divides parameters by rows, and the buckets of `shard_optimizer` at multiples
of `BLOCK`. So the codes do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.utils.dtensor import is_dtensor
from distmp.utils.flat_shard import FlatShard

# Number of elements that share a scale. Larger blocks would save little, and every shard of a
# bucket would be padded to a multiple of them.
BLOCK = 32
CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(CODES).max
# The lower bound of a block's largest magnitude in torchao.
_TINY = 1e-12


class Place(NamedTuple):
    """Which elements of a full parameter a tensor has: consecutive ones in row-major order.

    Attributes:
        shape: Shape of the full parameter.
        start: Index of the first element in the flattened full parameter.
    """

    shape: torch.Size
    start: int = 0

    @staticmethod
    def of(tensor: Tensor) -> Place:
        """Return the place of a full parameter, a `FlatShard`, or a DTensor sharded by rows.

        Raises:
            ConfigError: For a DTensor that is sharded along another dimension.
        """
        if isinstance(tensor, FlatShard):
            return Place(tensor.global_shape, tensor.start)
        if not is_dtensor(tensor):
            return Place(tensor.shape)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(
            placement.is_shard() and not placement.is_shard(0) for placement in tensor.placements
        ):
            raise ConfigError(
                "optimizer",
                "AdamW",
                f"has a parameter that is sharded as {tensor.placements}, not by rows; use "
                "torch.optim.AdamW for tensor-parallel parameters",
            )
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        row = tensor.shape[1:].numel() if tensor.dim() else 1
        return Place(tensor.shape, offset[0] * row if offset else 0)


def block_size(shape: torch.Size) -> int | None:
    """Return how many elements share a scale; None if blocks do not divide the rows.

    Args:
        shape: Shape of the full parameter. Vectors have rows of one element.
    """
    row = shape[1:].numel() if len(shape) > 1 else 1
    return None if row % BLOCK else BLOCK


def zero_scales(parameter: Tensor, place: Place, block: int) -> Tensor:
    """Return scales of zero for the elements of a parameter, sharded as the parameter.

    Args:
        parameter: A full parameter, a DTensor, or a 1-dim shard of a flattened parameter.
        place: Its place.
        block: Number of elements of a block; the parameter has to begin and end at blocks.

    Returns:
        FP32, globally of shape (rows, blocks of a row).
    """
    shape = torch.Size((place.shape[0], place.shape[1:].numel() // block))
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        rows = parameter.to_local().shape[0]
        local = torch.zeros(rows, shape[1], device=parameter.to_local().device)
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=shape,
            stride=(shape[1], 1),
        ).to(local.device)  # of offloaded parameters, the mesh has another device
    if parameter.shape == place.shape:
        return torch.zeros(shape, device=parameter.device)
    values = torch.zeros(parameter.numel() // block, device=parameter.device)
    return FlatShard.of(values, shape, place.start // block)


def quantize(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and scales, rounded to nearest.

    Args:
        values: FP32, 1-dim, with a multiple of `block` elements.
        block: Number of elements that share a scale.

    Returns:
        Codes of shape (elements,) and FP32 scales of shape (elements / block,).
    """
    blocks = values.view(-1, block)
    scales = blocks.abs().amax(1).clamp(min=_TINY) / _LARGEST
    return (blocks / scales.unsqueeze(1)).to(CODES).view(-1), scales


def dequantize(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the FP32 values of FP8 codes, 1-dim.

    Args:
        codes: 1-dim.
        scales: 1-dim, one for each `block` codes.
        block: Number of elements that share a scale.
    """
    return (codes.float().view(-1, block) * scales.unsqueeze(1)).view(-1)
