"""The numbers of a step and of its microbatches, read without making the host wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from distmp.diagnosis.attribution import OverflowReport
from distmp.engine.low_precision_matmuls import MatmulStatistics
from distmp.utils.host_copy import HostCopy, cpu_number

# The engine warns after this many skipped steps in a row if the caller never calls `check`, and a
# checkpoint that is saved then counts as unhealthy.
WARN_AFTER_SKIPS = 10


class StepNumbers(NamedTuple):
    """The result of a step as Python numbers, the same on every rank.

    Attributes:
        loss: Mean loss over the global weight.
        weight: Global weight: the number of tokens or samples that the loss was summed over.
        grad_norm: Norm of the gradient of the mean loss before clipping; not finite on overflow.
        learning_rate: Learning rate of the first parameter group.
        loss_scale: Scale that backward ran with.
        overflow: Whether a gradient of any rank was not finite.
        dropped: Number of microbatches of all ranks that were dropped as non-finite.
        skipped: Whether the update was skipped: because of an overflow, a global weight of 0, a
            spike (if configured) or different settings of the ranks.
        spike: Whether loss or norm are above their limits.
        loss_limit: Loss above which a step is a spike; inf during warm-up.
        norm_limit: Norm above which a step is a spike; inf during warm-up.
        stop: Whether any rank requested to stop.
        applied_total: Number of updates since the start of training, this one included.
        skipped_total: Number of skipped steps since the start of training, this one included.
        skipped_in_a_row: Number of skipped steps since the last applied update.
        scale_exhausted: Whether the step overflowed and the loss scale cannot be lowered further.

    Example:
        >>> import torch, distmp
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(2, 1),
        ...     lambda module, batch: (module(batch).sum(), len(batch)),
        ...     lambda named: torch.optim.SGD(named, lr=0.5),
        ...     policy="fp32",
        ... )
        >>> numbers = engine.step([torch.ones(3, 2)]).numbers
        >>> numbers.weight, numbers.learning_rate, numbers.applied_total
        (3.0, 0.5, 1)
    """

    loss: float
    weight: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    overflow: bool
    dropped: int
    skipped: bool
    spike: bool
    loss_limit: float
    norm_limit: float
    stop: bool
    applied_total: int
    skipped_total: int
    skipped_in_a_row: int
    scale_exhausted: bool


_TYPES = get_type_hints(StepNumbers)
# Fields that are the elements of one tensor.
COUNTS = ("applied_total", "skipped_total", "skipped_in_a_row")


class StepOutcome:
    """The numbers of a step that may still be running on the device.

    Args:
        values: Numbers, and tensors of any shape on one device, by name, or by the names of the
            elements of a tensor.
        numbers: Returns the fields of `StepNumbers` from `values`, whose tensors are on the host
            then, in FP64.
        differ: Returns from `values` whether ranks took the step with different settings.

    Attributes:
        overflow_report: Why the step overflowed; None until `Engine.explain` has replayed the step.
        matmul_statistics: Statistics of low-precision matmuls; None without any.
        formats: The policy of `precision.phases` in this step; None without phases.

    Example:
        >>> outcome = StepOutcome({name: torch.tensor(1.0) for name in StepNumbers._fields})
        >>> outcome.numbers.loss
        1.0
    """

    overflow_report: OverflowReport | None = None
    matmul_statistics: MatmulStatistics | None = None
    formats: str | None = None

    def __init__(
        self,
        values: Mapping[Any, Tensor | float],
        numbers: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
        differ: Callable[[dict[str, Any]], bool] = lambda values: False,
    ) -> None:
        self._compute, self._differ = numbers, differ
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._values = {name: value for name, value in values.items() if name not in tensors}
        self._shapes = {name: value.shape for name, value in tensors.items()}
        # Concatenated into new memory, so that later steps may update the values in place.
        flat = [value.reshape(-1).to(torch.float64) for value in tensors.values()]
        self._copy = HostCopy(torch.cat(flat))

    def read(self, name: str) -> float:
        """Wait for the step and return the field `name` of `StepNumbers`."""
        value = self._on_host[name] if name in self._on_host else self._found[name]
        return cpu_number(value) if isinstance(value, Tensor) else value

    @cached_property
    def numbers(self) -> StepNumbers:
        """Wait for the step and return its numbers; no wait if read one step later."""
        return StepNumbers(**{name: kind(self.read(name)) for name, kind in _TYPES.items()})

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks took the step with different settings; such a step is skipped."""
        return self._differ(self._on_host)

    @cached_property
    def _found(self) -> Mapping[str, Any]:
        return self._compute(self._on_host.copy())

    @cached_property
    def _on_host(self) -> dict[str, Any]:
        parts = self._copy.tensor().split([shape.numel() for shape in self._shapes.values()])
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            several = isinstance(name, tuple)
            self._values |= zip(name, part, strict=True) if several else {name: part.view(shape)}
        return self._values


def advice(numbers: StepNumbers) -> str:
    """Return what to do about a skipped step whose overflow was not replayed."""
    if numbers.weight == 0:
        return (
            "the global weight is 0: no microbatch of any rank had a weight above 0; check that "
            "batches have targets that count (not -100), and the weights that loss returns"
        )
    if not math.isfinite(numbers.weight):
        return (
            f"the weights that the loss function returned add up to {numbers.weight:g}; return the "
            "number of samples or tokens of each microbatch, finite and not below 0"
        )
    if numbers.spike:
        return (
            f"{describe_spike(numbers)}; lower the learning rate, or raise the threshold of "
            "divergence if such steps are normal in this run"
        )
    scales = numbers.loss_scale != 1 or numbers.scale_exhausted
    remedy = "use a bf16 policy or a lower min_scale" if scales else "check the batch and the loss"
    return (
        f"loss {numbers.loss:.4g}, loss scale {numbers.loss_scale:g}; if the loss was rising, "
        f"lower the learning rate; otherwise {remedy}"
    )


def describe_spike(numbers: StepNumbers) -> str:
    """Return which of loss and norm are above their limits."""
    parts = []
    if numbers.loss > numbers.loss_limit:
        parts.append(f"loss {numbers.loss:.4g} is above its limit of {numbers.loss_limit:.4g}")
    if numbers.grad_norm > numbers.norm_limit:
        parts.append(f"norm {numbers.grad_norm:.4g} is above its limit of {numbers.norm_limit:.4g}")
    return " and ".join(parts)


@dataclass(frozen=True)
class MicrobatchStats:
    """Statistics of the microbatches of a step on this rank; each list has one entry for each.

    Attributes:
        losses: Loss sum of each microbatch, FP64 0-dim.
        loss_sums: Loss sum of each microbatch, FP64 0-dim; 0 if the microbatch was dropped.
        weights: Weight of each microbatch, 0-dim on the device, or a number that the host knows; 0
            if the microbatch was dropped.
        dropped: Whether each microbatch was dropped, 0-dim bool; empty if none can be dropped.
        streams: Key of the random numbers of each microbatch, see `seed_generators`.
    """

    losses: list[Tensor] = field(default_factory=list)
    loss_sums: list[Tensor] = field(default_factory=list)
    weights: list[Tensor | float] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)

    def add(self, loss: Tensor, weight: Tensor | float, kept: Tensor | None) -> None:
        """Add a microbatch.

        Args:
            loss: Loss sum, FP64 0-dim, detached; not written to afterwards.
            weight: Weight, 0-dim, or a number.
            kept: 0-dim bool, False drops the microbatch; None if microbatches cannot be dropped.
        """
        self.losses.append(loss)
        if kept is not None:
            loss = torch.where(kept, loss, 0.0)
            if not isinstance(weight, Tensor):
                weight = torch.full_like(kept, weight, dtype=torch.float64)
            weight = torch.where(kept, weight, 0)
            self.dropped.append(~kept)
        self.loss_sums.append(loss)
        self.weights.append(weight)
