"""Command `distmp presets`: lists the configurations that are part of the package."""

from __future__ import annotations

import sys

from distmp.utils.files import PRESET_PREFIX, preset_directory, preset_names, preset_purpose
from distmp.utils.settings.command_line import Parser
from distmp.utils.units import text_table


def main(argv: list[str]) -> int:
    """List the presets, one per line, and return the exit code."""
    Parser("distmp presets", description="List the presets of `--config`.").parse_args(argv)
    rows = [(f"{PRESET_PREFIX}{name}", preset_purpose(name)) for name in preset_names()]
    sys.stdout.writelines(f"{line}\n" for line in text_table(rows))
    sys.stdout.write(
        "\nUse one with `--config preset:NAME`, or copy and edit its file. The files are in:\n"
        f"{preset_directory()}\n"
    )
    return 0
