"""All that a GPU is to show, the most important first: `python -m benchmarks.gpu`.

The tests marked `gpu`, then the benchmarks with `--device cuda`, in 25 minutes. Each has a time
limit and keeps its result as soon as it has it; what fails or takes too long does not keep the
others from running, and is named at the end, with exit code 1. `--only` and `--skip` take names of
`--list`.
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
# Several loops, each with a model of that size, are in the memory of the GPU at once.
LARGE_BYTES = 120 * 2**30


class Job(NamedTuple):
    """One thing to run.

    Attributes:
        name: For `--only` and `--skip`.
        arguments: Behind `python -m`.
        limit: Seconds it may take.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float


def jobs(size: str, large: str | None) -> list[Job]:
    """Return what to run, the most important first.

    Args:
        size: Of the models that are trained.
        large: Of the model that is only raced against peers in bfloat16, at the end; None: none.
    """
    found = [
        Job("tests", ("pytest", "-m", "gpu", "-q"), 420),
        _benchmark("peers", 480, "--size", size),
        _benchmark("step_tail", 60),
        _benchmark("policies", 240, "--size", size),
        _benchmark("accumulation_step", 360, "--size", size, "--rounds", "5"),
        _benchmark("accumulation_microbatches", 300),
        _benchmark("accumulation_passes", 60, "--size", size),
        _benchmark("accumulation_error", 120),
        _benchmark("precision", 120),
    ]
    if large is not None:
        races = ("--races", "ddp bf16", "fsdp bf16")
        found.append(_benchmark("peers", 480, "--size", large, *races, name=f"peers-{large}"))
    return found


def _benchmark(module: str, limit: float, *options: str, name: str | None = None) -> Job:
    return Job(name or module, (f"benchmarks.{module}", "--device", "cuda", *options), limit)


def run_all(
    todo: Sequence[Job], seconds: float, run: Callable[[Job, float], str | None]
) -> dict[str, str]:
    """Run jobs one after the other; what fails keeps none from running.

    Args:
        todo: The most important first.
        seconds: For all of them; jobs that find no time left are not begun.
        run: Runs a job for so many seconds at the most; returns what went wrong, or None.

    Returns:
        What went wrong, by the name of the job.
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
    """Run a job; return what went wrong, or None. Its processes are ended with it."""
    print(
        f"=== {job.name}: python -m {' '.join(job.arguments)} (at most {limit:.0f} s)", flush=True
    )
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *job.arguments],
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # what it says is there when it is ended
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit:.0f} s"
    finally:
        # Ranks of a benchmark are in its session, and would go on using the GPU.
        _end(process)
        print(f"=== {job.name}: {time.monotonic() - started:.0f} s", flush=True)
    return f"ended with exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nobody is left
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
        print("all of it ran; the results are in benchmarks/results, the figures in docs/gpu.md")
    return 1 if problems else 0


def _large() -> str | None:
    """Return the size of the larger model, if the GPU has the memory for it."""
    return LARGE if any((gpu.memory_bytes or 0) >= LARGE_BYTES for gpu in gpus()) else None


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--size", default="350m", help="of the models that are trained")
    made.add_argument("--large", help=f"of one more race against peers ({LARGE} if memory admits)")
    made.add_argument("--minutes", type=float, default=25, help="for all of it")
    made.add_argument("--only", nargs="*", default=[], help="run these")
    made.add_argument("--skip", nargs="*", default=[], help="run all but these")
    made.add_argument("--list", action="store_true", help="say what would run")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
