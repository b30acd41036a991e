from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.distributed import wait_times
from distmp.distributed.wait_times import ComputeTime, StepClock, collective_waits
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.training.callbacks.stragglers import (
    SlowRankDetector,
    StragglerDetection,
    compute_seconds,
)
from tests.marks import nightly
from tests.ranks import ranks, run_ranks
from tests.recording import no_waiting
from tests.reference import TWO_RANKS, Batch, fused_adamw, loss, make_model, microbatches

SLEEP_SECONDS = 0.2
EVERY = 4


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return gradient


class Sleepy(nn.Module):
    """A model that delays its rank in a given phase."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__()
        self.model = model
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            time.sleep(SLEEP_SECONDS)
        y = self.model(x)
        return SleepsInBackward.apply(y) if self.where == "backward" else y


class Stragglers:
    """Calls the hooks of a `StragglerDetection` as the trainer does."""

    def __init__(
        self,
        world: World,
        clock: StepClock,
        strategy: str,
        *,
        every: int,
        log: Callable[[str], object],
    ) -> None:
        engine, console = (
            SimpleNamespace(clock=clock, strategy=strategy),
            SimpleNamespace(message=log),
        )
        run: Any = SimpleNamespace(world=world, engine=engine, console=console)
        self._callback = StragglerDetection(run)
        self._callback.every = every

    def before(self, step: int, paused_seconds: float = 0.0) -> None:
        trainer: Any = SimpleNamespace(timer=SimpleNamespace(paused_seconds=paused_seconds))
        self._callback.on_step_begin(trainer, step)

    def after(self, step: int) -> None:
        launched: Any = SimpleNamespace(step=step)
        self._callback.on_step_launched(launched, launched)

    def seconds(self, step: int) -> list[float] | None:
        result: Any = SimpleNamespace(step=step, rank_seconds=None)
        self._callback.on_step_end(result, result)
        found: list[float] | None = result.rank_seconds
        return found


Times = dict[int, list[float]]


def run(strategy: str, where: str, options: dict[str, Any]) -> tuple[list[str], Times]:
    """Run steps in which rank 1 is slow; return the logged lines, and the times."""
    world = World.current("cpu")
    model = Sleepy(make_model(), where if world.rank == 1 else "")
    options = {"policy": "fp32", **options}
    engine = Engine(model, loss, fused_adamw, strategy=strategy, device="cpu", **options)
    lines: list[str] = []
    stragglers = Stragglers(world, engine.clock, strategy, every=EVERY, log=lines.append)
    found = {}
    for step in range(1, 2 * EVERY + 1):
        stragglers.before(step)
        if where == "data" and world.rank == 1:
            time.sleep(SLEEP_SECONDS)
        engine.step(microbatches(step, TWO_RANKS[0], world.rank))
        stragglers.after(step)
        if (seconds := stragglers.seconds(step)) is not None:
            found[step] = seconds
    return lines, found


@pytest.mark.parametrize(
    ("strategy", "where", "options"),
    [
        ("ddp", "forward", {}),
        ("ddp", "backward", {"policy": "fp32,reduce=bf16"}),
        nightly("ddp", "data", {"shard_optimizer": True}),
        nightly("fsdp", "forward", {}),
        nightly("fsdp", "backward", {}),
    ],
)
def test_slow_rank_is_named(strategy: str, where: str, options: dict[str, Any]) -> None:
    (lines, found), (other_lines, other_found) = run_ranks(run, 2, strategy, where, options)
    assert found == other_found, "ranks must get the same times"
    assert lines == other_lines
    assert [*found] == [EVERY, 2 * EVERY]
    for fast, slow in found.values():
        # Both ranks ended these steps together; only one of them worked for so long.
        assert slow > SLEEP_SECONDS
        assert fast < slow - SLEEP_SECONDS / 2
    (line,) = lines
    assert line.startswith("rank 1 on ")
    assert "x the median of the others" in line
    assert line.endswith(f"since step {EVERY}")


def test_overlapped_transfers_do_not_count_as_waiting() -> None:
    """If transfers overlap with computation, only the excess waiting time of fast ranks counts."""
    times = [ComputeTime(1.0, 0.7), ComputeTime(1.0, 0.3), ComputeTime(1.0, 0.7)]
    assert compute_seconds(times, hidden=True) == pytest.approx([0.6, 1.0, 0.6])
    assert compute_seconds(times, hidden=False) == pytest.approx([0.3, 0.7, 0.3])
    unknown = compute_seconds([ComputeTime(math.nan, math.nan), *times[1:]], hidden=True)
    assert math.isnan(unknown[0])
    assert unknown[1:] == pytest.approx([1.0, 0.6])


class Moment:
    """A time point at a given second."""

    is_past = True

    def __init__(self, second: float) -> None:
        self.second = second

    def seconds_until(self, later: Moment) -> float:
        return later.second - self.second


def begun(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """Return a clock that has begun at 0 s, and will end at 10 s."""
    now = iter([0.0, 10.0])
    monkeypatch.setattr(wait_times, "TimePoint", lambda device: Moment(next(now)))
    clock = StepClock(torch.device("cpu"))
    clock.active = True
    clock.begin()
    return clock


@pytest.mark.parametrize(
    ("waits", "waited"),
    [
        ([], 0.0),
        ([(1.0, 2.0), (3.0, 4.5)], 2.5),
        ([(1.0, 8.0), (2.0, 7.0), (6.0, 9.0)], 8.0),  # several streams wait for the same rank
        ([(-5.0, 1.0), (9.0, 30.0)], 2.0),  # waits that begin before or end after the interval
        ([(-1.0, 11.0), (0.0, 10.0)], 10.0),
    ],
)
def test_compute_time_is_never_negative(
    waits: list[tuple[float, float]], waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = begun(monkeypatch)
    collective_waits._spans += [(Moment(begin), Moment(end)) for begin, end in waits]  # type: ignore[misc]
    clock.end()
    collective_waits.active = False
    assert clock.take() == ComputeTime(10.0, waited)


def test_interval_ends_after_all_of_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait on another stream may end later than the interval."""
    clock = begun(monkeypatch)
    pending = Moment(12.0)
    pending.is_past = False
    collective_waits._spans += [(Moment(1.0), pending)]  # type: ignore[list-item]
    clock.end()
    collective_waits.active = False
    assert clock.take() is None


def test_only_waits_of_compute_stream_are_recorded() -> None:
    device, work = torch.device("cpu"), dist.Work()
    collective_waits.active = True
    with contextlib.suppress(RuntimeError), collective_waits.on_side_stream():
        assert collective_waits.watch(work, torch.ones(1)) is work
        with collective_waits.measured(device):
            pass
        raise RuntimeError("a collective that fails")
    assert collective_waits.take() == []
    assert collective_waits.watch(work, torch.ones(1)) is not work
    with collective_waits.measured(device):
        pass
    collective_waits.active = False
    assert len(collective_waits.take()) == 1


def test_slow_rank_is_reported_after_two_consecutive_intervals() -> None:
    lines: list[str] = []
    detector = SlowRankDetector([f"rank {rank} on host" for rank in range(4)], lines.append)
    even, slow = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 2.0, 1.0]
    for step, seconds in enumerate([even, slow, even, slow, slow, slow, even, even], 1):
        detector.update(10 * step, seconds)
    assert lines == [
        "rank 2 on host takes 2.0 x the median of the others (2e+03 ms a step, theirs 1e+03 ms), "
        "since step 40",
        "rank 2 on host is as fast as the others again, step 70",
    ]
    # A rank without a measurement is not slow, and makes no other rank slow.
    detector.update(90, [math.nan, 1.0, math.nan, math.nan])
    detector.update(100, [math.nan, 1.0, math.nan, math.nan])
    assert len(lines) == 2


def pauses() -> list[float]:
    """Three steps, two of them after a checkpoint that took rank 1 long."""
    world = World.current("cpu")
    engine = Engine(make_model(), loss, fused_adamw, policy="fp32", strategy="ddp", device="cpu")
    stragglers = Stragglers(world, engine.clock, "ddp", every=3, log=pytest.fail)
    for step in range(1, 4):
        pause = SLEEP_SECONDS if step > 1 and world.rank == 1 else 0.0
        stragglers.before(step, pause)
        time.sleep(pause)
        engine.step(microbatches(step, TWO_RANKS[0], world.rank))
        stragglers.after(step)
    seconds = stragglers.seconds(3)
    assert seconds is not None
    assert stragglers.seconds(3) is None
    return seconds


def test_pauses_are_excluded() -> None:
    fast, paused = run_ranks(pauses, 2)[0]
    assert fast > 0
    assert math.isnan(paused)  # nothing else is left


def test_hsdp_is_not_compared() -> None:
    clock = StepClock(torch.device("cpu"))
    world = World(0, 2, torch.device("cpu"), None)
    stragglers = Stragglers(world, clock, "hsdp", every=1, log=pytest.fail)
    stragglers.before(1)
    assert not clock.active


def test_single_rank_is_not_measured() -> None:
    engine = Engine(make_model(), loss, fused_adamw, policy="fp32", device="cpu")
    stragglers = Stragglers(engine.world, engine.clock, "single", every=1, log=pytest.fail)
    for step in (1, 2, 3):
        stragglers.before(step)
        engine.step(microbatches(step, [(4,)]))
        stragglers.after(step)
        assert stragglers.seconds(step) is None  # alone
    assert engine.clock.take() is None


@pytest.mark.gpu
def test_device_times_are_read_without_synchronization() -> None:
    engine = Engine(make_model(), loss, fused_adamw, policy="fp32", device="cuda")
    batches = [
        [Batch(batch.inputs.cuda(), batch.labels.cuda()) for batch in microbatches(step, [(4,)])]
        for step in range(5)
    ]
    engine.step(batches[0])
    engine.step(batches[1])
    engine.clock.active = True
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(batches[2])
        engine.step(batches[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    time_ = engine.clock.take()
    assert time_ is not None
    assert 0 < time_.between < 60
    assert time_.waited == 0
    # While the device is busy, there is nothing to read, and the host does not wait.
    for _ in range(5):
        torch.cuda._sleep(2_000_000_000)
        engine.step(batches[4])
        assert engine.clock.take() is None
        torch.cuda.synchronize()


@pytest.mark.gpu
@ranks(2, cuda=True)
def test_two_gpus_exchange_times_without_synchronization() -> None:
    world = World.current("cuda")
    clock = StepClock(world.device)
    stragglers = Stragglers(world, clock, "ddp", every=1, log=[].append)
    for step in range(1, 4):
        own = ComputeTime(step + world.rank, 0.5)
        clock.take = lambda own=own: own  # type: ignore[method-assign,misc]
        with no_waiting():
            stragglers.after(step)
            torch.ones(4, device="cuda").sum()
        assert stragglers.seconds(step) == [step - 0.5, step + 0.5]
