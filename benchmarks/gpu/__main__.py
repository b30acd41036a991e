"""Run the tests and benchmarks for a GPU in slices: `python -m benchmarks.gpu`, see docs/gpu.md.

Runs all slices, the most important first, or one with `--slice N`. A slice takes at most 9 minutes.
Each job has a time limit; a job that fails or exceeds it does not stop the others. The output
directory gets a summary, and for each job its log, the outcomes of its tests and its measurements,
as soon as they exist. Exits with code 1 unless all jobs pass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import packages
from benchmarks.gpu.packages import ROOT
from benchmarks.gpu.slices import LARGE


def main() -> int:
    arguments = _arguments()
    if arguments.wheels is not None:
        packages.install(arguments.wheels)
    missing = packages.missing()
    if missing and not arguments.list:
        print(f"not installed: {', '.join(missing)}; use --wheels, see docs/gpu.md")
        return 1
    # Imported only now, because it imports packages that can come from wheels.
    from benchmarks.gpu import command

    return command.execute(arguments)


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--slice", type=int, help="run only this slice")
    options.add_argument("--only", nargs="*", default=[], help="run only these jobs")
    options.add_argument("--skip", nargs="*", default=[], help="run all jobs except these")
    options.add_argument("--size", default="350m", help="size of the trained models")
    options.add_argument(
        "--large", help=f"size for another comparison with peers (default: {LARGE} if it fits)"
    )
    options.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "gpu",
        help="directory for the summary, logs and results (default: build/gpu)",
    )
    options.add_argument(
        "--wheels", type=Path, help="directory with wheels of packages that are not installed"
    )
    options.add_argument("--list", action="store_true", help="list the jobs without running them")
    arguments = options.parse_args()
    arguments.output = arguments.output.resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
