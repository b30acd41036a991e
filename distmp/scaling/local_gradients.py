"""The gradients of an optimizer as this rank holds them: checked, unscaled and measured locally.

A DTensor's local shard is worked on directly. Sent through DTensor's dispatch, torch's check
reduces its flag over the mesh of the first gradient only, and refuses plain tensors beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.scaling.norms import chunk_norms


class LocalGradient(NamedTuple):
    """What this rank holds of one gradient.

    Attributes:
        tensor: Dense, not empty; writing to it writes to the parameter's gradient.
        shards: Over how many ranks the values of one copy are spread; 1 for a plain tensor, 0 for a
            sum that has not been reduced yet.
    """

    tensor: Tensor
    shards: int


@torch.no_grad()
def local_gradients(optimizer: torch.optim.Optimizer) -> list[LocalGradient]:
    """Return the local gradients that the optimizer would step with.

    A sparse gradient is coalesced in place: the norm is that of the sums of values of one index,
    and these may overflow where the values do not. A gradient that was made in inference mode is
    replaced by a copy that can be written to outside of it.
    """
    found = []
    for parameter in parameters(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_inference() and not torch.is_inference_mode_enabled():
            gradient = parameter.grad = gradient.clone()
        if gradient.is_sparse and not gradient.is_coalesced():
            gradient = parameter.grad = _coalesce(gradient)
        local = _local(gradient)
        if local.tensor.numel() > 0:
            found.append(local)
    return found


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _coalesce(gradient: Tensor) -> Tensor:
    """Add the values of each index, in FP32 where they have 16 bits."""
    if gradient.dtype.itemsize < 4:
        return gradient.float().coalesce().to(gradient.dtype)
    return gradient.coalesce()


def _local(gradient: Tensor) -> LocalGradient:
    if gradient.is_sparse:
        return LocalGradient(gradient._values(), 1)
    # A DTensor is such a subclass; importing it to ask would take half a second.
    if is_traceable_wrapper_subclass(gradient):
        from torch.distributed.tensor import DTensor

        if isinstance(gradient, DTensor):
            with torch.no_grad():
                return LocalGradient(gradient.to_local(), _shards(gradient))
    return LocalGradient(gradient, 1)


def _shards(gradient: Tensor) -> int:
    from torch.distributed.tensor import DTensor

    assert isinstance(gradient, DTensor)
    if any(placement.is_partial() for placement in gradient.placements):
        return 0
    count = 1
    for dimension, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            count *= gradient.device_mesh.size(dimension)
    return count


@torch.no_grad()
def unscale(
    gradients: Iterable[LocalGradient], inverse_scale: Tensor | None, device: torch.device
) -> Tensor:
    """Multiply the gradients in place and say whether any was not finite.

    Args:
        gradients: On any devices, of any dtypes; 16-bit ones are multiplied in FP32 arithmetic.
        inverse_scale: 0-dim FP32; None leaves the gradients as they are.
        device: Where the flag is wanted.

    Returns:
        0-dim FP32, 0 or 1.
    """
    flags = []
    for place, tensors in _by_device_and_dtype(gradients).items():
        flag = torch.zeros((), dtype=torch.float32, device=place[0])
        factor = torch.ones_like(flag) if inverse_scale is None else inverse_scale.to(place[0])
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
        flags.append(flag.to(device, non_blocking=True))
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(flags).amax()


@torch.no_grad()
def square_sum(gradients: Iterable[LocalGradient], world_size: int, device: torch.device) -> Tensor:
    """Return this rank's share of the squared norm, FP64, 0-dim; not finite if a gradient is not.

    Every value counts once over all ranks: a shard's on `world_size / shards` ranks, a plain
    tensor's on all of them.

    Raises:
        ValueError: If a gradient is a DTensor with the placement Partial.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_shards: dict[int, list[LocalGradient]] = {}
    for gradient in gradients:
        by_shards.setdefault(gradient.shards, []).append(gradient)
    for shards, members in by_shards.items():
        if shards == 0:
            raise ValueError("the norm of a Partial DTensor gradient: redistribute it first")
        for tensors in _by_device_and_dtype(members).values():
            squares = chunk_norms(tensors).to(torch.float64).square().sum()
            total = total + squares.to(device, non_blocking=True) * shards / world_size
    return total


def _by_device_and_dtype(
    gradients: Iterable[LocalGradient],
) -> Mapping[tuple[torch.device, torch.dtype], list[Tensor]]:
    grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.tensor.device, gradient.tensor.dtype)
        grouped.setdefault(key, []).append(gradient.tensor)
    return grouped


def non_finite_names(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Return the parameters whose local gradient is not finite now; waits for the device.

    Their names are those the optimizer was built with, otherwise their places in it.
    """
    found = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is None or _local(parameter.grad).tensor.isfinite().all():
                    continue
                place = f"parameter {position} of group {index} {tuple(parameter.shape)}"
                found.append(names[position] if names else place)
    return found
