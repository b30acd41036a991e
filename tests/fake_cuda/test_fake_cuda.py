"""Tests of the fake device: correct programs pass, and programs with races or waits are detected.

Run with the plugin: `pytest -p tests.fake_cuda.plugin tests/fake_cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import ranks

if "FAKE_CUDA_DEVICES" not in os.environ:
    pytest.skip("needs the fake device: -p tests.fake_cuda.plugin", allow_module_level=True)

from tests.fake_cuda import device
from tests.fake_cuda.device import Recording, recording

pytestmark = [pytest.mark.gpu, pytest.mark.not_replayed]
SCHEDULES = 200


def differences(program: Callable[[], Any]) -> list[str]:
    """Return the differences that replays in 200 orders found."""
    found: list[str] = []

    def check(recorded: Recording) -> None:
        found.extend(filter(None, map(recorded.replay, range(SCHEDULES + 1))))

    device.set_schedule(seed=1)
    with recording(check):
        program()
    return found


def on(stream: Any, work: Callable[[], Tensor]) -> Tensor:
    with torch.cuda.stream(stream):
        return work()


def two_streams(*, waits: bool = True, waits_back: bool = True, records: bool = True) -> float:
    """Sum squares that a side stream computes from tensors of the main stream."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    total = torch.zeros(64, device="cuda")
    for step in range(4):
        numbers = torch.full((64,), float(step), device="cuda")
        if waits:
            side.wait_stream(main)
        squares = on(side, lambda numbers=numbers: numbers * numbers)
        if records:
            numbers.record_stream(side)
        del numbers
        torch.empty(64, device="cuda")  # may reuse the memory of numbers
        if waits_back:
            main.wait_stream(side)
        total += squares
        if records:
            squares.record_stream(main)
        del squares
    return float(total.sum())


def test_streams_that_wait_have_no_race() -> None:
    assert differences(two_streams) == []


@pytest.mark.parametrize("omitted", ["waits", "waits_back", "records"])
def test_a_missing_wait_stream_or_record_stream_is_detected(omitted: str) -> None:
    found = differences(lambda: two_streams(**{omitted: False}))
    assert len(found) > SCHEDULES / 10
    assert "accesses the same memory" in found[-1]


def test_memory_is_that_of_the_program_after_replays() -> None:
    values = torch.zeros(64, device="cuda")
    torch.cuda.synchronize()

    def program() -> None:
        on(torch.cuda.Stream(), lambda: values.add_(1))
        values.mul_(2)

    def check(recorded: Recording) -> None:
        assert any(map(recorded.replay, range(SCHEDULES)))
        # End with an order of another result.
        assert any(recorded.replay(seed) for seed in range(SCHEDULES, 2 * SCHEDULES))

    device.set_schedule(seed=1)
    with recording(check):
        program()
    assert values.unique().tolist() == [2]


def test_operations_run_only_when_the_host_waits() -> None:
    device.set_schedule(seed=1)
    event = torch.cuda.Event()
    pinned = torch.zeros(8).pin_memory()
    values = torch.arange(8.0, device="cuda")
    pinned.copy_(values, non_blocking=True)
    event.record()
    assert pinned.isnan().all()  # poisoned until the copy has run
    event.synchronize()
    assert pinned.tolist() == list(range(8))


def test_an_event_that_is_polled_completes() -> None:
    event = torch.cuda.Event()
    torch.ones(8, device="cuda").add_(1)
    event.record()
    while not event.query():
        pass


def test_writing_to_pinned_memory_before_its_copy_is_an_error() -> None:
    pinned = torch.ones(8).pin_memory()
    values = pinned.to("cuda", non_blocking=True)
    pinned.fill_(2)
    with pytest.raises(RuntimeError, match="pinned memory was written before"):
        values.sum().item()


def test_pageable_memory_may_be_written_after_a_non_blocking_copy() -> None:
    numbers = torch.ones(8)
    values = numbers.to("cuda", non_blocking=True)
    numbers.fill_(2)
    assert values.sum().item() == 8


def test_a_freed_block_is_poisoned_at_the_next_allocation_of_its_stream() -> None:
    def program() -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        ones = on(side, lambda: torch.ones(64, device="cuda"))
        torch.cuda.current_stream().wait_stream(side)
        doubled = ones * 2  # on the main stream
        del ones
        if reused:
            on(side, lambda: torch.zeros(64, device="cuda"))
        return float(doubled.sum())

    reused = False
    assert differences(program) == []
    reused = True
    assert differences(program)


def test_counters() -> None:
    values = torch.ones(8, device="cuda")
    device.take_counters()
    values.add_(1)
    torch._foreach_add_([values, values], 1)
    counted = device.take_counters()
    assert counted.launches == {"aten::add_": 1, "aten::_foreach_add_": 1}
    assert (counted.waits, counted.reads, counted.pageable_copies) == ({}, 0, 0)
    values.cpu()
    values.sum().item()
    torch.cuda.synchronize()
    torch.ones(8).to("cuda", non_blocking=True)
    torch.ones(8).pin_memory().to("cuda", non_blocking=True)
    counted = device.take_counters()
    assert counted.waits == {"copy to the host": 1, "item": 1, "synchronize": 1}
    assert (counted.reads, counted.pageable_copies) == (2, 1)


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda values: values.sum().item(), id="item"),
        pytest.param(lambda values: values.cpu(), id="copy to the host"),
        pytest.param(lambda values: values.copy_(torch.ones(8)), id="copy to the device"),
        pytest.param(lambda values: values.nonzero(), id="nonzero"),
        pytest.param(lambda values: values[values > 0], id="mask"),
    ],
)
def test_waits_are_errors_in_sync_debug_mode(wait: Callable[[Tensor], Any]) -> None:
    values = torch.ones(8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            wait(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_values_and_gradients_equal_those_of_the_cpu() -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.arange(11).to(device)
        for _ in range(3):
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    pairs = zip(trained("cuda"), trained("cpu"), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_random_numbers_depend_on_the_state_of_the_generator() -> None:
    state = torch.cuda.get_rng_state()
    first = [torch.rand(8, device="cuda"), nn.functional.dropout(torch.ones(64, device="cuda"))]
    torch.cuda.set_rng_state(state)
    again = [torch.rand(8, device="cuda"), nn.functional.dropout(torch.ones(64, device="cuda"))]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.rand(8, device="cuda"), again[0])


def test_elapsed_time() -> None:
    torch.cuda.synchronize()  # with pending operations, the queue keeps completed ones
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    torch.cuda._sleep(500_000_000)
    events[1].record()
    events[1].synchronize()
    assert events[0].elapsed_time(events[1]) == pytest.approx(500, rel=0.2)


def test_memory_allocated() -> None:
    before = torch.cuda.memory_allocated()
    values = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del values
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda values: values.sum().item(), id="item"),
        pytest.param(lambda values: values.copy_(torch.ones(1, 4)), id="copy to the device"),
        pytest.param(lambda values: torch.cuda.synchronize(), id="synchronize"),
    ],
)
def test_an_error_of_an_operation_is_raised_at_the_next_wait(wait: Callable[[Tensor], Any]) -> None:
    table = torch.ones(4, 4, device="cuda")
    found = nn.functional.embedding(torch.tensor([9], device="cuda"), table)
    with pytest.raises(RuntimeError, match=r"CUDA error: .*index out of range"):
        wait(found)


def test_operators_refuse_tensors_of_two_devices() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)


@ranks(2, cuda=True)
def test_collectives() -> None:
    rank = dist.get_rank()
    own = torch.arange(4.0, device="cuda") + 10 * rank
    dist.all_reduce(own)
    assert own.tolist() == [10, 12, 14, 16]
    parts = torch.empty(4, device="cuda")
    dist.all_gather_into_tensor(parts, torch.full((2,), float(rank), device="cuda"))
    assert parts.tolist() == [0, 0, 1, 1]
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device="cuda"), op=dist.ReduceOp.AVG)
    assert part.tolist() == ([0, 1] if rank == 0 else [2, 3])
    received = torch.empty(3, device="cuda")
    splits = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    # Rank 0 sends one row to itself and two to rank 1, which sends two to rank 0 and one to itself.
    sent = torch.arange(3.0, device="cuda") + 10 * rank
    dist.all_to_all_single(received, sent, *splits)
    assert received.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 12])
    dist.broadcast(own, src=1)
    other = torch.full((2,), float(rank), device="cuda")
    if rank == 0:
        dist.send(other, 1)
    else:
        dist.recv(other, 0)
        assert other.tolist() == [0, 0]
    dist.barrier()


@pytest.mark.parametrize("waits", [True, False])
@ranks(2, cuda=True)
def test_a_stream_must_wait_for_a_collective(waits: bool) -> None:
    def program() -> float:
        values = torch.ones(64, device="cuda")
        values.mul_(3)
        work = dist.all_reduce(values, async_op=True)
        if waits:
            work.wait()
        doubled = values * 2
        work.wait()
        return float(doubled.sum())

    if waits:
        assert differences(program) == []
        assert program() == 64 * 12
    else:
        assert differences(program)


@ranks(2, cuda=True)
def test_waiting_for_a_collective_does_not_block_the_host() -> None:
    values = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    device.take_counters()
    dist.all_reduce(values, async_op=True).wait()
    values.mul_(2)
    assert device.take_counters().waits == {}
    assert values.sum().item() == 256
