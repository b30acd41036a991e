"""Finds out over which ranks the wrappers in a module sum gradients, and what they divide by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from distmp.errors import ConfigError, listed
from distmp.parallel.fsdp_internals import (
    GradientReduction,
    fsdp1_reduction,
    fsdp2_reductions,
    name_of,
)
from distmp.utils.dtensor import is_dtensor

Group = dist.ProcessGroup | DeviceMesh


def reduced_over(
    module: nn.Module,
    found: Sequence[GradientReduction],
    group: Group | None,
    divisor: float | None,
) -> tuple[tuple[dist.ProcessGroup, ...], float]:
    """Return the groups over which the gradients of a module are summed, and the sum's divisor.

    Args:
        module: The module.
        found: How its wrappers reduce gradients.
        group: Overrides the ranks that are found.
        divisor: Overrides the divisor that is found.

    Returns:
        Process groups of more than one rank, to sum over one after the other; and the divisor.

    Raises:
        ConfigError: If the ranks or the divisor are neither given nor found, or if parts of the
            module differ.
    """
    if not found and (group is None or divisor is None):
        _check_single(module, group, divisor)
    groups = _found_groups(found) if group is None else _dimensions(group)
    several = tuple(each for each in groups if each.size() > 1)
    return several, _found_divisor(found) if divisor is None else divisor


def gradient_reductions(module: nn.Module) -> Iterator[GradientReduction]:
    """Yield how the wrappers in a module reduce the gradients of its parameters.

    Args:
        module: A module that is wrapped in DDP or FSDP1, to which `fully_shard` or `replicate` was
            applied, or that contains such modules.

    Raises:
        ConfigError: For DDP inside of `join()`.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            yield _ddp_reduction(part)
        elif isinstance(part, FullyShardedDataParallel):
            reduction = fsdp1_reduction(part)
            if reduction is not None:
                yield reduction
    yield from fsdp2_reductions(module)


def _ddp_reduction(ddp: Any) -> GradientReduction:
    if ddp._join_config.enable:
        raise ConfigError(
            "module",
            type(ddp).__name__,
            "the global mean needs a loss of every rank in every step, but join() lets ranks stop "
            "early; give ranks without data a microbatch of weight 0 instead",
        )
    group, accumulates = ddp.process_group, not ddp.require_backward_grad_sync
    if ddp._comm_hooks:
        return GradientReduction((group,), accumulates, None, name_of(ddp._comm_hooks[0][0]))
    return GradientReduction((group,), accumulates, group.size())


def _check_single(module: nn.Module, group: Group | None, divisor: float | None) -> None:
    """Refuse a module without a wrapper that several ranks train."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # DTensors may describe how all ranks share the parameters.
    spans_all_ranks = any(
        is_dtensor(parameter) and parameter.device_mesh.size() == dist.get_world_size()
        for parameter in module.parameters()
    )
    if group is None and divisor is None and spans_all_ranks:
        return
    raise ConfigError(
        "module",
        type(module).__name__,
        "is not wrapped in DDP or FSDP, so it is unknown how its gradients are reduced; pass the "
        "wrapped module (in Lightning, trainer.strategy.model), or pass both the ranks over which "
        "you sum gradients and what you divide the sum by: group=..., divisor=...",
    )


def _found_divisor(found: Sequence[GradientReduction]) -> float:
    unknown = {reduction.unknown for reduction in found if reduction.unknown is not None}
    if unknown:
        raise ConfigError(
            "divisor",
            None,
            f"{', '.join(sorted(unknown))} reduces gradients in its own way; pass the number by "
            "which it divides the sum over ranks",
        )
    divisors = {reduction.divisor for reduction in found if reduction.divisor is not None}
    if len(divisors) > 1:
        numbers = listed([f"{number:g}" for number in sorted(divisors)])
        raise ConfigError(
            "divisor",
            None,
            f"parts of the module divide gradients by different numbers, {numbers}; call "
            "set_gradient_divide_factor() with the same number on each of them, and pass it",
        )
    return divisors.pop() if divisors else 1.0


def _found_groups(found: Sequence[GradientReduction]) -> Sequence[dist.ProcessGroup]:
    by_ranks = {_ranks(reduction): reduction.groups for reduction in found}
    if len(by_ranks) > 1:
        raise ConfigError(
            "group",
            None,
            "parts of the module reduce gradients over different ranks; pass the process group or "
            "mesh of all ranks that see different samples",
        )
    return by_ranks.popitem()[1] if by_ranks else ()


def _dimensions(group: Group) -> Sequence[dist.ProcessGroup]:
    if not isinstance(group, DeviceMesh):
        return (group,)
    if group.get_coordinate() is None:
        raise ConfigError("group", group, f"does not contain this rank, {dist.get_rank()}")
    return group.get_all_groups()


def _ranks(reduction: GradientReduction) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in reduction.groups)
