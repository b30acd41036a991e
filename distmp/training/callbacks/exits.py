"""Context managers that a callback enters in one hook and leaves in another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def exit_context(manager: AbstractContextManager[Any], error: BaseException | None) -> None:
    """Leave a context manager as a `with` block does that ends with `error`, or without one."""
    traceback = None if error is None else error.__traceback__
    manager.__exit__(None if error is None else type(error), error, traceback)
