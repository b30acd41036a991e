"""Gives memory and initial values to parameters on the meta device, in full or as shards.

Under a sharded strategy a rank computes one parameter at a time and keeps its shard, so that it
never holds more than its shards and the largest parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.utils.deferred import NotDeferrableError, is_recorded, recording_of
from distmp.utils.dtypes import as_sent
from distmp.utils.flat_shard import local_parts
from distmp.utils.tensor_trees import HeldTensor, held_tensors, parameter_like, replace_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

InitialValues = Callable[[str, torch.device], Tensor]
"""Returns the initial value of a parameter or buffer by its name, on a device."""

BUILD_WHOLE = (
    "pass the constructor (`lambda: Model(...)`) in place of a model on the meta device, or build "
    "the model on the CPU, where every rank then holds all of it"
)
SET_IN_CONSTRUCTOR = "set them in the constructor, for example with torch.nn.init"


def initial_values(
    module: nn.Module, seed: int, device: torch.device | None, *, initialize: bool = True
) -> InitialValues:
    """Return the initial values of the tensors of a module that are on the meta device.

    Args:
        module: The module.
        seed: Seed of random values, the same on all ranks.
        device: Keeps the generator of this device too, see `generators_kept`.
        initialize: Whether to compute those that the state dict holds; with False they are NaN or
            0, and have to be loaded before the first step.

    Raises:
        ConfigError: If the values of a tensor to be computed are unknown.
    """
    meta = [held for held in held_tensors(module) if held.tensor.is_meta]
    views = {held.name: held.tensor for held in meta}
    computed = {
        held.name
        for held in meta
        if initialize or held.key in held.holder._non_persistent_buffers_set
    }
    if not computed:
        return lambda name, device: _not_a_number(views[name], device)
    remedy = SET_IN_CONSTRUCTOR if is_recorded(module) else BUILD_WHOLE
    try:
        recording = recording_of(module, seed, device, computed)
    except NotDeferrableError as error:
        raise ConfigError("model", type(module).__name__, f"{error}; {remedy}") from error

    def compute(name: str, device: torch.device) -> Tensor:
        if name not in computed:
            return _not_a_number(views[name], device)
        return recording.compute(name, device)

    return compute


def nothing_to_compute(name: str, device: torch.device) -> Tensor:
    """Initial values of a module without tensors on the meta device; never called."""
    raise KeyError(name)


def _not_a_number(view: Tensor, device: torch.device) -> Tensor:
    """Return NaN or 0 in the shape of a tensor, as one value in memory: a shard needs no more."""
    value = math.nan if view.is_floating_point() else 0
    return torch.full((), value, dtype=view.dtype, device=device).expand(view.shape)


@torch.no_grad()
def materialize(
    module: nn.Module, values: InitialValues, device: torch.device, *, parameters: bool = True
) -> None:
    """Replace the tensors of a module that are on the meta device by their initial values.

    Args:
        module: The module.
        values: The initial values.
        device: Where the tensors are created.
        parameters: Whether parameters are replaced, too; False replaces only buffers.
    """

    def is_replaced(tensor: Tensor) -> bool:
        return tensor.is_meta and (parameters or not isinstance(tensor, nn.Parameter))

    replace_tensors(module, is_replaced, lambda held: _like(held.tensor, values(held.name, device)))


@torch.no_grad()
def materialize_shards(module: nn.Module, values: InitialValues, device: torch.device) -> None:
    """Replace the DTensors of a module that are on the meta device by their initial values.

    Args:
        module: A module that `fully_shard` has sharded.
        values: The initial values of full parameters.
        device: Where to compute them, and where the shards are held.
    """

    def shard(held: HeldTensor) -> Tensor:
        meta = cast("DTensor", held.tensor)
        value = values(held.name, device)
        sharded = cast("DTensor", torch.empty_like(meta, device=device))
        local = sharded.to_local()
        for index, _ in local_parts(meta):
            local.copy_(value[index])
        # Give all copies of a shard the same bits, whatever hardware has computed them.
        for dimension, placement in enumerate(meta.placements):
            if placement.is_replicate():
                group = meta.device_mesh.get_group(dimension)
                first = dist.get_process_group_ranks(group)[0]
                dist.broadcast(as_sent(local), src=first, group=group)
        return _like(meta, sharded)

    replace_tensors(module, lambda tensor: tensor.is_meta, shard)


def _like(meta: Tensor, value: Tensor) -> Tensor:
    """Return a value in the dtype of a tensor, and as a parameter if that is one."""
    value = value.to(meta.dtype)
    if value.stride() != meta.stride():  # expanded: its elements share memory
        value = torch.empty_like(meta, device=value.device).copy_(value)
    return parameter_like(meta, value) if isinstance(meta, nn.Parameter) else value
