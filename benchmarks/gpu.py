"""Run all tests and benchmarks for a GPU, the most important first: `python -m benchmarks.gpu`.

It runs the tests marked `gpu`, then the benchmarks with `--device cuda`, in 25 minutes. Each has a
time limit and saves its result immediately. A job that fails or takes too long does not stop the
others, and is reported at the end, with exit code 1. `--only` and `--skip` take names of `--list`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distmp.commands.doctor.machine_info import gpus

LARGE = "1.3b"
# Several loops with a model of that size are in the memory of the GPU at once.
LARGE_BYTES = 120 * 2**30


class Job(NamedTuple):
    """A test or benchmark to run.

    Attributes:
        name: Name for `--only` and `--skip`.
        arguments: Arguments of `python -m`.
        limit: Time limit in seconds.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float


def jobs(size: str, large: str | None) -> list[Job]:
    """Return the jobs, the most important first.

    Args:
        size: Size of the trained models.
        large: Size of a model for an additional comparison with peers in bfloat16; None omits it.
    """
    todo = [
        Job("tests", ("pytest", "-m", "gpu", "-q"), 420),
        _benchmark("peers", 480, "--size", size),
        _benchmark("step_tail", 60),
        _benchmark("policies", 240, "--size", size),
        _benchmark("accumulation_step", 360, "--size", size, "--rounds", "5"),
        _benchmark("accumulation_microbatches", 300),
        _benchmark("accumulation_passes", 60, "--size", size),
        _benchmark("accumulation_error", 120),
        _benchmark("precision", 120),
        _benchmark("loss", 120),
        _benchmark("activation_checkpointing", 60),
    ]
    if large is not None:
        races = ("--races", "ddp bf16", "fsdp bf16")
        todo.append(_benchmark("peers", 480, "--size", large, *races, name=f"peers-{large}"))
    return todo


def _benchmark(module: str, limit: float, *options: str, name: str | None = None) -> Job:
    return Job(name or module, (f"benchmarks.{module}", "--device", "cuda", *options), limit)


def run_all(
    todo: Sequence[Job], seconds: float, run: Callable[[Job, float], str | None]
) -> dict[str, str]:
    """Run jobs in order; a failure does not stop the others.

    Args:
        todo: The jobs, the most important first.
        seconds: Time limit for all jobs; jobs after the limit do not start.
        run: Runs a job with a time limit in seconds; returns an error message, or None.

    Returns:
        The error messages by name of the job.
    """
    end = time.monotonic() + seconds
    problems = {}
    for job in todo:
        left = end - time.monotonic()
        problem = run(job, min(job.limit, left)) if left > 0 else "no time was left"
        if problem is not None:
            problems[job.name] = problem
    return problems


def run(job: Job, limit: float) -> str | None:
    """Run a job and end its processes afterwards; return an error message, or None."""
    print(
        f"=== {job.name}: python -m {' '.join(job.arguments)} (at most {limit:.0f} s)", flush=True
    )
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *job.arguments],
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # no output is lost when it is killed
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit:.0f} s"
    finally:
        # Ranks of a benchmark are in its session, and would continue to use the GPU.
        _end(process)
        print(f"=== {job.name}: {time.monotonic() - started:.0f} s", flush=True)
    return f"ended with exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # no process is left
    finally:
        process.wait()


def main() -> int:
    arguments = _arguments()
    todo = [
        job
        for job in jobs(arguments.size, arguments.large or _large())
        if job.name not in arguments.skip and job.name in (arguments.only or [job.name])
    ]
    if arguments.list:
        print("\n".join(f"{job.name}: at most {job.limit:.0f} s" for job in todo))
        return 0
    problems = run_all(todo, 60 * arguments.minutes, run)
    problems |= run_all([Job("figures", ("benchmarks.figures",), 60)], 60, run)
    for name, problem in problems.items():
        print(f"{name} {problem}")
    if not problems:
        print("all jobs succeeded; see benchmarks/results and the tables in docs/gpu.md")
    return 1 if problems else 0


def _large() -> str | None:
    """Return the size of the larger model, if the GPU has enough memory."""
    return LARGE if any((gpu.memory_bytes or 0) >= LARGE_BYTES for gpu in gpus()) else None


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", default="350m", help="size of the trained models")
    options.add_argument(
        "--large", help=f"size for one more comparison with peers (default: {LARGE} if it fits)"
    )
    options.add_argument("--minutes", type=float, default=25, help="time limit for all jobs")
    options.add_argument("--only", nargs="*", default=[], help="run only these jobs")
    options.add_argument("--skip", nargs="*", default=[], help="run all jobs except these")
    options.add_argument("--list", action="store_true", help="list the jobs without running them")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
