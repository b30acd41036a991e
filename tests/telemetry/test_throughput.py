from __future__ import annotations

from collections.abc import Iterator

import pytest

from distmp.telemetry.measurements import StepTimer


def _timer(*readings: float) -> StepTimer:
    iterator: Iterator[float] = iter(readings)
    return StepTimer(clock=lambda: next(iterator))


def test_each_lap_begins_where_the_last_ended() -> None:
    timer = _timer(10.0, 12.0, 12.5)
    assert timer.lap() == 2.0
    assert timer.lap() == 0.5


def test_pauses_do_not_count() -> None:
    timer = _timer(0.0, 1.0, 61.0, 70.0, 75.0, 80.0)
    with timer.paused():
        pass
    with timer.paused():
        pass
    assert timer.paused_seconds == 65.0
    assert timer.lap() == 15.0
    assert timer.paused_seconds == 0.0


def test_nested_pauses_count_once() -> None:
    timer = _timer(0.0, 1.0, 2.0, 5.0, 9.0, 10.0)
    with timer.paused(), timer.paused():
        pass
    assert timer.lap() == 2.0


def test_a_pause_that_fails_does_not_count_either() -> None:
    timer = _timer(0.0, 1.0, 5.0, 6.0)
    with pytest.raises(KeyError), timer.paused():
        raise KeyError
    assert timer.lap() == 2.0


def test_a_clock_that_does_not_advance() -> None:
    assert _timer(1.0, 1.0).lap() > 0
