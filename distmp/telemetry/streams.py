"""Standard output and error whose reader may be gone: a closed pipe, terminal, or a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


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
