"""Entries of a setting that lists names, some of them with options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distmp.errors import ConfigError


class Entry(NamedTuple):
    """An entry, written as NAME or as {name: NAME, options: {OPTION: VALUE}}.

    Attributes:
        name: The name, or an import path.
        options: Keyword arguments.
    """

    name: str
    options: dict[str, Any]


def parse_entries(
    setting: str, entries: Sequence[str | dict[str, Any]], notation: str
) -> list[Entry]:
    """Return the entries of a setting.

    Args:
        setting: Dotted name of the setting.
        entries: Its value.
        notation: How to write an entry, for messages.

    Raises:
        ConfigError: If an entry has other keys than `name` and `options`, or values of other types.
    """
    return [
        Entry(entry, {})
        if isinstance(entry, str)
        else _parse(f"{setting}[{index}]", entry, notation)
        for index, entry in enumerate(entries)
    ]


def _parse(setting: str, entry: dict[str, Any], notation: str) -> Entry:
    for key in entry:
        if key not in ("name", "options"):
            raise ConfigError(f"{setting}.{key}", entry[key], f"unknown setting; {notation}")
    name, options = entry.get("name"), entry.get("options") or {}
    if not isinstance(name, str):
        raise ConfigError(f"{setting}.name", name, f"must be an import path; {notation}")
    if not isinstance(options, dict):
        raise ConfigError(f"{setting}.options", options, "must be a section of 'name: value' lines")
    return Entry(name, options)
