"""Ranks of a benchmark: fresh processes that wait for orders and answer with JSON."""

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
    """A rank could not do what it was asked; ends the benchmark unless it leaves that way out."""


class Ranks:
    """Processes that form one group; ended when the context is left.

    Args:
        module: `python -m module` has to call `serve` when its first argument is `--rank`.
        way: Which of its ways the ranks follow.
        world_size: Number of ranks.
        environment: Variables for the processes.
        device: "cpu", or "cuda" for a GPU each, which ranks share where there are too few.
    """

    def __init__(
        self,
        module: str,
        way: str,
        world_size: int,
        environment: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = Path(self._folder.name) / "meeting"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        # What torchrun sets, and frameworks look for.
        environment |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        environment |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        command = [sys.executable, "-m", module, "--rank"]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), meeting, device, way],
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
        self._folder.cleanup()

    def ask(self, order: str) -> list[Any]:
        """Have every rank do `order`; return the answer of each.

        Raises:
            RankError: If a rank could not do it.
        """
        for process in self._processes:
            assert process.stdin is not None
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
            raise RankError("a rank ended early; its messages stand above")
        return json.loads(line)


def largest(way: str, ranks: Ranks, order: str) -> Any:
    """Return the largest answer of all ranks; None, and said so, if they could not do it."""
    try:
        return max(ranks.ask(order))
    except RankError as error:
        print(f"left out: {way}, {order}: {error}", file=sys.stderr)
        return None


def take_turns(ways: Mapping[str, Ranks], order: str, rounds: int) -> dict[str, list[float]]:
    """Have each way do `order` once to warm up, then in turns.

    Returns:
        The largest answer of its ranks for each turn, by way, without ways that could not do it.
    """
    return in_turns(list(ways), rounds, lambda way: largest(way, ways[way], order))


def elapsed_together(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work` on all ranks, all of which call it with idle devices around."""

    def meet() -> None:
        synchronize(device)
        dist.barrier()

    meet()
    started = time.perf_counter()
    work()
    meet()
    return time.perf_counter() - started


def serve(make: Callable[[str, World], Callable[[str], Any]]) -> int:
    """Be a rank that `Ranks` has started: answer orders until the end of input.

    Args:
        make: Called with the way and the world; returns what answers an order.
    """
    _, rank, world_size, meeting, device_type, way = sys.argv[1:]
    # Whatever a library prints goes where messages go, and not among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    device = local_device(int(rank)) if device_type == "cuda" else torch.device("cpu")
    dist.init_process_group(
        init_method=f"file://{meeting}",
        rank=int(rank),
        world_size=int(world_size),
        **backend_for(device, int(world_size)),
    )
    answer = functools.cache(lambda: make(way, World.current(device)))
    for order in _orders():
        found = _tried(lambda: answer()(order))  # noqa: B023 (called here)
        print(json.dumps(found), file=answers, flush=True)
    leave()
    return 0


def _tried(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": work()}
    except (RuntimeError, ValueError, AssertionError) as error:
        # Too large for this device, or not made for it; other ways can still be measured.
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"}


def is_rank() -> bool:
    """Return whether this process is one that `Ranks` has started."""
    return sys.argv[1:2] == ["--rank"]


def _orders() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()
