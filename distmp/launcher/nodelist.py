"""Expand Slurm's lists of machines: `n[01-03,7],login` is n01, n02, n03, n7 and login.

`scontrol show hostnames` does the same, but it needs Slurm's tools and configuration, which the
container of a step often lacks, and it reads a truncated list without an error (`n[` becomes `n]`).
"""

from __future__ import annotations

import itertools
import re

from distmp.errors import ConfigError

_NUMBERS = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_NAME = rf"(?:[^\[\],\s]|{_NUMBERS})+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*")


def expand(text: str, *, setting: str) -> list[str]:
    """Return the machines of a list in the order of `scontrol show hostnames`.

    Args:
        text: The list. Numbers in brackets keep their leading zeros. Several brackets in a name
            form a product in which the last one varies fastest.
        setting: The variable that contains the list, for error messages.

    Raises:
        ConfigError: If the text is not such a list.
    """
    names: list[str] = []
    for name in re.findall(_NAME, text) if _LIST.fullmatch(text) else [""]:
        pieces = re.split(r"\[(.*?)\]", name)  # the odd ones were in brackets
        choices = [_numbers(piece) if n % 2 else [piece] for n, piece in enumerate(pieces)]
        if not name or not all(choices):
            raise ConfigError(setting, text, "is not a list of machines such as n[01-03,7],login")
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ranges; none if a range ends before it begins."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found = [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
        if not found:
            return []
        numbers += found
    return numbers
