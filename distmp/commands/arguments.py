"""Parses the arguments of subcommands; an invalid one is a `ConfigError`."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from typing import NoReturn

from distmp.errors import ConfigError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Parser(ArgumentParser):
    """Parser that raises a `ConfigError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigError` with the arguments."""
        raise ConfigError(self.prog, " ".join(sys.argv[2:]), message)


def byte_size(option: str, text: str) -> int:
    """Return a size in bytes. Units are decimal and have an upper-case B, as in transformers.

    Args:
        option: Name of the option, for the error message.
        text: Such as "500MB".

    Raises:
        ConfigError: If the text is not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]B)", text)
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size == 0:
        raise ConfigError(option, text, "use a number with KB, MB, GB or TB, such as 500MB")
    return size
