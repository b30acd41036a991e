"""Optimizers and schedules by name; learning rates as a function of applied updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = ["AdamW", "Muon"]

if TYPE_CHECKING:
    from distmp.optim.adamw import AdamW
    from distmp.optim.muon import Muon
else:
    __getattr__ = lazy_names(
        __name__, {"distmp.optim.adamw": ("AdamW",), "distmp.optim.muon": ("Muon",)}
    )
