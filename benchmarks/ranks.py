"""Ranks of a benchmark: new processes that run measurements on request and answer with JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device import synchronize
from benchmarks.report import in_turns
from distmp.distributed.world import World, backend_for, leave, local_device


class RankError(SystemExit):
    """A rank could not run a measurement; ends the benchmark unless it skips the method."""


class Ranks:
    """Processes of one process group, which end with the context.

    Args:
        module: `python -m module` must call `serve` if its first argument is `--rank`.
        method: The method that the ranks measure.
        world_size: Number of ranks.
        environment: Environment variables for the processes.
        device: "cpu", or "cuda" for one GPU per rank; ranks share GPUs if there are too few.
    """

    def __init__(
        self,
        module: str,
        method: str,
        world_size: int,
        environment: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        store_file = Path(self._directory.name) / "store"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        # Variables that torchrun sets and frameworks read.
        environment |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        environment |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        command = [sys.executable, "-m", module, "--rank"]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), store_file, device, method],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._directory.cleanup()

    def ask(self, order: str) -> list[Any]:
        """Run the measurement `order` on every rank; return the answer of each.

        Raises:
            RankError: If a rank failed.
        """
        for process in self._processes:
            assert process.stdin is not None
            # A rank that has ended has no answer, below.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(order + "\n")
                process.stdin.flush()
        answers = [self._answer(process) for process in self._processes]
        for answer in answers:
            if "problem" in answer:
                raise RankError(answer["problem"])
        return [answer["found"] for answer in answers]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RankError("a rank ended early; see its messages above")
        return json.loads(line)


def largest(method: str, ranks: Ranks, order: str) -> Any:
    """Return the largest answer of all ranks, or None with a message if a rank failed."""
    try:
        return max(ranks.ask(order))
    except RankError as error:
        print(f"skipped: {method}, {order}: {error}", file=sys.stderr)
        return None


def take_turns(methods: Mapping[str, Ranks], order: str, rounds: int) -> dict[str, list[float]]:
    """Run `order` with each method once to warm up, then in turns.

    Returns:
        The largest answer of its ranks for each turn, by method, without methods that failed.
    """
    return in_turns(list(methods), rounds, lambda method: largest(method, methods[method], order))


def elapsed_together(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of `work` on all ranks in seconds; all ranks must call it."""

    def wait_for_all() -> None:
        synchronize(device)
        dist.barrier()

    wait_for_all()
    started = time.perf_counter()
    work()
    wait_for_all()
    return time.perf_counter() - started


def serve(make: Callable[[str, World], Callable[[str], Any]]) -> int:
    """Run a rank that was started by `Ranks`: answer orders until the end of input.

    Args:
        make: Called with the method and the process group; returns a function that answers orders.
    """
    _, rank, world_size, store_file, device_type, method = sys.argv[1:]
    # Redirect output of libraries to standard error, so that it does not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    device = local_device(int(rank)) if device_type == "cuda" else torch.device("cpu")
    store = dist.FileStore(store_file, int(world_size))  # type: ignore[attr-defined]
    dist.init_process_group(
        store=store,
        rank=int(rank),
        world_size=int(world_size),
        **backend_for(device, store, int(world_size)),
    )
    answer = functools.cache(lambda: make(method, World.current(device)))
    for order in _orders():
        result = _tried(lambda: answer()(order))  # noqa: B023 (called here)
        print(json.dumps(result), file=answers, flush=True)
    leave()
    return 0


def _tried(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": work()}
    except (RuntimeError, ValueError, AssertionError) as error:
        # Too large for this device, or not supported; other methods can still be measured.
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"}


def is_rank() -> bool:
    """Return whether this process was started by `Ranks`."""
    return sys.argv[1:2] == ["--rank"]


def _orders() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()
