"""What `distmp launch` says on the way."""

from __future__ import annotations

import contextlib
import sys


def say(message: str) -> None:
    """Print a line to standard error; whoever was to read it may have gone, with the terminal."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distmp launch: {message}\n")
        sys.stderr.flush()
