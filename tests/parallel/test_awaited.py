from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from distmp.distributed.rank_monitor import RankStatus
from distmp.parallel import collective_order
from distmp.parallel.collective_order import AwaitedRanks
from distmp.utils.processes import child_seconds

LIMIT = 100.0
STATUS = RankStatus(line="train.py:3", engine_calls=4, collectives=7, busy_seconds=50.0)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(collective_order, "time", clock)
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
        ({"child_seconds": 20.0}, True),
        ({"child_seconds": 10.0}, False),  # a service that monitors the run
        ({"waits_in": "barrier", "busy_seconds": 140.0, "line": "train.py:3"}, True),
    ],
)
def test_progress_of_awaited_ranks(
    clock: Clock, change: dict[str, object], is_progress: bool
) -> None:
    ranks = AwaitedRanks(LIMIT)
    assert not ranks.why_stuck({1: STATUS})
    clock.now += 0.9 * LIMIT
    assert not ranks.why_stuck({1: replace(STATUS, **change)})  # type: ignore[arg-type]
    clock.now += 0.2 * LIMIT
    stuck = ranks.why_stuck({1: replace(STATUS, **change)})  # type: ignore[arg-type]
    assert stuck == ("" if is_progress else "made no progress for 100 s")


def test_a_rank_that_waits_in_a_collective_is_not_busy(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    status = replace(STATUS, waits_in="barrier")
    assert not ranks.why_stuck({1: status})
    clock.now += 1.1 * LIMIT
    assert ranks.why_stuck({1: replace(status, busy_seconds=500.0)})


def test_wait_continues_while_one_rank_progresses(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    for busy in (0.0, 100.0, 200.0, 300.0):
        clock.now += LIMIT
        assert not ranks.why_stuck({0: None, 1: STATUS, 2: replace(STATUS, busy_seconds=busy)})
    clock.now += 1.1 * LIMIT
    assert ranks.why_stuck({0: None, 1: STATUS, 2: replace(STATUS, busy_seconds=300.0)})


def test_ranks_without_answers_are_stuck(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    assert not ranks.why_stuck({1: None})
    clock.now += 1.1 * LIMIT
    assert ranks.why_stuck({1: None})


@pytest.mark.parametrize("lines", [1, 2])
def test_endless_loop_reaches_the_long_limit(clock: Clock, lines: int) -> None:
    ranks = AwaitedRanks(LIMIT)
    began = clock.now
    stuck = ""
    while not stuck:
        assert clock.now - began < 100 * LIMIT
        clock.now += LIMIT / 4
        loop = replace(STATUS, line=f"train.py:{clock.now // 25 % lines}", busy_seconds=clock.now)
        stuck = ranks.why_stuck({1: loop})
    assert stuck == "been busy without a call of the engine for 3000 s"
    assert clock.now - began > 30 * LIMIT


def test_calls_of_the_engine_extend_the_long_limit(clock: Clock) -> None:
    ranks = AwaitedRanks(LIMIT)
    for calls in range(200):
        clock.now += LIMIT / 2
        assert not ranks.why_stuck({1: replace(STATUS, collectives=calls)})


def test_child_processes_count_as_busy_when_they_have_ended_too() -> None:
    # Times of children are counted in ticks of 10 ms.
    loop = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", loop]
    before = child_seconds()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = child_seconds() - before
        child.communicate("\n")
    assert running >= 0.25
    assert child_seconds() - before >= 0.25
