from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from distmp.distributed import awaited
from distmp.distributed.awaited import AwaitedRanks
from distmp.distributed.rank_monitor import RankStatus
from distmp.utils.processes import processor_seconds

LIMIT = 100.0
STATUS = RankStatus(line="train.py:3", engine_calls=4, collectives=7, busy_seconds=50.0)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awaited, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("change", "is_progress"),
    [
        ({}, False),
        ({"line": "train.py:5"}, True),
        ({"engine_calls": 5}, True),
        ({"collectives": 8}, True),
        ({"busy_seconds": 60.0}, True),
        ({"busy_seconds": 50.5}, False),  # it polls something
        ({"waits_in": "barrier", "busy_seconds": 140.0, "line": "train.py:3"}, True),
        ({"ended": "has ended"}, False),
    ],
)
def test_what_counts_as_progress(
    clock: Clock, change: dict[str, object], is_progress: bool
) -> None:
    ranks = AwaitedRanks(LIMIT)
    assert not ranks.are_stuck({1: STATUS})
    clock.now += 0.9 * LIMIT
    assert not ranks.are_stuck({1: replace(STATUS, **change)})  # type: ignore[arg-type]
    clock.now += 0.2 * LIMIT
    assert ranks.are_stuck({1: replace(STATUS, **change)}) is not is_progress  # type: ignore[arg-type]


def test_a_rank_that_waits_in_a_collective_is_not_busy(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    status = replace(STATUS, waits_in="barrier")
    assert not ranks.are_stuck({1: status})
    clock.now += 1.1 * LIMIT
    assert ranks.are_stuck({1: replace(status, busy_seconds=500.0)})


def test_ranks_wait_for_the_one_that_makes_progress(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    for busy in (0.0, 100.0, 200.0, 300.0):
        clock.now += LIMIT
        assert not ranks.are_stuck({0: None, 1: STATUS, 2: replace(STATUS, busy_seconds=busy)})
    clock.now += 1.1 * LIMIT
    assert ranks.are_stuck({0: None, 1: STATUS, 2: replace(STATUS, busy_seconds=300.0)})


def test_ranks_that_never_answer(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    assert not ranks.are_stuck({1: None})
    clock.now += 1.1 * LIMIT
    assert ranks.are_stuck({1: None})


def test_child_processes_count_as_busy() -> None:
    loop = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", loop]
    before = processor_seconds(threading.get_ident())
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        busy = processor_seconds(threading.get_ident()) - before
        child.communicate("\n")
    assert busy >= 0.29
