"""Imports public names of a package at their first use, because importing torch takes seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package.

    Args:
        package: Name of the package.
        names: Public names by the module that defines them. None of them is the name of a module of
            the package, which would hide it.
    """
    modules = {name: module for module, defined in names.items() for name in defined}

    def __getattr__(name: str) -> object:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
