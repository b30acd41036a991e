"""`distmp report RUN_DIR`: write an HTML file about a run, or about two side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from distmp.errors import ConfigError
from distmp.utils.files import expanded, replacing
from distmp.utils.imports import require_package
from distmp.utils.settings.command_line import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and return the exit code.

    Raises:
        ConfigError: If matplotlib is not installed, a directory contains no run, or the file
            cannot be written.
    """
    parser = Parser(
        prog="distmp report",
        description="Write a self-contained HTML file about a run. Needs `distmp[report]`.",
    )
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("other", type=Path, nargs="?", help="directory of a run to compare it with")
    parser.add_argument("--to", type=Path, help="output file (default: RUN_DIR/report.html)")
    arguments = parser.parse_args(argv)
    require_package("command line", "report", "matplotlib", "report")
    from distmp.commands.report.page import RecordedRun, page

    runs = [RecordedRun.read(path) for path in (arguments.run_dir, arguments.other) if path]
    target = expanded(arguments.to or arguments.run_dir / "report.html")
    try:
        with replacing(target) as file:
            file.write(page(runs).encode())
    except OSError as error:
        raise ConfigError("--to", str(target), f"cannot be written ({error.strerror})") from None
    sys.stdout.write(f"{target}\n")
    return 0
