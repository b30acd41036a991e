"""Runs that are killed and restarted end as those that are not."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distmp.activity import activity
from distmp.checkpoint import store
from distmp.errors import TrainingError
from distmp.launcher.job_store import HashStore, PrefixStore, of_attempt
from distmp.peers import Ending, Peers
from distmp.restarts import RESTARTS_WITHOUT_GAIN, Restarts
from distmp.run_directory import RunDirectory, create_run
from distmp.telemetry import read_records
from tests import elastic, faults
from tests.elastic import Job, run_jobs
from tests.torchrun import TINY, corpus, environment, torchrun

KILLS = 50
STEPS = 300
SEED = 20261121
LONG = [
    *(word for word in faults.ARGUMENTS if not word.startswith("--steps")),
    f"--steps={STEPS}",
    "--checkpoint.every=2",
    "--log.every=100",
    "--model.name=tests.test_restarts:Noisy",
]


class Noisy(torch.nn.Sequential):
    """A model whose loss depends on the random numbers of every step."""

    def __init__(self) -> None:
        width = 16
        super().__init__(
            torch.nn.Linear(faults.SIZE, width),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, faults.SIZE),
        )


def killed(arguments: list[str]) -> None:
    """Be a rank of `distmp.train`; in each of the first attempts one of the ranks is killed."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    chance = random.Random(SEED + attempt)
    victim = chance.randrange(int(os.environ["WORLD_SIZE"]))
    delay = chance.random()
    if attempt < KILLS and os.environ["RANK"] == str(victim):
        if attempt % 10 == 5:
            _kill_after(0.5 * delay, "start")
        elif attempt % 2:
            _kill_in_save(0.05 * delay)
        else:
            threading.Thread(target=_kill_in_step, args=(0.05 * delay,), daemon=True).start()
    elastic.train(arguments)


def _kill_after(seconds: float, when: str) -> None:
    def die() -> None:
        with Path("kills").open("a") as file:
            file.write(f"{when}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def _kill_in_save(seconds: float) -> None:
    """Be killed so long after the beginning of the attempt's second save."""
    own, saves = store.save, []

    def save(*args: Any, **options: Any) -> Any:
        saves.append(args)
        if len(saves) == 2:
            _kill_after(seconds, "save")
        return own(*args, **options)

    store.save = save  # type: ignore[assignment]


def _kill_in_step(seconds: float) -> None:
    """Be killed so long after the beginning of the attempt's fourth step."""
    first = 0
    while not first or activity.now.step < first + 3:
        first = first or activity.now.step
        time.sleep(0.001)
    _kill_after(seconds, "step")


@pytest.mark.timeout(600)
def test_fifty_kills_leave_no_trace(tmp_path: Path) -> None:
    jobs = [Job(LONG), Job(LONG, entry="tests.test_restarts:killed", max_restarts=KILLS + 10)]
    whole, mended = run_jobs(jobs, tmp_path, timeout=570)
    assert whole.exit_codes == {}
    assert mended.exit_codes == {}, mended.stderr
    kills = (tmp_path / "1" / "kills").read_text().split()
    assert len(kills) == KILLS
    assert set(kills) == {"start", "save", "step"}
    assert [path.name for path in (tmp_path / "1").glob("run*")] == ["run"]
    assert f"restart {KILLS} of {KILLS + 10}: " in mended.stdout
    first, second = (_weights(tmp_path / number / "run") for number in "01")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    losses = [
        [(record.step, record.loss) for record in read_records(tmp_path / n / "run/steps.jsonl")]
        for n in "01"
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[1]] == list(range(1, STEPS + 1))


def _weights(run: Path) -> dict[str, torch.Tensor]:
    """Return everything that the run's last checkpoint holds."""
    checkpoint = store.latest(run / "checkpoints")
    assert checkpoint is not None
    assert store.read_numbers(checkpoint)["step"] == STEPS
    found = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in store.stored_tensors(checkpoint).items()
    }
    store.load(checkpoint, found)
    return found
