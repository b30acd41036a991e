"""Log lines of `distmp launch`."""

from __future__ import annotations

import contextlib
import shlex
import sys

from distmp.masking import masked_text


def log(message: str) -> None:
    """Print a line to standard error; ignore errors, because the terminal may be closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distmp launch: {masked_text(message)}\n")
        sys.stderr.flush()


def assignment(name: str, value: str) -> str:
    """Return how a shell sets a variable. Unquoted, `NAME==lo` looks wrong, and zsh expands it."""
    return f"{name}='{value}'" if value.startswith("=") else f"{name}={shlex.quote(value)}"
