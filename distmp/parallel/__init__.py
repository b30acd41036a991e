"""Strategies: how parameters and gradients are distributed over ranks."""

from distmp.parallel.settings import ParallelConfig

__all__ = ["ParallelConfig"]
