"""A small regression whose ranks fail or hang according to the environment variable FAULT.

Its format is "RANK WHERE WHAT, ...". WHERE is `forward` (of the third step), `validation`, `data`,
`save` or `connect`. WHAT is a key of `_FAULTS`. Before the fault, a rank writes the time to
`fault-RANK`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 4
SAMPLES = 64
STEPS = 6
# Delay of faults that silence a rank: it has reported progress since its first step.
LATE_SECONDS = 2.5
ARGUMENTS = [
    "--data.source=tests.faulty_runs:line",
    "--model.name=tests.faulty_runs:Affine",
    "--model.loss=tests.faulty_runs:squared",
    "--batch.global-batch-size=8",
    "--batch.microbatch-size=2",
    "--precision.policy=fp32",
    f"--steps={STEPS}",
    "--schedule.name=constant",
    "--schedule.warmup-steps=0",
    "--log.every=1",
    "--run-dir=run",
]


def line(split: str, sequence_length: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(SAMPLES, SIZE, generator=generator)
    samples = [(x, 3 * x.flip(0) + 1) for x in points]
    return _Faulty(samples) if split == "train" else samples[:8]


class _Faulty(list):  # type: ignore[type-arg]
    """Samples; reading one in the third step may trigger the fault."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(samples)
        self.read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        # 16 more than two steps: ranks compare 8 samples, which are read twice.
        if self.read > 24:
            perhaps("data")
        return super().__getitem__(index)


class Affine(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            perhaps("validation")
        elif torch.is_grad_enabled():  # not in the checks of the first step
            self.calls += 1
            if self.calls > 4:
                perhaps("forward")
        return super().forward(x)


def squared(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def train(arguments: list[str]) -> None:
    """Run a rank of `distmp.train` that may fail in a save, or before it connects to the others."""
    from distmp.checkpoint import saving
    from tests import elastic

    own, connect = saving.save, dist.init_process_group

    def init_process_group(*args: Any, **options: Any) -> None:
        perhaps("connect")
        connect(*args, **options)

    def save(*args: Any, **options: Any) -> Any:
        perhaps("save")
        return own(*args, **options)

    saving.save = save  # type: ignore[assignment]
    dist.init_process_group = init_process_group
    elastic.train(arguments)


def perhaps(where: str) -> None:
    """Trigger the fault of this rank at this place, if FAULT names one."""
    for entry in filter(None, os.environ.get("FAULT", "").split(", ")):
        rank, place, fault = entry.split()
        if (rank, place) == (os.environ.get("RANK", "0"), where):
            Path(f"fault-{rank}").write_text(str(time.time()))
            _FAULTS[fault]()


def _raise() -> NoReturn:
    raise ValueError("a fault of the model")


def _reset() -> NoReturn:
    raise RuntimeError("upload to a server failed: Connection reset by peer")


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _sleep() -> None:
    time.sleep(1000)


def _pause() -> None:
    """Be slow, but not slow enough for the watchdog to report a hang."""
    time.sleep(1.5)


def _spin() -> None:
    """Hold Python's lock in native code and never return."""
    time.sleep(LATE_SECONDS)
    sum(itertools.repeat(0))


def _stop() -> None:
    time.sleep(LATE_SECONDS)
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _quit() -> None:
    os._exit(0)


def _exit() -> NoReturn:
    sys.exit(0)


def _crash() -> None:
    ctypes.string_at(0)


def _allocate() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def _index() -> None:
    """Look up a row that does not exist, as for a label outside of the vocabulary."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    F.embedding(torch.tensor([9], device=device), torch.ones(4, 1, device=device))


_FAULTS = {
    "raise": _raise,
    "reset": _reset,
    "interrupt": _interrupt,
    "sleep": _sleep,
    "pause": _pause,
    "spin": _spin,
    "stop": _stop,
    "crash": _crash,
    "kill": _kill,
    "quit": _quit,
    "exit": _exit,
    "allocate": _allocate,
    "index": _index,
}


if __name__ == "__main__":
    train(sys.argv[1:])
