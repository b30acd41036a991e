"""`python -m distmp` is the `distmp` command."""

from __future__ import annotations

import sys

from distmp.cli import main

sys.exit(main())
