"""Log lines of `distmp launch`."""

from __future__ import annotations

import contextlib
import sys

from distmp.masking import masked_text


def log(message: str) -> None:
    """Print a line to standard error; ignore errors, because the terminal may be closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distmp launch: {masked_text(message)}\n")
        sys.stderr.flush()
