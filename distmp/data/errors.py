"""The error of data that went wrong after the run had started."""

from __future__ import annotations

from distmp.errors import DistmpError


class DataError(DistmpError, RuntimeError):
    """A sample that cannot be read: its file is gone, has changed or holds impossible values.

    It takes one argument, the message, so that it survives the way out of a loader's worker.
    """
