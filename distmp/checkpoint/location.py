"""Locations of checkpoints."""

from __future__ import annotations

from pathlib import Path

from distmp.errors import ConfigError

Location = Path


def locate(setting: str, text: str) -> Location:
    """Return the path that a setting names.

    Args:
        setting: Dotted name of the setting.
        text: Its value.

    Raises:
        ConfigError: If it is a URL.
    """
    if "://" in text:
        raise ConfigError(
            setting, text, "is a URL; name a directory, such as one where the store is mounted"
        )
    return Path(text)
