"""Learning rates on the device, indexed by the number of applied updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import ConfigError, require
from distmp.utils.host_copy import numbers_to_device
from distmp.utils.imports import check_arguments

# FP32, the dtype of rates on a device.
_LARGEST = torch.finfo(torch.float32).max
_EXAMPLE = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"

# What a schedule raises when it is built wrongly, or has no rate for an update.
ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)

_CLOSURE = (
    "needs a closure that computes the loss again several times in one step, and the engine "
    "computes it once; use an optimizer that steps without a closure, such as AdamW"
)

# Why the engine does not support an optimizer, by the name of its class.
_REFUSED = {
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
    """Check that the engine supports an optimizer.

    Args:
        optimizer: An optimizer on the tensors that it updates.

    Raises:
        ConfigError: If it cannot; it names the optimizer, what it needs, and an alternative.
    """
    kind = type(optimizer)
    for base in kind.__mro__:
        if base.__name__ in _REFUSED:
            raise ConfigError("optimizer", kind.__name__, _REFUSED[base.__name__])
    check_arguments("optimizer", kind.__name__, optimizer.step, (), _CLOSURE)
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    if not any(map(is_traceable_wrapper_subclass, tensors)):
        return
    if issubclass(kind, torch.optim.Adafactor | torch.optim.Rprop):
        problem = (
            "cannot compute with sharded parameters (DTensor); use the strategy 'ddp', or AdamW"
        )
    elif issubclass(kind, torch.optim.Muon):
        problem = (
            "computes with sharded parameters (DTensor), and its updates then depend on the number "
            "of ranks; use distmp.optim.Muon (optim.name = 'muon'), which exchanges full matrices"
        )
    else:
        return
    raise ConfigError("optimizer", kind.__name__, problem)


def build_schedule(build: Any, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Build a schedule on an optimizer and check that the engine can use it.

    Args:
        build: Function that is called with `optimizer` and returns a scheduler of torch.
        optimizer: An SGD optimizer with momentum 0.

    Raises:
        ConfigError: If `build` cannot be called with an optimizer, does not return a scheduler, or
            the scheduler follows a metric, changes the momentum, or is built on another optimizer.
    """
    try:
        schedule: lr_scheduler.LRScheduler = build(optimizer)
    except ConfigError:
        raise
    except ERRORS as error:
        name = getattr(build, "__name__", type(build).__name__)
        problem = f"cannot be called with an optimizer ({error}); pass a function that builds a "
        raise ConfigError("schedule", name, f"{problem}scheduler on it: {_EXAMPLE}") from error
    usable, kind = callable(getattr(schedule, "step", None)), type(schedule).__name__
    problem = f"is what the function returned; return a scheduler of torch: {_EXAMPLE}"
    require(usable, "schedule", kind, problem)
    for part in _parts(schedule):
        _check_part(part, optimizer)
    return schedule


def _parts(schedule: lr_scheduler.LRScheduler) -> Iterator[lr_scheduler.LRScheduler]:
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _parts(part)


def _check_part(part: lr_scheduler.LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(part, lr_scheduler.ReduceLROnPlateau):
        problem = (
            "follows a metric, and the engine schedules by the number of updates; build the engine "
            "without `schedule`, and step it on engine.optimizer yourself"
        )
    elif getattr(part, "cycle_momentum", False):
        problem = (
            "also changes the momentum, but the engine schedules only learning rates; build it "
            "with cycle_momentum=False"
        )
    elif getattr(part, "optimizer", optimizer) is not optimizer:
        problem = (
            "is built on another optimizer than the one that the function is called with, whose "
            f"learning rate would not change; use that one: {_EXAMPLE}"
        )
    else:
        return
    raise ConfigError("schedule", type(part).__name__, problem)


# The table first grows by FIRST_CHUNK rows, then doubles, and finally grows by CHUNK rows, so that
# short runs do not compute rows that they never use. Each growth is one host-to-device copy.
FIRST_CHUNK = 16
CHUNK = 1024
# How far below 0 rounding may put the last rate of a schedule that ends at 0 (LinearLR).
ROUNDING = 1e-12


class LearningRates:
    """The learning rate of every parameter group as a function of applied updates.

    Without a schedule the rates in the optimizer's groups are used as the user sets them.

    With a schedule, a torch scheduler runs ahead on a placeholder optimizer, and its rates are
    stored in a table on the device. A step indexes the table with the number of applied updates,
    which is on the device, too. So a skipped step does not advance the schedule, and the host need
    not know whether it was skipped. A checkpoint needs only that number.

    Args:
        optimizer: The optimizer; the rates of its groups are the base rates of the schedule.
        schedule: Function that builds a torch scheduler on an optimizer; None leaves the rates
            unchanged.
        device: Device of the table.
        on_device: With a schedule, make each group's rate a 0-dim FP32 tensor on `device`, for
            fused optimizers, updated in place; otherwise a Python number.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler] | None,
        device: torch.device,
        *,
        on_device: bool,
    ) -> None:
        self._optimizer = optimizer
        self._schedule: lr_scheduler.LRScheduler | None = None
        self._rows: list[list[float]] = []
        self._end: Exception | None = None  # of a schedule that has one
        self._device = device
        self._on_device = on_device
        # The rate that each group received last, and its version counter if it is a tensor.
        self._assigned: list[tuple[Any, int]] = []
        if schedule is not None:
            self._run_ahead(schedule)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        # Not stored: loading a state into the optimizer replaces the list.
        return self._optimizer.param_groups

    def _run_ahead(
        self, build: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
    ) -> None:
        """Build the schedule on a placeholder optimizer with the rates of the groups."""
        rates = [float(group["lr"]) for group in self._groups]
        for index, rate in enumerate(rates):
            _check_rate(index, rate)
        if self._on_device:
            for group, rate in zip(self._groups, rates, strict=True):
                group["lr"] = torch.full((), rate, dtype=torch.float32, device=self._device)
        self._placeholder = torch.optim.SGD(
            [{"params": [torch.zeros((), requires_grad=True)], "lr": rate} for rate in rates],
            lr=0.0,
        )
        self._schedule = build_schedule(build, self._placeholder)
        self._rows = [self._current_rates()]

    def set(self, applied: Tensor, at_most: int) -> Tensor | float:
        """Set the rates of the next update in all groups; return that of the first group.

        Args:
            applied: Number of applied updates, 0-dim int64 on the device.
            at_most: Upper bound of `applied` that the host knows; without `on_device` its exact
                value.

        Returns:
            The rate of the first group; with a schedule, FP32 and 0-dim on the device.

        Raises:
            ConfigError: If a rate is not a finite number of 0 or more, or was set outside of the
                schedule.
        """
        if self._schedule is None:
            for index, group in enumerate(self._groups):
                _check_rate(index, group["lr"])
            rate = self._groups[0]["lr"]
            if isinstance(rate, Tensor):  # of one element
                return rate.detach().reshape(()).to(self._device)
            return float(rate)
        count, known = len(self._groups), len(self._rows[0])
        if count != known:
            problem = (
                f"the schedule has rates for {known} groups; build a new engine for other groups"
            )
            raise ConfigError("optimizer.param_groups", count, problem)
        self._check_untouched()
        self._extend(at_most + 1)
        try:
            self._check_row(at_most)
        except ConfigError:
            # The bound counts skipped steps, too. The host waits for the number itself.
            self._check_row(int(applied))
        # Not table[applied]: indexing with a 0-dim tensor synchronizes with the host.
        rates = self._table.index_select(0, applied.reshape(1))[0]
        for index, group in enumerate(self._groups):
            if self._on_device:
                if not isinstance(group["lr"], Tensor):  # from a loaded state
                    group["lr"] = torch.empty_like(rates[index])
                group["lr"].copy_(rates[index])
            else:
                group["lr"] = self._rows[at_most][index]
        self._assigned = [(group["lr"], _version(group["lr"])) for group in self._groups]
        return rates[0]

    def planned(self, update: int) -> list[float]:
        """Return the rate of each group for an update; empty if the host has not computed it."""
        return self._rows[update] if update < len(self._rows) else []

    def _check_untouched(self) -> None:
        """Refuse rates that were set outside of the schedule since the last step."""
        for index, (rate, version) in enumerate(self._assigned):
            current = self._groups[index]["lr"]
            if current is rate and _version(current) == version:
                continue
            _check_rate(index, current)
            if current is not rate and float(current) == float(rate):  # from a loaded state
                continue
            raise ConfigError(
                f"optimizer.param_groups[{index}]['lr']",
                float(current),
                f"was set outside of the schedule ({type(self._schedule).__name__}), which sets "
                "the learning rate in every step; build the engine without `schedule` to set rates "
                "or step a torch scheduler on engine.optimizer yourself",
            )

    def _check_row(self, update: int) -> None:
        kind = type(self._schedule).__name__
        if update >= len(self._rows):
            problem = (
                f"has no learning rate for update {update + 1} ({self._end}); build it for all "
                "updates of the run (OneCycleLR: total_steps)"
            )
            raise ConfigError("schedule", kind, problem) from self._end
        for rate in self._rows[update]:
            problem = (
                f"gives the learning rate {rate:g} for update {update + 1}; it must be 0 or more, "
                "in the range of FP32, in every update of the run"
            )
            require(-ROUNDING <= rate <= _LARGEST, "schedule", kind, problem)

    def _extend(self, rows: int) -> None:
        """Compute at least this many rows and the one after them, unless the schedule ends."""
        if rows < len(self._rows) or self._end is not None:
            return
        target = rows + min(max(rows, FIRST_CHUNK), CHUNK)
        while len(self._rows) <= target:
            try:
                self._step_schedule()
                self._rows.append(self._current_rates())
            except ERRORS as error:  # it has an end, perhaps after the last update of the run
                self._end = error
                break
        self._table = numbers_to_device(self._rows, torch.float32, self._device)

    def _step_schedule(self) -> None:
        assert self._schedule is not None
        self._placeholder.step()
        with warnings.catch_warnings():
            # SequentialLR steps its schedulers in a way that torch warns about.
            warnings.filterwarnings("ignore", message=".*epoch parameter")
            self._schedule.step()

    def _current_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._placeholder.param_groups]


def _check_rate(index: int, rate: Any) -> None:
    """Refuse an invalid rate. The value of a tensor is not read, as that would synchronize."""
    if isinstance(rate, Tensor) and rate.numel() == 1:
        return
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    name = f"optimizer.param_groups[{index}]['lr']"
    problem = "use a float of 0 or more, in the range of FP32; convert other numbers by float(rate)"
    require(is_number and 0 <= rate <= _LARGEST, name, rate, problem)


def _version(rate: Any) -> int:
    return rate._version if isinstance(rate, Tensor) else 0
