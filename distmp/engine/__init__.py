"""The engine: mixed-precision optimizer steps over all ranks, for any training loop."""

from distmp.engine.engine import Engine

__all__ = ["Engine"]
