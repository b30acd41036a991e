"""`python -m distmp` is the `distmp` command."""

from __future__ import annotations

from distmp.cli import run

run()
