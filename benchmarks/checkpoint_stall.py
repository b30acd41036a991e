"""Measure the cost of saving: `python -m benchmarks.checkpoint_stall`.

A transformer of 22 M parameters with AdamW in FP32 on two CPU ranks over gloo saves with
`checkpoint.asynchronous` and without, in separate processes that take turns. A turn has a few steps
without saving, then a save and steps until the checkpoint is written. The stall is the time that
training waits for the save: in the save itself, and before the next update of the optimizer. Memory
is measured in new processes: the additional peak resident set while a checkpoint is written,
relative to the size of the state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import memory
from benchmarks.ranks import Ranks, is_rank, serve
from benchmarks.report import machine, save, sized
from benchmarks.tables import runs
from distmp import Engine
from distmp.checkpoint.settings import CheckpointConfig
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.world import World
from distmp.models.architecture import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.telemetry.measurements import begin_peak, peak_since

CPU = torch.device("cpu")

RANKS = 2
VOCABULARY, LENGTH = 258, 128
STEPS = 6
"""Number of steps before a save, and minimum number after it."""

METHODS = ("asynchronous", "blocking")


class Rank:
    """Runs the measurements of a method on one rank."""

    def __init__(self, method: str, world: World) -> None:
        torch.manual_seed(0)
        tokens = torch.randint(VOCABULARY, (1, LENGTH + 1))
        self._batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        self._engine = Engine(
            build_model(ModelConfig(size=sized("22m", "1m")), VOCABULARY, LENGTH),
            next_token_loss,
            lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
            policy="fp32",
            strategy="ddp",
            attribution=False,
        )
        self._directory = tempfile.TemporaryDirectory()
        directories: list[Any] = [self._directory.name]
        dist.broadcast_object_list(directories)
        self._writer = CheckpointWriter(
            CheckpointConfig(asynchronous=method == "asynchronous", keep=1),
            Path(directories[0]),
            world,
            timeout_seconds=600,
            log=lambda text: print(text, file=sys.stderr),
        )
        self._release, self._stalled = self._writer.release, 0.0
        self._writer.release = self._timed_release  # type: ignore[method-assign]
        self._writer.guard(self._engine.optimizer)
        self._writer.__enter__()  # its group is destroyed with all others at the end
        self._steps = 0

    def answer(self, order: str) -> Any:
        """Run the measurement named by `order`."""
        return {"turn": self.turn, "resident": self.resident, "leave": self.leave}[order]()

    def turn(self) -> dict[str, Any]:
        """Return the seconds of steps without saving, of the stall, and of steps while writing."""
        dist.barrier()
        before = [self._step() for _ in range(STEPS)]
        dist.barrier()
        started = time.perf_counter()
        self._save()
        stall = time.perf_counter() - started
        self._stalled = 0.0
        while_writing = []
        # Both ranks run the same number of steps, which rank 0 decides.
        while self._is_writing():
            while_writing.append(self._step())
        written = time.perf_counter() - started
        stall += self._stalled
        self._writer.finish()
        return {"before": before, "stall": stall, "while": while_writing, "written": written}

    def resident(self) -> dict[str, float]:
        """Return the additional peak resident set while saving, and the size of the state."""
        for _ in range(2):
            self._step()
        start = begin_peak(CPU)
        for _ in range(STEPS):
            self._step()
        without = peak_since(start, CPU)
        begin_peak(CPU)
        for _ in range(2):  # the second save reuses buffers of the first
            self._save()
            for _ in range(STEPS):
                self._step()
            self._writer.finish()
        state = sum(tensor.nbytes for tensor in self._engine.state_dict().values())
        return {"beyond": peak_since(start, CPU) - without, "state": state}

    def leave(self) -> None:
        """Close the writer and delete the directory."""
        self._writer.__exit__(None, None, None)
        dist.barrier()
        self._directory.cleanup()

    def _timed_release(self) -> None:
        """Wait before an update until the state is copied."""
        started = time.perf_counter()
        self._release()
        self._stalled += time.perf_counter() - started

    def _save(self) -> None:
        self._writer.save(
            self._steps,
            self._engine.state_dict(),
            {"step": self._steps},
            self._engine.updated_by_optimizer(),
        )

    def _step(self) -> float:
        started = time.perf_counter()
        self._engine.step([self._batch])
        self._steps += 1
        return time.perf_counter() - started

    def _is_writing(self) -> bool:
        writing = torch.tensor(self._writer.is_writing)
        dist.broadcast(writing, src=0)
        return bool(writing)


def main() -> int:
    if is_rank():
        return serve(lambda method, world: Rank(method, world).answer)
    arguments = _arguments()
    result = {
        "machine": machine(),
        "ranks": RANKS,
        "memory": {method: _memory(method) for method in METHODS},
        "turns": _turns(arguments.rounds),
    }
    path = save("checkpoint-stall-cpu", result)
    print(runs.checkpoint_stall(result))
    print(f"saved to {path}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each method")
    return parser.parse_args()


def _memory(method: str) -> dict[str, float]:
    """Return the memory of the rank that needs most."""
    with Ranks("benchmarks.checkpoint_stall", method, RANKS, memory.EXACT_MALLOC) as started:
        answers = started.ask("resident")
        started.ask("leave")
    return max(answers, key=lambda answer: float(answer["beyond"]))


def _turns(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds for `runs.checkpoint_stall` for each method and turn."""
    turns: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    with ExitStack() as stack:
        started = {
            method: stack.enter_context(Ranks("benchmarks.checkpoint_stall", method, RANKS))
            for method in METHODS
        }
        for turn in range(rounds + 1):
            for method in METHODS if turn % 2 else METHODS[::-1]:
                answers = started[method].ask("turn")
                if turn > 0:  # the first turn warms up
                    turns[method].append(_slowest(answers))
        for method in METHODS:
            started[method].ask("leave")
    return turns


def _slowest(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the times of one turn: stall, step without saving and while writing, and writing."""
    steps = answers[0]["while"] or answers[0]["before"]
    return {
        "stall": max(answer["stall"] for answer in answers),
        "step": statistics.median(answers[0]["before"]),
        "step_while_writing": statistics.mean(steps),
        "written": max(answer["written"] for answer in answers),
    }


if __name__ == "__main__":
    sys.exit(main())
