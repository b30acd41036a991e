"""Standard output and error whose reader may be gone: a closed pipe, terminal, or a full disk."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, TextIO

logger = logging.getLogger("distmp")


class PersistentStream:
    """A text stream to which writing never fails.

    When its file takes nothing more, that is logged once, and everything written to the file from
    then on is discarded, by whomever.

    Attributes:
        wrapped: The stream itself.
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
        """Hand what was written to the file."""
        try:
            self.wrapped.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def _lose(self, error: OSError) -> None:
        discard(self.wrapped)
        logger.warning(
            "what this run prints reaches nobody any more (%s); it goes on, and its records have "
            "everything",
            error.strerror,
        )


def discard(stream: TextIO) -> None:
    """Send everything that is still written to a stream's file to the null device.

    Also what the stream holds back, and what others write to the same file: the interpreter's last
    flush would fail otherwise, and change the exit code.
    """
    # A stream without a file keeps nothing back that somebody would write later.
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def flush_standard_streams() -> None:
    """Flush standard output and error; discard what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)
