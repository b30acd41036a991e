from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from distmp.training.callbacks.stopping import TimeBudget, job_started


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def spent_at(budget: TimeBudget, clock: Clock) -> float:
    """Return the seconds after which the budget is spent, to a tenth."""
    while not budget.is_spent():
        clock.now += 0.1
        assert clock.now < 1e5
    return round(clock.now - 1000, 1)


@pytest.mark.parametrize(
    ("steps", "save", "state_bytes", "expected"),
    [
        # Five seconds for the end; a first save of at least two seconds, times one and a half.
        ([], None, 0, 600 - 5 - 3),
        ([], None, 400e6, 600 - 5 - 9),
        ([], 20.0, 400e6, 600 - 5 - 30),
        ([10.0, 2.0, 3.0], 20.0, 0, 600 - 5 - 30 - 30),
        # The slowest step is forgotten after fifty.
        ([100.0] + [1.0] * 50, 20.0, 0, 600 - 5 - 30 - 3),
    ],
)
def test_time_reserve_covers_steps_save_and_exit(
    steps: list[float], save: float | None, state_bytes: float, expected: float
) -> None:
    clock = Clock()
    budget = TimeBudget(10.0, int(state_bytes), job_started=1000.0, clock=clock)
    for seconds in steps:
        budget.add_step(seconds)
    if save is not None:
        for seconds in (save, save / 2):
            budget.add_save(seconds)
    assert spent_at(budget, clock) == pytest.approx(expected, abs=0.2)


def test_time_budget_without_limit_is_never_spent() -> None:
    assert not TimeBudget(None, 0, job_started=0.0, clock=lambda: 1e12).is_spent()


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
