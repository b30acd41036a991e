"""The error for data that cannot be read after the run has started."""

from __future__ import annotations

from distmp.errors import DistmpError


class DataError(DistmpError, RuntimeError):
    """A sample cannot be read: its file is missing, has changed or holds impossible values.

    The message is the only argument, so that the error can be pickled in a worker of the loader.
    """
