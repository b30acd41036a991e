"""Parses the arguments of subcommands; an invalid one is a `ConfigError`."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser
from typing import NoReturn

from distmp.errors import ConfigError


class Parser(ArgumentParser):
    """Parser that raises a `ConfigError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigError` with the arguments."""
        raise ConfigError(self.prog, shlex.join(sys.argv[2:]), message)
