"""The state of a schedule that follows a metric, and what changes when groups are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

# What a scheduler has learned from the metrics, in the order in which it is stored.
_LEARNED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def learned(schedule: ReduceLROnPlateau) -> Tensor:
    """Return what a scheduler has learned from the metrics, FP64, shape (4,)."""
    return torch.tensor([getattr(schedule, name) for name in _LEARNED], dtype=torch.float64)


def load_learned(schedule: ReduceLROnPlateau, values: Tensor) -> None:
    """Set what `learned` has returned."""
    best, *counts = values.tolist()
    schedule.best = best
    for name, count in zip(_LEARNED[1:], counts, strict=True):
        setattr(schedule, name, int(count))


def rates_after_reductions(rates: Sequence[float], base_rates: Sequence[float]) -> list[float]:
    """Return the rates of all groups if the last ones are new: they get the reductions so far.

    Args:
        rates: Rates of the groups that existed before.
        base_rates: Rates of all groups before any reduction.
    """
    reduction = rates[0] / base_rates[0] if base_rates[0] else 1.0
    return [*rates, *(rate * reduction for rate in base_rates[len(rates) :])]
