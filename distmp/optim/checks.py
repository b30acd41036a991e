"""Refuses optimizers and schedules that cannot work in a step of the engine.

The engine makes learning rates a function of the number of applied updates, and saves the state of
the optimizer. Optimizers and schedules that would silently do something else are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import ConfigError

_EXAMPLE = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"


# Optimizers by the name of their class: what the engine cannot do.
_REFUSED = {
    "LBFGS": (
        "needs a closure that computes the loss again several times in one step, and the engine "
        "computes it once; use an optimizer that steps without a closure, such as AdamW"
    ),
    "SparseAdam": (
        "takes sparse gradients only, and the engine sums gradients in dense FP32 tensors; use "
        "Adam or AdamW"
    ),
    "ZeroRedundancyOptimizer": (
        "does not expose its state, so checkpoints would not contain it; use the optimizer "
        "inside it directly, with shard_optimizer=True"
    ),
}


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Check that the engine can step an optimizer.

    Args:
        optimizer: An optimizer on the tensors that it updates.

    Raises:
        ConfigError: If it cannot; it names the optimizer, what it needs, and an alternative.
    """
    kind = type(optimizer)
    for base in kind.__mro__:
        if base.__name__ in _REFUSED:
            raise ConfigError("optimizer", kind.__name__, _REFUSED[base.__name__])
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    if issubclass(kind, torch.optim.Muon) and any(map(is_traceable_wrapper_subclass, tensors)):
        raise ConfigError(
            "optimizer",
            kind.__name__,
            "computes with sharded parameters (DTensor), and its updates then depend on the number "
            "of ranks; use distmp.optim.Muon (optim.name = 'muon'), which exchanges full matrices",
        )


def build_schedule(build: Any, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Build a schedule on an optimizer and check that the engine can use it.

    Args:
        build: Function that is called with `optimizer` and returns a scheduler of torch.
        optimizer: An SGD optimizer with momentum 0.

    Raises:
        ConfigError: If `build` cannot be called with an optimizer, does not return a scheduler, or
            the scheduler follows a metric,
            changes the momentum, or is built on another optimizer.
    """
    try:
        schedule: lr_scheduler.LRScheduler = build(optimizer)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        name = getattr(build, "__name__", type(build).__name__)
        problem = f"cannot be called with an optimizer ({error}); pass a function that builds a "
        raise ConfigError("schedule", name, f"{problem}scheduler on it: {_EXAMPLE}") from error
    if not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            "schedule",
            type(schedule).__name__,
            f"is what the function returned; return a scheduler of torch: {_EXAMPLE}",
        )
    for part in _parts(schedule):
        _check_part(part, optimizer)
    return schedule


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
    if getattr(part, "cycle_momentum", False):
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
