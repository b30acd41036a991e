"""The engine: one mixed-precision optimizer step over all ranks, in people's own loops."""

from distmp.engine.engine import Engine

__all__ = ["Engine"]
