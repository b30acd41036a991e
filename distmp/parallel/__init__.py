"""Strategies: how parameters and gradients are distributed over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = [
    "STRATEGIES",
    "AccumulationSettings",
    "ParallelConfig",
    "Strategy",
    "build_strategy",
    "resolve_strategy",
]

if TYPE_CHECKING:
    from distmp.parallel.build import build_strategy, resolve_strategy
    from distmp.parallel.settings import STRATEGIES, AccumulationSettings, ParallelConfig
    from distmp.parallel.strategy import Strategy
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "distmp.parallel.build": ("build_strategy", "resolve_strategy"),
            "distmp.parallel.settings": ("STRATEGIES", "AccumulationSettings", "ParallelConfig"),
            "distmp.parallel.strategy": ("Strategy",),
        },
    )
