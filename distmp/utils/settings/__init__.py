"""Converts settings from YAML files and the command line to frozen dataclasses, and back.

This package does not know concrete settings. The name of a setting is the dotted path of dataclass
fields (`optim.lr`), the same in the file, on the command line and in every message.
"""

from distmp.utils.settings.command_line import command_line
from distmp.utils.settings.convert import (
    from_mapping,
    leaf_names,
    to_mapping,
)
from distmp.utils.settings.yaml_files import read_yaml, write_yaml

__all__ = [
    "command_line",
    "from_mapping",
    "leaf_names",
    "read_yaml",
    "to_mapping",
    "write_yaml",
]
