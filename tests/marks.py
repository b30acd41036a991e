"""Marks of single parameters of a test."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def nightly(*values: object) -> ParameterSet:
    """Return a parameter whose test is left to `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.nightly)
