"""Predicted timelines against cases that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.timeline import Operation, Rates, simulate

# A byte takes a second in memory and in every link; nothing else takes time.
UNIT = Rates(
    memory=1,
    many_tensors=0.5,
    flops=((2, 1),),
    within=1,
    between=0.5,
    latency=(0, 1),
    kernel=0,
    launch=0,
)
MAIN, SIDE, NETWORK = "main", "side", "network"


def kernel(seconds: float, stream: str = MAIN, **options: Any) -> Operation:
    return Operation("kernel", "kernel", stream, nbytes=seconds, **options)


def collective(seconds: float, **options: Any) -> Operation:
    return Operation("collective", "collective", NETWORK, nbytes=seconds, **options)


def wait(*after: int) -> Operation:
    return Operation("wait", "wait", None, after=after)


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [
        (kernel(3), 3),
        (kernel(3, many_tensors=True), 6),
        (kernel(3, flops=5), 5),
        (collective(3), 3),
        (collective(3, between=2), 1 + 4),
        (collective(9, between=2), 1 + 9),
        (wait(), 0),
    ],
)
def test_duration_of_an_operation(operation: Operation, seconds: float) -> None:
    assert operation.seconds(UNIT) == seconds


def test_least_duration_of_a_kernel() -> None:
    assert kernel(3).seconds(Rates(memory=1, kernel=4)) == 4


def test_collective_that_a_kernel_hides() -> None:
    found = simulate([kernel(2), collective(3, after=(0,)), kernel(4), kernel(1, after=(1,))], UNIT)
    assert found.begins == [0, 2, 2, 6]
    assert found.ends == [2, 5, 6, 7]
    assert (found.computing, found.exposed, found.idle, found.seconds) == (7, 0, 0, 7)


def test_exposed_collective() -> None:
    found = simulate([kernel(2), collective(3, after=(0,)), kernel(1), kernel(1, after=(1,))], UNIT)
    assert found.begins == [0, 2, 2, 5]
    assert (found.computing, found.exposed, found.idle) == (4, 2, 0)


def test_network_runs_one_collective_at_a_time() -> None:
    found = simulate([collective(3), Operation("other", "collective", SIDE, nbytes=2)], UNIT)
    assert found.ends == [3, 5]


def test_gpu_runs_one_kernel_at_a_time_and_high_priority_first() -> None:
    later = kernel(1, SIDE, after=(0,), priority=-1)
    found = simulate([kernel(1), kernel(5), later], UNIT)
    assert found.begins == [0, 2, 1]
    found = simulate([kernel(1), kernel(5), kernel(1, SIDE, after=(0,))], UNIT)
    assert found.begins == [0, 1, 6]


def test_gpu_that_waits_for_the_host_is_idle() -> None:
    found = simulate([kernel(1), kernel(1)], replace(UNIT, launch=3))
    assert found.begins == [3, 6]
    assert (found.computing, found.idle) == (2, 5)


def test_host_that_waits_launches_later() -> None:
    rates = replace(UNIT, launch=1)
    found = simulate([kernel(5), kernel(1), wait(0), kernel(1, SIDE)], rates)
    # The kernel ends at 6, so the host launches the last one at 7.
    assert found.ends[2] == 6
    assert found.begins[3] == 7


def test_sums_over_a_second_step_only() -> None:
    operations = [kernel(2), collective(1, after=(0,)), kernel(4, after=(1,)), kernel(1)]
    found = simulate(operations, UNIT, begin=2)
    assert (found.computing, found.exposed, found.idle) == (5, 0, 0)
