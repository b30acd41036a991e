"""The engine: mixed-precision optimizer steps over all ranks, for any training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = ["Engine"]

if TYPE_CHECKING:
    from distmp.engine.engine import Engine
else:
    __getattr__ = lazy_names(__name__, {"distmp.engine.engine": ("Engine",)})
