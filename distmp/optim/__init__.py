"""Optimizers and schedules by name; learning rates as a function of applied updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = [
    "AdamW",
    "LearningRates",
    "Muon",
    "NamedParameters",
    "OptimizerFactory",
    "ScheduleFactory",
]

if TYPE_CHECKING:
    from distmp.optim.adamw import AdamW
    from distmp.optim.factories import NamedParameters, OptimizerFactory, ScheduleFactory
    from distmp.optim.learning_rates import LearningRates
    from distmp.optim.muon import Muon
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "distmp.optim.adamw": ("AdamW",),
            "distmp.optim.factories": ("NamedParameters", "OptimizerFactory", "ScheduleFactory"),
            "distmp.optim.learning_rates": ("LearningRates",),
            "distmp.optim.muon": ("Muon",),
        },
    )
