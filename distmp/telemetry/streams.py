"""Handle output streams that fail: a closed pipe, a closed terminal, or a full disk."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, TextIO

logger = logging.getLogger("distmp")


class PersistentStream:
    """A text stream on which writes never fail.

    The first error is logged once. All later output to the stream's file is discarded, including
    that of other code.

    Attributes:
        wrapped: The wrapped stream.
    """

    def __init__(self, wrapped: TextIO) -> None:
        self.wrapped = wrapped

    def write(self, text: str) -> int:
        """Write a text, or discard it; return its length."""
        try:
            return self.wrapped.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self.wrapped.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def _lose(self, error: OSError) -> None:
        discard(self.wrapped)
        logger.warning(
            "the output of this run cannot be written any more (%s); training continues, see its "
            "step records",
            error.strerror,
        )


def discard(stream: TextIO) -> None:
    """Redirect a stream's file to the null device.

    This also discards the stream's buffer and output of other code to the same file: otherwise the
    interpreter's last flush would fail and change the exit code.
    """
    # A stream without a file has nothing to flush at exit.
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def flush_standard_streams() -> None:
    """Flush standard output and error; discard output that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)
