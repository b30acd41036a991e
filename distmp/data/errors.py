"""The error for data that cannot be read after the run has started."""

from __future__ import annotations

from distmp.errors import DistmpError


class DataError(DistmpError, RuntimeError):
    """A sample cannot be read: its file is missing, has changed or holds impossible values.

    Args:
        message: The only argument, so that the error can be pickled in a worker of the loader. The
            loader adds a traceback before it, which is removed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())
