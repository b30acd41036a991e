"""Checks, unscales and measures the gradients of an optimizer that this rank holds.

The functions use the local shards of DTensors. With DTensors, torch's check for non-finite values
reduces its flag over the mesh of the first gradient only, and it refuses a mix with plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.errors import require
from distmp.scaling.norms import chunk_norms, summed
from distmp.utils.dtypes import is_dtensor
from distmp.utils.host_copy import to_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class LocalGradient(NamedTuple):
    """The part of one gradient that this rank holds.

    Attributes:
        tensor: Dense real tensor that shares the memory of the parameter's gradient.
        shards: Number of ranks that one copy of the gradient is sharded over; 1 for a plain tensor,
            0 for a partial sum that is not reduced yet.
    """

    tensor: Tensor
    shards: int


@torch.no_grad()
def local_gradients(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> list[LocalGradient]:
    """Return the nonempty local gradients that the optimizer would step with.

    A sparse gradient is coalesced in place, because its norm is that of the summed values of each
    index, and the sums may overflow if the values do not.

    Args:
        optimizer: The optimizer.
        group: The ranks that decide on the gradients; None for all ranks.

    Raises:
        ConfigError: If other ranks hold shards of a gradient.
    """
    result = []
    # Most gradients have the same mesh and placements. Not kept: it would keep the group alive.
    shards_of = cache(partial(_shards, group))
    for parameter in parameters(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse and not gradient.is_coalesced():
            gradient = parameter.grad = _coalesce(gradient)
        shards = 1
        if is_dtensor(gradient):
            shards = shards_of(gradient.device_mesh, gradient.placements)
        local = _local(gradient)
        if local.numel() > 0:
            result.append(LocalGradient(local, shards))
    return result


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def check_norm(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters of FSDP1: their gradients are plain tensors, but shards.

    Raises:
        ValueError: If the optimizer has such a parameter.
    """
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters(optimizer)):
        raise ValueError(
            "cannot compute the norm of gradients that FSDP1 shards; call "
            "scaler.unscale_(optimizer), and then clip_grad_norm_() of the FSDP module"
        )


def _coalesce(gradient: Tensor) -> Tensor:
    """Sum the values of each index, in FP32 if they have 16 bits."""
    if gradient.dtype.itemsize < 4:
        return gradient.float().coalesce().to(gradient.dtype)
    return gradient.coalesce()


def _local(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient._values()
    elif is_dtensor(gradient):
        gradient = gradient.to_local()
    if not gradient.is_complex():
        return gradient
    # Conjugating a lazily conjugated gradient gives a view of its memory as it is.
    return torch.view_as_real(gradient.conj() if gradient.is_conj() else gradient)


def _shards(
    group: dist.ProcessGroup | None, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> int:
    if any(placement.is_partial() for placement in placements):
        return 0
    sharded = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
    if group is not None:
        for dimension in sharded:
            _check_contains(group, mesh, dimension)
    return math.prod(map(mesh.size, sharded))


def _check_contains(group: dist.ProcessGroup, mesh: DeviceMesh, dimension: int) -> None:
    # The ranks of the mesh, which may have no process groups.
    lines = mesh.mesh.movedim(dimension, -1).reshape(-1, mesh.size(dimension)).tolist()
    ranks = next(line for line in lines if dist.get_rank() in line)
    own = dist.get_process_group_ranks(group)
    missing = sorted(set(ranks) - set(own))
    problem = f"lacks the ranks {missing}, which hold shards of a gradient; add them, or use None"
    require(not missing, "group", own, problem)


@torch.no_grad()
def unscale(
    gradients: Iterable[LocalGradient], inverse_scale: Tensor | None, device: torch.device
) -> Tensor:
    """Multiply the gradients in place and return whether any of them was not finite.

    Args:
        gradients: Gradients on any device, with any dtype; 16-bit ones are multiplied in FP32.
        inverse_scale: The factor, 0-dim FP32; None leaves the gradients unchanged.
        device: Device of the returned flag.

    Returns:
        0-dim FP32, 1 if a gradient was not finite, otherwise 0.
    """
    flags = []
    for (source, _), tensors in _by_device_and_dtype(gradients).items():
        flag = torch.zeros((), dtype=torch.float32, device=source)
        factor = torch.ones_like(flag) if inverse_scale is None else inverse_scale.to(source)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
        flags.append(to_device(flag, device))
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


@torch.no_grad()
def square_sum(gradients: Iterable[LocalGradient], world_size: int, device: torch.device) -> Tensor:
    """Return this rank's part of the squared norm, 0-dim FP64; not finite if a gradient is not.

    The sum of the parts of all ranks counts every value once. A value of a shard is on
    `world_size / shards` ranks, a value of a plain tensor on all ranks.

    Raises:
        ValueError: If a gradient is a DTensor with the placement Partial.
    """
    parts = []
    by_shards: dict[int, list[LocalGradient]] = {}
    for gradient in gradients:
        by_shards.setdefault(gradient.shards, []).append(gradient)
    for shards, members in by_shards.items():
        if shards == 0:
            raise ValueError(
                "cannot compute the norm of a Partial DTensor gradient; redistribute it first"
            )
        for tensors in _by_device_and_dtype(members).values():
            squares = chunk_norms(tensors).square().sum()
            share = shards / world_size
            squares = to_device(squares, device)
            parts.append(squares if share == 1 else squares * share)
    return summed(parts, device)


def _by_device_and_dtype(
    gradients: Iterable[LocalGradient],
) -> Mapping[tuple[torch.device, torch.dtype], list[Tensor]]:
    grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.tensor.device, gradient.tensor.dtype)
        grouped.setdefault(key, []).append(gradient.tensor)
    return grouped


def non_finite_names(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Return the names of parameters with a non-finite local gradient; waits for the device.

    Without names in the optimizer, a parameter is described by its group, position and shape.
    """
    result = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is None or _local(parameter.grad).isfinite().all():
                    continue
                description = f"parameter {position} of group {index} {tuple(parameter.shape)}"
                result.append(names[position] if names else description)
    return result
