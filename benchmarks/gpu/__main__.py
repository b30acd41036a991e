"""Run the tests and benchmarks for a GPU in slices: `python -m benchmarks.gpu`, see docs/gpu.md.

Runs all slices, the most important first, or one with `--slice N`. A slice takes at most 9 minutes.
Each job has a time limit; a job that fails or exceeds it does not stop the others. The output
folder gets a summary, and for each job its log, the outcomes of its tests and its measurements, as
soon as they exist. Exits with code 1 unless all jobs pass.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from benchmarks import figures
from benchmarks.gpu import packages, processes
from benchmarks.gpu.jobs import Machine, run_slice
from benchmarks.gpu.results import PASSED, Result, Summary
from benchmarks.gpu.slices import LARGE, LARGE_BYTES, Slice, slices
from distmp.commands.doctor.machine_info import gpus

ROOT = figures.ROOT


def main() -> int:
    arguments = _arguments()
    chosen = _chosen(arguments)
    if arguments.list:
        print("\n".join(_listed(chosen)))
        return 0
    if arguments.wheels is not None:
        packages.install(arguments.wheels)
    if missing := packages.missing():
        print(f"not installed: {', '.join(missing)}; use --wheels, see docs/gpu.md")
        return 1
    processes.adopt_orphans()
    # Ends the running job too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    summary = Summary(arguments.output)
    planned = {
        job.name: Result(number, job.name, job.limit)
        for number, part in chosen.items()
        for job in part.jobs
    }
    summary.put(*planned.values())
    machine = Machine.of_this_process()
    for number, part in chosen.items():
        print(f"slice {number}: {part.title}", flush=True)
        run_slice(part, machine, summary)
    if any(arguments.output.glob("*/*-cuda.json")):
        figures.main()
    results = [result for result in summary.results if result.job in planned]
    print(f"\n{Summary.text(results)}\nsummary and logs: {arguments.output}")
    return 0 if all(result.outcome == PASSED for result in results) else 1


def _chosen(arguments: argparse.Namespace) -> dict[int, Slice]:
    """Return the slices by number, with the chosen jobs."""
    every = slices(arguments.size, _large(arguments), arguments.output)
    if arguments.slice is not None and not 1 <= arguments.slice <= len(every):
        raise SystemExit(f"--slice {arguments.slice}: choose one of 1 to {len(every)}")
    names = {job.name for part in every for job in part.jobs}
    if unknown := {*arguments.only, *arguments.skip} - names:
        raise SystemExit(f"unknown jobs {', '.join(sorted(unknown))}; --list lists the jobs")
    wanted = set(arguments.only or names) - set(arguments.skip)
    chosen = {
        number: part._replace(jobs=tuple(job for job in part.jobs if job.name in wanted))
        for number, part in enumerate(every, start=1)
        if arguments.slice in (None, number)
    }
    return {number: part for number, part in chosen.items() if part.jobs}


def _large(arguments: argparse.Namespace) -> str | None:
    """Return the size of the larger model; None if the GPU is too small for the default."""
    if arguments.large is not None:
        return str(arguments.large)
    sizes = [gpu.memory_bytes for gpu in gpus() if gpu.memory_bytes]
    if sizes and max(sizes) < LARGE_BYTES:
        print(f"peers_large is omitted: size {LARGE} needs a GPU with {LARGE_BYTES >> 30} GiB")
        return None
    return LARGE


def _listed(chosen: dict[int, Slice]) -> list[str]:
    lines = []
    for number, part in chosen.items():
        seconds = sum(job.limit for job in part.jobs)
        lines.append(f"slice {number}: {part.title} (at most {seconds} s)")
        lines += [
            f"  {job.name} (at most {job.limit} s): python -m {shlex.join(job.arguments)}"
            for job in part.jobs
        ]
    return lines


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
        help="folder for the summary, logs and results (default: build/gpu)",
    )
    options.add_argument(
        "--wheels", type=Path, help="folder with wheels of packages that are not installed"
    )
    options.add_argument("--list", action="store_true", help="list the jobs without running them")
    arguments = options.parse_args()
    arguments.output = arguments.output.resolve()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
