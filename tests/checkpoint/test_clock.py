from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distmp.checkpoint.clock import SaveClock
from distmp.distributed.world import World
from tests.ranks import run_ranks

ALONE = World(0, 1, torch.device("cpu"), None)


class Time:
    """A clock that only advances when a test advances it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def due_steps(clock: SaveClock, time: Time, durations: list[float]) -> list[int]:
    """Return the steps after which to save, where step n takes `durations[n - 1]` seconds."""
    found = []
    for step, seconds in enumerate(durations, 1):
        time.seconds += seconds
        if clock.is_due(step, busy=False):
            clock.restart(step)
            found.append(step)
    return found


def test_steady_steps_are_saved_at_the_minute() -> None:
    time = Time()
    # 2 minutes are 240 steps of half a second.
    assert due_steps(SaveClock(2.0, ALONE, time), time, [0.5] * 1000) == [240, 480, 720, 960]


def test_never() -> None:
    time = Time()
    assert due_steps(SaveClock(0.0, ALONE, time), time, [1e6] * 100) == []


@given(
    st.floats(0.01, 10.0),
    st.lists(st.floats(0.1, 5.0), min_size=1, max_size=400),
)
def test_never_early_and_not_much_too_late(minutes: float, durations: list[float]) -> None:
    time = Time()
    clock = SaveClock(minutes, ALONE, time)
    since, looked_late = 0.0, 0.0
    for step, seconds in enumerate(durations, 1):
        time.seconds += seconds
        since += seconds
        due = clock.is_due(step, busy=False)
        if due:
            assert since >= 60 * minutes
            clock.restart(step)
            since = 0.0
        elif since >= 60 * minutes:
            # Steps were at most 50 times slower than those of the estimate.
            looked_late = since - 60 * minutes
            assert looked_late <= 25 * 60 * minutes + 5.0


def test_a_save_that_is_still_written_is_left_alone() -> None:
    time = Time()
    clock = SaveClock(1.0, ALONE, time)
    time.seconds += 61
    assert not clock.is_due(1, busy=True)
    assert not clock.is_due(2, busy=True)
    assert clock.is_due(3, busy=False)


def _with_clocks_of_their_own(_: Path) -> tuple[list[int], int]:
    """The clock of rank 1 does not advance; count the broadcasts."""
    time = Time()
    clock = SaveClock(1.0, World.current("cpu"), time)
    broadcasts = 0
    broadcast = dist.broadcast

    def counting(*args: object, **options: object) -> object:
        nonlocal broadcasts
        broadcasts += 1
        return broadcast(*args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "broadcast", counting)
        found = due_steps(clock, time, [0.125 * (dist.get_rank() == 0)] * 2000)
    return found, broadcasts


def test_rank_0_decides_for_all_and_is_seldom_asked(tmp_path: Path) -> None:
    (found, broadcasts), other = run_ranks(_with_clocks_of_their_own, 2, tmp_path)
    assert other == (found, broadcasts)
    assert found == [480, 960, 1440, 1920]
    assert broadcasts < 80
