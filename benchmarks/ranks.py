"""Ranks of a benchmark: fresh processes over gloo that wait for orders and answer with JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distmp.parallel.world import World, leave


class Ranks:
    """Processes that form one group; ended when the context is left.

    Args:
        module: `python -m module` has to call `serve` when its first argument is `--rank`.
        way: Which of its ways the ranks follow.
        world_size: Number of ranks.
        environment: Variables for the processes.
    """

    def __init__(
        self,
        module: str,
        way: str,
        world_size: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = Path(self._folder.name) / "meeting"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, "--rank", str(rank), str(world_size), meeting, way],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
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
        """Have every rank do `order`; return the answer of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a rank ended early; its messages stand above")
        return json.loads(line)


def serve(make: Callable[[str, World], Callable[[str], Any]]) -> int:
    """Be a rank that `Ranks` has started: answer orders until the end of input.

    Args:
        make: Called with the way and the world; returns what answers an order.
    """
    _, rank, world_size, meeting, way = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world_size)
    )
    answer = make(way, World.current("cpu"))
    for order in _orders():
        print(json.dumps(answer(order)), flush=True)
    leave()
    return 0


def is_rank() -> bool:
    """Return whether this process is one that `Ranks` has started."""
    return sys.argv[1:2] == ["--rank"]


def _orders() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()
