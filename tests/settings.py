"""Names of the settings of a configuration."""

from __future__ import annotations

from typing import Any

from distmp.utils.settings import setting_annotations


def leaf_names(cls: type[Any]) -> list[str]:
    """Return the dotted names of all settings of `cls`, without sections."""
    names = setting_annotations(cls)
    sections = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name not in sections]
