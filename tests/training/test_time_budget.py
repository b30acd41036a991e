from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from distmp.training.callbacks import stopping
from distmp.training.callbacks.stopping import TimeLimit, job_started
from tests.ranks import ranks

ANYTHING: Any = None


def time_limit(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, minutes: float
) -> TimeLimit:
    """Return the limit of a job that started at 1000 s."""
    monkeypatch.setattr(stopping, "job_started", lambda: 1000.0)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(time=lambda: clock.now))
    return TimeLimit(minutes)


def of_state(state: dict[str, torch.Tensor], rank: int = 0, world_size: int = 1) -> Any:
    """Return what `TimeLimit` uses of a trainer."""
    return SimpleNamespace(
        engine=SimpleNamespace(state_dict=lambda: state),
        world=SimpleNamespace(rank=rank, world_size=world_size),
    )


def without_memory(size: float) -> torch.Tensor:
    return torch.empty(int(size), dtype=torch.uint8, device="meta")


def spent_at(limit: TimeLimit, clock: SimpleNamespace) -> float:
    """Return the seconds after which the time is spent, to a tenth."""
    while limit.stop_reason(ANYTHING) is None:
        clock.now += 0.1
        assert clock.now < 1e5
    return round(clock.now - 1000, 1)


@pytest.mark.parametrize(
    ("steps", "save", "state_bytes", "expected"),
    [
        # Five seconds for the end; a first save of at least two seconds, times one and a half.
        ([], None, 0, 600 - 5 - 3),
        ([1.0], None, 400e6, 600 - 5 - 9 - 3),
        ([], 20.0, 400e6, 600 - 5 - 30),
        ([10.0, 2.0, 3.0], 20.0, 0, 600 - 5 - 30 - 30),
        # The slowest step is forgotten after fifty.
        ([100.0] + [1.0] * 50, 20.0, 0, 600 - 5 - 30 - 3),
    ],
)
def test_time_reserve_covers_steps_save_and_exit(
    steps: list[float],
    save: float | None,
    state_bytes: float,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    trainer = of_state({"weight": without_memory(state_bytes)})
    limit = time_limit(monkeypatch, clock, 10.0)
    for seconds in steps:
        step: Any = SimpleNamespace(seconds=seconds)
        limit.on_step_launched(trainer, step)
    if save is not None:
        for seconds in (save, save / 2):
            limit.on_save(ANYTHING, 1, seconds)
    assert spent_at(limit, clock) == pytest.approx(expected, abs=0.2)


def test_first_save_includes_the_state_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    limit = time_limit(monkeypatch, clock, 10.0)
    state = {"weight": without_memory(100e6)}
    trainer = of_state(state)
    state["moments"] = without_memory(200e6)
    step: Any = SimpleNamespace(seconds=0.0)
    limit.on_step_launched(trainer, step)
    assert spent_at(limit, clock) == pytest.approx(600 - 5 - 1.5 * (2 + 3), abs=0.2)


@ranks(2)
def test_first_save_is_estimated_from_what_this_rank_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # both write to one disk
    clock = SimpleNamespace(now=1000.0)
    limit = time_limit(monkeypatch, clock, 10.0)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "sharded": DTensor.from_local(without_memory(100e6), mesh, [Shard(0)]),
        "first replica": without_memory(200e6),
        "second replica": without_memory(200e6),
    }
    step: Any = SimpleNamespace(seconds=0.0)
    limit.on_step_launched(of_state(state, torch.distributed.get_rank(), 2), step)
    assert spent_at(limit, clock) == pytest.approx(600 - 5 - 1.5 * (2 + 2 * 3), abs=0.2)


@pytest.mark.nightly
def test_job_start_is_that_of_launcher() -> None:
    script = "from distmp.training.callbacks.stopping import job_started; print(job_started())"
    variables = {name: v for name, v in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    before = time.time()
    alone, launched = (
        float(
            subprocess.run(
                [sys.executable, "-c", script],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for environment in (variables, {**variables, "TORCHELASTIC_RUN_ID": "1"})
    )
    # The system counts from its boot time, which has a resolution of a second.
    assert before - 3 < alone < time.time() + 3
    assert launched == pytest.approx(psutil.Process().create_time(), abs=3)
    assert launched < alone - 0.1
    assert job_started() == pytest.approx(psutil.Process().create_time(), abs=3)
