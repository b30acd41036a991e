"""Gives memory and initial values to parameters on the meta device, in full or as shards.

Under a sharded strategy a rank computes one parameter at a time and keeps its shard, so that it
never holds more than its shards and the largest parameter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.utils.deferred import NotDeferrableError, is_recorded, recording_of
from distmp.utils.flat_shard import local_parts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

InitialValues = Callable[[str, torch.device], Tensor]
"""Returns the initial value of a parameter or buffer by its name, on a device."""

BUILD_WHOLE = (
    "pass the constructor (`lambda: Model(...)`) in place of a model on the meta device, or build "
    "the model on the CPU, where every rank then holds all of it"
)


def initial_values(
    module: nn.Module, seed: int, device: torch.device | None = None
) -> InitialValues:
    """Return the initial values of the tensors of a module that are on the meta device.

    Args:
        module: The module.
        seed: Seed of random values, the same on all ranks.
        device: Keeps the generator of this device too, see `generators_kept`.

    Raises:
        ConfigError: If the values of a tensor are unknown.
    """
    if not is_on_meta(module):
        return nothing_to_compute
    try:
        return recording_of(module, seed, device).compute
    except NotDeferrableError as error:
        raise ConfigError("model", type(module).__name__, f"{error}; {BUILD_WHOLE}") from error


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a parameter or buffer of a module is on the meta device."""
    return any(True for _ in _on_meta(module))


def needs_seed(module: nn.Module) -> bool:
    """Return whether the initial values of a module are not determined yet."""
    return is_on_meta(module) and not is_recorded(module)


def nothing_to_compute(name: str, device: torch.device) -> Tensor:
    """Stand in for the initial values of a module without tensors on the meta device."""
    raise KeyError(name)


def not_a_number(module: nn.Module) -> InitialValues:
    """Return NaN as initial values, for a module whose values are loaded before the first step."""
    views = {name: tensor for _, _, name, tensor in _on_meta(module)}

    def compute(name: str, device: torch.device) -> Tensor:
        view = views[name]
        value = math.nan if view.is_floating_point() else 0
        # One value in memory: a shard does not need the full tensor.
        return torch.full((), value, dtype=view.dtype, device=device).expand(view.shape)

    return compute


@torch.no_grad()
def materialize(module: nn.Module, values: InitialValues, device: torch.device) -> None:
    """Replace the tensors of a module that are on the meta device by their initial values."""
    _replace(module, lambda name, _: values(name, device))


@torch.no_grad()
def materialize_buffers(module: nn.Module, values: InitialValues, device: torch.device) -> None:
    """Replace the buffers of a module that are on the meta device by their initial values."""
    for part, key, name, buffer in _on_meta(module):
        if not isinstance(buffer, nn.Parameter):
            setattr(part, key, _like(buffer, values(name, device)))


def materialize_own(
    module: nn.Module, values: InitialValues, device: torch.device
) -> Callable[[nn.Module], None]:
    """Return a function that materializes the tensors that one submodule holds itself.

    Args:
        module: The module whose names `values` uses, before it is wrapped.
        values: The initial values.
        device: Where the tensors are created.
    """
    prefixes = {part: prefix for prefix, part in module.named_modules()}
    # Weak, so that parameters can be freed when they are sharded.
    done: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @torch.no_grad()
    def replace(part: nn.Module) -> None:
        for key, meta in _held_on_meta(part):
            new = done.get(id(meta))
            if new is None:
                name = f"{prefixes[part]}.{key}".lstrip(".")
                new = done[id(meta)] = _like(meta, values(name, device))
            setattr(part, key, new)

    return replace


@torch.no_grad()
def materialize_shards(
    module: nn.Module, values: InitialValues, device: torch.device, storage: torch.device
) -> None:
    """Replace the DTensors of a module that are on the meta device by their initial values.

    Args:
        module: A module that `fully_shard` has sharded.
        values: The initial values of whole parameters.
        device: Where to compute them.
        storage: Where the shards are held.
    """
    _replace(
        module, lambda name, meta: _shard(values(name, device), cast("DTensor", meta), storage)
    )


def _shard(value: Tensor, meta: DTensor, storage: torch.device) -> Tensor:
    # Import lazily: only sharded strategies need it.
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(meta.to_local(), device=storage)
    for index, _ in local_parts(meta):
        local.copy_(value[index])
    _broadcast_to_replicas(local, meta)
    return DTensor.from_local(
        local,
        meta.device_mesh,
        meta.placements,
        run_check=False,
        shape=meta.shape,
        stride=meta.stride(),
    )


def _broadcast_to_replicas(local: Tensor, meta: DTensor) -> None:
    """Give all copies of a shard the same bits, whatever hardware has computed them."""
    for dimension, placement in enumerate(meta.placements):
        if placement.is_replicate():
            group = meta.device_mesh.get_group(dimension)
            dist.broadcast(local, src=dist.get_process_group_ranks(group)[0], group=group)


def _replace(module: nn.Module, replacement: Callable[[str, Tensor], Tensor]) -> None:
    done: dict[int, Tensor] = {}  # a tied parameter is one tensor with several names
    for part, key, name, meta in _on_meta(module):
        if id(meta) not in done:
            done[id(meta)] = _like(meta, replacement(name, meta))
        setattr(part, key, done[id(meta)])


def _like(meta: Tensor, value: Tensor) -> Tensor:
    """Return a value in the dtype of a tensor, and as a parameter if that is one."""
    value = value.to(meta.dtype)
    if value.stride() != meta.stride():  # expanded: its elements share memory
        value = torch.empty_like(meta, device=value.device).copy_(value)
    return nn.Parameter(value, meta.requires_grad) if isinstance(meta, nn.Parameter) else value


def _on_meta(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Yield each tensor on the meta device: its holder and name there, its full name, itself.

    A tied parameter is yielded once for every module that holds it.
    """
    for prefix, part in module.named_modules():
        for key, tensor in _held_on_meta(part):
            yield part, key, f"{prefix}.{key}".lstrip("."), tensor


def _held_on_meta(part: nn.Module) -> list[tuple[str, Tensor]]:
    own = [
        *part.named_parameters(recurse=False, remove_duplicate=False),
        *part.named_buffers(recurse=False, remove_duplicate=False),
    ]
    return [(key, tensor) for key, tensor in own if tensor.is_meta]
