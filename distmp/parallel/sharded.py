"""Common base class of the strategies that shard parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor, nn

from distmp.buckets.gradients import BACKWARD_IN_LOSS
from distmp.buckets.used import UsedParameters
from distmp.distributed.rank_environment import local_world_size
from distmp.distributed.world import World
from distmp.errors import ConfigError, TrainingError
from distmp.parallel.settings import ShardingConfig
from distmp.parallel.strategy import (
    USED_DIRECTLY,
    Strategy,
    parameter_name,
    refuse_shared_memory,
    trainable,
)
from distmp.utils.dtensor import is_dtensor

HOOK = (
    "has a hook (Tensor.register_hook), which FSDP would not run, because it computes gradients of "
    "gathered copies; change engine.gradients() in a step pre-hook of the optimizer, or use 'ddp'"
)

REPLACED = (
    "was replaced by .data =, which FSDP does not see; write to it in place (.copy_, .clamp_), or "
    "use engine.load_state_dict"
)


class _RefusesDirectUse:
    """Hook of a shard, to which autograd has a gradient only if the shard itself was used.

    FSDP reduces gradients of gathered parameters; this gradient would differ between ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradient: Tensor) -> NoReturn:
        raise ConfigError("model", self._name, USED_DIRECTLY)


class ShardedStrategy(Strategy):
    """The optimizer steps the sharded parameters of the module, with the gradients that FSDP sets.

    FSDP sets zeros for a parameter that no rank has used, if its group was reduced at all.
    `UsedParameters` determines which of these the optimizer steps.
    """

    def _track_parameters(self, world: World) -> None:
        """Start to train the parameters that require gradients now."""
        self._trainable = named = trainable(self.module)
        # Of the DTensor, not of its shard. Kept, so that no other storage gets the same address.
        self._storages = [parameter.untyped_storage() for _, parameter in named]
        self._names = {id(parameter): name for name, parameter in named}
        self._used = UsedParameters([name for name, _ in named], world.group, world.device)
        self._computing_loss = False
        # The gradients of this step by the `id` of their parameters, and their versions.
        self._accumulated: dict[int, tuple[Tensor, int]] = {}
        for name, parameter in named:
            parameter.register_hook(_RefusesDirectUse(name))

    def _mark_used(self, parameter: nn.Parameter) -> None:
        """Record that backward had a gradient of a parameter on this rank."""
        name = self._names.get(id(parameter))
        if name is not None:
            if self._computing_loss:
                raise TrainingError(BACKWARD_IN_LOSS.format(name))
            self._used.mark_used(name)

    def _record_gradient(self, parameter: nn.Parameter) -> None:
        """Record the gradient that FSDP has set, whose memory only FSDP may change in this step."""
        gradient = parameter.grad
        if gradient is None:
            self._refuse_lost_gradient(parameter)
        self._accumulated[id(parameter)] = (gradient, gradient._version)

    def _check_gradient(self, parameter: nn.Parameter) -> None:
        """Refuse a gradient that other code has removed, replaced or written to in this step.

        FSDP2 adds to the memory of a shard without a new version of the DTensor.

        Raises:
            TrainingError: Naming the parameter.
        """
        recorded = self._accumulated.get(id(parameter))
        if recorded is None:
            return
        gradient, version = recorded
        if parameter.grad is not gradient or gradient._version != version:
            self._refuse_lost_gradient(parameter)

    def _refuse_lost_gradient(self, parameter: nn.Parameter) -> NoReturn:
        raise TrainingError(
            f"the loss function or a hook has cleared or changed the gradient of "
            f"{self._names[id(parameter)]!r} before the end of the step, so the sum over "
            "microbatches would be lost; leave out zero_grad, which engine.step calls, and hooks "
            "that set .grad"
        )

    def computing_loss(self, *, computing: bool) -> None:
        self._computing_loss = computing

    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        return list(self._trainable)

    def begin_step(self) -> None:
        self._used.begin_step()
        self._accumulated.clear()
        for (name, parameter), storage in zip(self._trainable, self._storages, strict=True):
            hooks = parameter._backward_hooks or {}
            if len(hooks) > 1 and not all(isinstance(h, _RefusesDirectUse) for h in hooks.values()):
                raise ConfigError("model", name, HOOK)
            is_replaced = parameter.untyped_storage()._cdata != storage._cdata
            if is_replaced and is_dtensor(parameter):
                raise ConfigError("model", name, REPLACED)
            parameter.grad = None

    def finish_gradients(self) -> None:
        # FSDP waits for its reductions at the end of each backward.
        self._used.exchange_flags()
        for name, parameter in self._trainable:
            self._check_gradient(parameter)
            if self._used.is_unused(name) or not parameter.requires_grad:
                # FSDP reduces all parameters of a group, even those that were frozen later.
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._accumulated.clear()

    def end_step(self, skipped: Tensor) -> None:
        self._used.end_step(skipped)

    @property
    def unused(self) -> list[str]:
        return self._used.unused

    @unused.setter
    def unused(self, names: Iterable[str]) -> None:
        selected = set(names)
        self._used.unused = [name for name, _ in self._trainable if name in selected]


def shard_size(sharding: ShardingConfig, world: World) -> int:
    """Return how many ranks share one copy of the model with `hsdp`.

    Raises:
        ConfigError: If it does not divide the number of ranks.
    """
    local = local_world_size(world.world_size)
    size = local if sharding.shard_size is None else sharding.shard_size
    if world.world_size % size:
        divisors = [n for n in range(1, world.world_size + 1) if world.world_size % n == 0]
        raise ConfigError(
            "sharding.shard_size",
            size,
            f"does not divide the {world.world_size} ranks; use one of "
            f"{', '.join(map(str, divisors))}",
        )
    return size


def check_shapes(module: nn.Module, strategy: str) -> None:
    """Refuse parameters that a sharded strategy cannot divide.

    Raises:
        ConfigError: For a scalar, a trainable parameter without elements, and two parameters that
            share memory, or a hook that would not run.
    """
    refuse_shared_memory(module, "strategy", strategy)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError("model", name, HOOK)
        if parameter.dim() == 0:
            raise ConfigError(
                "strategy",
                strategy,
                f"shards parameters by rows, but {name!r} has the shape (); give it the shape "
                "(1,), or use 'ddp'",
            )
        if parameter.numel() == 0 and parameter.requires_grad:
            raise ConfigError(
                "strategy",
                strategy,
                f"cannot shard {name!r} of shape {tuple(parameter.shape)}, which has no elements; "
                "freeze or remove it, or use 'ddp'",
            )


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(parameter_name(name))
    return [tied for tied in names.values() if len(tied) > 1]


def check_ties(module: nn.Module, ties: list[list[str]], strategy: str) -> None:
    """Refuse a module whose blocks shared a parameter, which sharding has separated.

    Args:
        module: The module after it was sharded.
        ties: What `tied_names` returned before.
        strategy: The name of the strategy.

    Raises:
        ConfigError: If two names of a parameter are two parameters now.
    """
    named = module.named_parameters(remove_duplicate=False)
    sharded = {parameter_name(name): parameter for name, parameter in named}
    for first, *others in ties:
        for name in others:
            if sharded[name] is not sharded[first]:
                raise ConfigError(
                    "strategy",
                    strategy,
                    f"shards each block by itself, but {first!r} and {name!r} are one parameter; "
                    "use 'ddp', with shard_optimizer to save memory, or name a module that "
                    "contains and calls both in sharding.wrap",
                )
