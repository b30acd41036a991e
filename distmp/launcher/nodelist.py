"""Expand Slurm's lists of machines: `n[01-03,7],login` is n01, n02, n03, n7 and login.

`scontrol show hostnames` does the same, but it needs Slurm's tools and configuration, which the
container of a step often lacks, and it reads a truncated list without an error (`n[` becomes `n]`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from distmp.errors import ConfigError

# No job has more machines; a corrupt list must not exhaust memory.
_MOST_NODES = 100_000
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


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
    end = 0
    while end <= len(text):
        item = _ITEM.match(text, end)
        if item is None or (item.end() < len(text) and text[item.end()] != ","):
            raise _not_a_list(setting, text)
        names += _expand_name(item[0], setting, text)
        if len(names) > _MOST_NODES:
            raise _not_a_list(setting, text)
        end = item.end() + 1
    return names


def _expand_name(item: str, setting: str, text: str) -> Iterator[str]:
    pieces = []
    count = 1
    for numbers, plain in _PIECE.findall(item):
        pieces.append([plain] if plain else _expand_numbers(numbers, setting, text))
        count *= len(pieces[-1])
        if count > _MOST_NODES:
            raise _not_a_list(setting, text)
    return map("".join, itertools.product(*pieces))


def _expand_numbers(numbers: str, setting: str, text: str) -> list[str]:
    expanded: list[str] = []
    for part in numbers.split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None:
            raise _not_a_list(setting, text)
        first, last = bounds[1], bounds[2] or bounds[1]
        if not int(first) <= int(last) < int(first) + _MOST_NODES:
            raise _not_a_list(setting, text)
        expanded += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return expanded


def _not_a_list(setting: str, text: str) -> ConfigError:
    return ConfigError(setting, text, "is not a list of machines such as n[01-03,7],login")
