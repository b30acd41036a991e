"""Command `distmp presets`: lists the configurations that are part of the package."""

from __future__ import annotations

import sys

from distmp.utils.files import PRESET_PREFIX, preset_directory, preset_names, preset_purpose
from distmp.utils.settings.command_line import Parser


def main(argv: list[str]) -> int:
    """List the presets, one per line, and return the exit code."""
    Parser("distmp presets", description="List the presets of `--config`.").parse_args(argv)
    names = preset_names()
    width = max(map(len, names), default=0)
    lines = [f"{PRESET_PREFIX}{name:{width}}  {preset_purpose(name)}\n" for name in names]
    sys.stdout.write("".join(lines))
    sys.stdout.write(
        "\nUse one with `--config preset:NAME`, or copy and edit its file. The files are in:\n"
        f"{preset_directory()}\n"
    )
    return 0
