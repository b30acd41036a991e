"""The numbers of a step, read without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from distmp.diagnosis.attribution import OverflowReport


class StepNumbers(NamedTuple):
    """What a step did, as plain numbers; the same on every rank.

    Attributes:
        loss: Mean loss over the global weight.
        weight: Global weight: tokens or samples that the loss was summed over.
        grad_norm: Norm of the gradient of the mean loss before clipping; not finite on overflow.
        learning_rate: Of the first parameter group.
        loss_scale: Scale that backward ran with.
        overflow: A gradient of some rank was not finite.
        dropped: Microbatches of all ranks that were left out because they were not finite.
        skipped: The weights were left alone: because of an overflow, for lack of any weight, or
            because the divergence guard is told to leave such a step out.
        spike: Loss or norm are above their limits.
        loss_limit: What the divergence guard takes for a spike of the loss; inf where it does not
            judge.
        norm_limit: The same for the norm.
        stop: Some rank asked to stop.
        applied_total: Updates applied since the beginning, this one included.
        skipped_total: Steps skipped since the beginning, this one included.
        skipped_in_a_row: Steps skipped since the last applied one.
        scale_exhausted: There was an overflow, and the loss scale can sink no further.

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


class StepOutcome:
    """The numbers of a step that may still be running on the device.

    Args:
        numbers: A 0-dim tensor for each field of `StepNumbers`, all on one device.
        ranks_differ: Whether ranks took the step with different settings, 0-dim bool; None: no.

    Attributes:
        overflow_report: Why the step overflowed, once `Engine.explain` has found out.

    Example:
        >>> outcome = StepOutcome({name: torch.tensor(1.0) for name in StepNumbers._fields})
        >>> outcome.numbers.loss
        1.0
    """

    overflow_report: OverflowReport | None = None

    def __init__(self, numbers: Mapping[str, Tensor], ranks_differ: Tensor | None = None) -> None:
        values = [numbers[name] for name in StepNumbers._fields]
        values.append(torch.zeros_like(values[0]) if ranks_differ is None else ranks_differ)
        packed = torch.stack([value.to(torch.float64) for value in values])
        self._packed = packed.to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event() if packed.is_cuda else None
        if self._ready is not None:
            self._ready.record(torch.cuda.current_stream(packed.device))

    def read(self, name: str) -> float:
        """Wait for the step and return one of its numbers, of the name in `StepNumbers`."""
        return self._values[StepNumbers._fields.index(name)]

    @cached_property
    def numbers(self) -> StepNumbers:
        """Wait for the step and return its numbers; free when read one step later."""
        kinds = get_type_hints(StepNumbers)
        *values, _ = self._values
        return StepNumbers(
            **{
                name: kinds[name](value)
                for name, value in zip(StepNumbers._fields, values, strict=True)
            }
        )

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks took the step with different settings; it was skipped then."""
        return bool(self._values[-1])

    @cached_property
    def _values(self) -> list[float]:
        if self._ready is not None:
            self._ready.synchronize()
        return self._packed.tolist()
