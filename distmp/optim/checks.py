"""Refuses optimizers and schedules that cannot work in a step of the engine.

The engine computes the loss once per step, sums gradients in dense FP32 tensors, and makes learning
rates a function of the number of applied updates. Optimizers and schedules that need something else
are refused when they are built.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import ConfigError

# torch's DTensor lacks operations of these (torch 2.13). A test fails when it supports them.
NOT_ON_DTENSORS = ("Adafactor", "Rprop")

_EXAMPLE = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"


def check_kind(
    optimizer: torch.optim.Optimizer, setting: str = "optimizer", value: object = None
) -> None:
    """Check that the engine can step an optimizer.

    Args:
        optimizer: An optimizer on the tensors that it updates.
        setting: Name of the setting that selects it.
        value: Value of that setting; None for the name of its class.

    Raises:
        ConfigError: If it cannot; it names the optimizer, what it needs, and an alternative.
    """
    kind = type(optimizer)
    value = value or kind.__name__
    refuse_kind(kind, setting, value)
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            setting,
            value,
            "has a group without a learning rate; put 'lr' into its defaults, as AdamW does",
        )
    sharded = any(
        is_traceable_wrapper_subclass(tensor)
        for group in optimizer.param_groups
        for tensor in group["params"]
    )
    if sharded and issubclass(kind, torch.optim.Muon):
        raise ConfigError(
            setting,
            value,
            "computes with sharded parameters (DTensor), and its updates then depend on the number "
            "of ranks; use distmp.optim.Muon (optim.name = 'muon'), which exchanges full matrices",
        )
    if sharded and kind.__name__ in NOT_ON_DTENSORS:
        raise ConfigError(
            setting,
            value,
            "needs operations that torch does not have for sharded parameters (DTensor); use the "
            "strategy ddp, or an optimizer such as AdamW",
        )


def refuse_kind(kind: type[torch.optim.Optimizer], setting: str, value: object) -> None:
    """Refuse an optimizer that the engine cannot step on any tensors.

    Args:
        kind: Class of the optimizer.
        setting: Name of the setting that selects it.
        value: Value of that setting.

    Raises:
        ConfigError: If `kind` is such an optimizer.
    """
    if _needs_closure(kind):
        raise ConfigError(
            setting,
            value,
            "needs a closure that computes the loss again several times in one step, and the "
            "engine computes it once; use an optimizer that steps without a closure, such as AdamW",
        )
    names = {base.__name__ for base in kind.__mro__}
    if "SparseAdam" in names:
        raise ConfigError(
            setting,
            value,
            "takes sparse gradients only, and the engine sums gradients in dense FP32 tensors; use "
            "Adam or AdamW",
        )
    if "ZeroRedundancyOptimizer" in names:
        raise ConfigError(
            setting,
            value,
            "does not expose its state, so checkpoints would not contain it; use the optimizer "
            "inside it directly, with shard_optimizer=True",
        )


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    parameters = [*inspect.signature(kind.step).parameters.values()][1:]
    return any(
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters
    )


def build_schedule(build: Any, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Build a schedule on an optimizer and check that the engine can use it.

    Args:
        build: Function that is called with `optimizer` and returns a scheduler of torch.
        optimizer: An SGD optimizer with momentum 0.

    Raises:
        ConfigError: If `build` is a scheduler, does not return one, or torch refuses to build it;
            if the scheduler changes the momentum, or is built on another optimizer.
    """
    if isinstance(build, lr_scheduler.LRScheduler):
        raise ConfigError(
            "schedule",
            type(build).__name__,
            f"is built already, on another optimizer; pass a function that builds it: {_EXAMPLE}",
        )
    name = getattr(build, "__name__", type(build).__name__)
    try:
        schedule: lr_scheduler.LRScheduler = build(optimizer)
    except TypeError as error:
        raise ConfigError(
            "schedule",
            name,
            f"cannot be called with an optimizer ({error}); pass a function that builds a "
            f"scheduler on it: {_EXAMPLE}. A function of the number of updates goes into LambdaLR",
        ) from error
    except ValueError as error:  # such as a ChainedScheduler with ReduceLROnPlateau
        raise ConfigError("schedule", name, f"cannot be built: {error}") from error
    if not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            "schedule",
            type(schedule).__name__,
            f"is what the function returned; return a scheduler of torch: {_EXAMPLE}",
        )
    for part in _parts(schedule):
        _check_part(part, optimizer)
    return schedule


def cycles_momentum(schedule: lr_scheduler.LRScheduler) -> bool:
    """Return whether a scheduler changes the momentum besides the learning rate."""
    return bool(getattr(schedule, "cycle_momentum", False))


def _parts(schedule: lr_scheduler.LRScheduler) -> Iterator[lr_scheduler.LRScheduler]:
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _parts(part)


def _check_part(part: lr_scheduler.LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    name = type(part).__name__
    if isinstance(part, lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "schedule",
            name,
            "follows a metric, and the engine schedules by the number of updates; build the engine "
            "without `schedule`, and step it on engine.optimizer yourself",
        )
    if cycles_momentum(part):
        raise ConfigError(
            "schedule",
            name,
            "also changes the momentum, but the engine schedules only learning rates; build it "
            "with cycle_momentum=False",
        )
    if getattr(part, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "schedule",
            name,
            "is built on another optimizer than the one that the function is called with, whose "
            f"learning rate would not change; use that one: {_EXAMPLE}",
        )
