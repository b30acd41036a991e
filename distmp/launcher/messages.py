"""Log lines of `distmp launch`."""

from __future__ import annotations

import contextlib
import sys


def log(message: str) -> None:
    """Print a line to standard error; ignore errors, because the terminal may be closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distmp launch: {message}\n")
        sys.stderr.flush()
