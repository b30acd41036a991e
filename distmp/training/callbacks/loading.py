"""Callbacks that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from distmp.errors import ConfigError
from distmp.training.callbacks.callback import Callback
from distmp.utils.imports import load_object


def load_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Call what each import path names, without arguments, and return the callbacks.

    Args:
        paths: The setting `callbacks`: `package.module:callable`.

    Raises:
        ConfigError: If a path names nothing that returns a `Callback`.
    """
    return [_load(path) for path in paths]


def _load(path: str) -> Callback:
    factory = load_object("callbacks", path)
    if not callable(factory):
        raise ConfigError(
            "callbacks", path, f"is a {type(factory).__name__}; name a class or a function"
        )
    callback = factory()
    if not isinstance(callback, Callback):
        raise ConfigError(
            "callbacks",
            path,
            f"returned a {type(callback).__name__}; return a distmp.training.callbacks.Callback",
        )
    return callback
