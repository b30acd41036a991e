"""Lists or runs the chosen slices."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys

from benchmarks import figures
from benchmarks.gpu import processes
from benchmarks.gpu.jobs import Machine, run_slice
from benchmarks.gpu.results import PASSED, Result, Summary
from benchmarks.gpu.slices import LARGE, LARGE_BYTES, Slice, slices
from benchmarks.gpus import gpus


def execute(arguments: argparse.Namespace) -> int:
    """List or run the chosen slices; return the exit code."""
    chosen = _chosen(arguments)
    if arguments.list:
        print("\n".join(_listed(chosen)))
        return 0
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be created ({error.strerror}); name another directory"
        raise SystemExit(f"--output {arguments.output}: {problem}") from None
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
    chosen = {number: part for number, part in chosen.items() if part.jobs}
    if not chosen:
        raise SystemExit("--slice, --only and --skip leave no job; --list lists the jobs by slice")
    return chosen


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
