"""Detection of hanging ranks, the places where they wait, and the messages between ranks."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.distributed import flight_recorder
from distmp.distributed.limits import LINK_SECONDS
from distmp.distributed.progress import PhaseTracker
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rendezvous_store import HashStore
from distmp.faults import watchdog
from distmp.faults.watchdog import Ending, Watchdog
from distmp.utils import frames
from tests.progress import wait_until
from tests.ranks import ranks

LIMIT = 10.0


class Clock:
    """The time of all ranks, in seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def watch(
    rank: int = 0,
    world_size: int = 1,
    store: HashStore | None = None,
    *,
    seconds: float = 100.0,
    first_seconds: float = 0.0,
    interval: float = 0.02,
    per_machine: int | None = None,
) -> Watchdog:
    """Return the watchdog of a rank whose first step has ended."""
    per_machine = per_machine or world_size
    watchdog = Watchdog(
        store or HashStore(),
        RankEnvironment(rank, rank % per_machine, world_size, per_machine),
        seconds,
        first_seconds,
    )
    watchdog._phase, watchdog._interval = PhaseTracker(), interval
    watchdog._phase.begin_step(3, first=bool(first_seconds))
    return watchdog


def watch_all(world_size: int, **options: float) -> list[Watchdog]:
    store = HashStore()
    return [watch(n, world_size, store, **options) for n in range(world_size)]  # type: ignore[arg-type]


def is_hang(watchdogs: list[Watchdog]) -> bool:
    """Let all ranks count; return whether one of them notices that all are idle."""
    noticed = []
    for one in watchdogs:
        one._beat()
        one._check_next_rank()
        noticed.append(one._all_are_idle())
    return any(noticed)


def idle_after(watchdogs: list[Watchdog], clock: Clock) -> float:
    """Return the seconds until a rank notices that all are idle; all count once per second."""
    began = clock.now
    while not is_hang(watchdogs):
        clock.now += 1
    return clock.now - began


def test_hang_is_detected_after_limit_without_progress(clock: Clock) -> None:
    watchdogs = watch_all(3, seconds=LIMIT, interval=1.0)
    assert LIMIT < idle_after(watchdogs, clock) <= LIMIT + 4
    watchdogs[1]._phase.touch()
    is_hang(watchdogs)
    clock.now += 1
    assert LIMIT < idle_after(watchdogs, clock) <= LIMIT + 4


def test_first_step_has_more_time_unless_silent(clock: Clock) -> None:
    watchdogs = watch_all(2, seconds=LIMIT, interval=1.0, first_seconds=6 * LIMIT)
    assert 6 * LIMIT < idle_after(watchdogs, clock) <= 6 * LIMIT + 4
    watchdogs = watch_all(2, seconds=LIMIT, interval=1.0, first_seconds=6 * LIMIT)
    is_hang(watchdogs)
    assert LIMIT < idle_after(watchdogs[:1], clock) <= LIMIT + 4


def test_rank_that_was_silent_gets_more_time_again(clock: Clock) -> None:
    watchdogs = watch_all(2, seconds=LIMIT, interval=1.0, first_seconds=6 * LIMIT)
    is_hang(watchdogs)
    clock.now += LIMIT + 1
    watchdogs[0]._phase.touch()
    assert not is_hang(watchdogs[:1])
    assert 6 * LIMIT < idle_after(watchdogs, clock) <= 6 * LIMIT + 4


def test_limit_is_short_after_the_first_step_of_every_rank(clock: Clock) -> None:
    watchdogs = watch_all(2, seconds=LIMIT, interval=1.0, first_seconds=6 * LIMIT)
    watchdogs[0]._phase.begin_step(2, first=False)
    assert 6 * LIMIT < idle_after(watchdogs, clock) <= 6 * LIMIT + 4
    watchdogs[1]._phase.begin_step(2, first=False)
    assert LIMIT < idle_after(watchdogs, clock) <= LIMIT + 4


def test_hang_is_not_detected_without_limit(clock: Clock) -> None:
    (alone,) = watch_all(1, seconds=float("inf"), first_seconds=float("inf"))
    assert not alone._all_are_idle()
    clock.now += 1e9
    assert not alone._all_are_idle()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 0.95 * LIMIT)), max_size=30))
def test_progress_of_any_rank_prevents_hang(events: list[tuple[int, float]]) -> None:
    """Some rank makes progress within the limit; the others may be arbitrarily late."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        watchdogs = watch_all(4, seconds=LIMIT, interval=1.0)
        for rank, seconds in events:
            until = clock.now + seconds
            while clock.now < until:
                assert not is_hang(watchdogs)
                clock.now = min(clock.now + 1, until)
            watchdogs[rank]._phase.touch()
        assert idle_after(watchdogs, clock) > LIMIT


def test_traffic_is_independent_of_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for world_size in (8, 64):
        store = HashStore()
        watchdogs = [watch(rank, world_size, store, per_machine=4) for rank in range(world_size)]
        for one in watchdogs:
            monkeypatch.setattr(one, "_thread", threading.Thread(target=lambda: None))
            one.watch()
        for one in watchdogs:
            one._turn()
        calls = []
        for one in watchdogs:
            with mock.patch.object(one, "_store", wraps=store) as seen:
                one._turn()
            calls.append([(call[0], len(str(call[1]))) for call in seen.method_calls])
            faulthandler.unregister(watchdog.STACK_SIGNAL)
        assert len({len(found) for found in calls}) == 1
        counts.append((len(calls[0]), max(size for found in calls for _, size in found) < 200))
    assert counts[0] == counts[1]
    assert counts[0][1]


def main_frame() -> FrameType | None:
    return frames.working_frame(threading.main_thread().ident or 0)


class Waiting:
    """The handle of a collective that never ends."""

    def wait(self) -> None:
        threading.Event().wait()


def test_location_of_thread_waiting_for_collective() -> None:
    def finish() -> None:
        Waiting().wait()

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    wait_until(lambda: "in wait\n" in frames.stack_text(sys._current_frames()[thread.ident or 0]))
    frame = sys._current_frames()[thread.ident or 0]
    assert "in finish\n" in frames.stack_text(frame)
    assert frames.collective(frame) == ""  # it appears to wait for another thread
    while frame.f_code is not finish.__code__:
        assert frame.f_back is not None
        frame = frame.f_back
    assert frames.collective(frame).startswith("work.wait (finish, ")


@ranks(2)
def test_collective_and_count_of_blocked_rank(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    noticed = tmp_path / "noticed"  # rank 1 stays away until rank 0 was seen waiting for it
    rank = dist.get_rank()

    def look() -> None:
        while not (noticed.exists() if rank == 1 else frames.collective(main_frame())):
            time.sleep(0.05)
        (started,) = flight_recorder.started().values()
        seen.append((frames.collective(main_frame()), started))
        noticed.touch()

    dist.all_reduce(torch.ones(1))
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    if rank == 1:
        thread.join()
    dist.all_reduce(torch.ones(1))
    thread.join()
    ((place, started),) = seen
    if rank == 0:
        assert place.startswith("all_reduce (test_collective_and_count_of_blocked_rank")
        assert started == 2
    else:
        assert place == ""
        assert started == 1


@ranks(2)
def test_collective_of_joined_thread(tmp_path: Path) -> None:
    """For example the thread that writes a checkpoint in the background."""
    group = dist.new_group(backend="gloo")
    noticed = tmp_path / "noticed"
    places: list[str] = []

    def look() -> None:
        while not (place := frames.collective(main_frame())):
            time.sleep(0.05)
        places.extend([place, frames.stack_text(main_frame())])
        noticed.touch()

    def write() -> None:
        dist.all_gather_object([None, None], "value", group=group)

    if dist.get_rank() == 0:
        threading.Thread(target=look, daemon=True).start()
    else:
        wait_until(noticed.exists)
    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    if dist.get_rank() == 0:
        wait_until(lambda: len(places) == 2)
        assert places[0].startswith("all_gather_object (write, ")
        assert "in write\n" in places[1]


def test_watched_process_writes_its_stack_on_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    monitor = watch()
    monitor.watch()
    try:
        os.kill(os.getpid(), watchdog.STACK_SIGNAL)
    finally:
        monitor.stop()
    assert "in test_watched_process_writes_its_stack_on_a_signal" in capfd.readouterr().err


def test_rank_publishes_heartbeats_until_exit() -> None:
    monitor = watch()
    monitor.watch()
    monitor._phase.begin_step(5, first=False)
    monitor._phase.enter("forward of microbatch", 2)
    wait_until(lambda: monitor._read("beat/0")[1] == "step 5, forward of microbatch 2")
    first = monitor._read("beat/0")[0]
    wait_until(lambda: monitor._read("beat/0")[0] > first)
    process = monitor.process_of(0)
    assert process is not None
    assert process.identity.pid == os.getpid()
    assert not monitor.has_left(0)
    monitor.stop()
    assert monitor.has_left(0)


def test_transferred_bytes_count_as_progress_in_transfer_phases(tmp_path: Path) -> None:
    monitor = watch()
    phase = monitor._phase
    for transfers in (False, True):
        phase.enter("saving a checkpoint", transfers=transfers)
        monitor._detect_transfer()
        before = phase.now.since
        monitor._detect_transfer()
        assert phase.now.since == before
        (tmp_path / "file").write_bytes(bytes(2 * watchdog.TRANSFER_BYTES))
        monitor._detect_transfer()
        assert (phase.now.since > before) is transfers


def test_transferred_bytes_count_as_progress_while_a_run_starts(tmp_path: Path) -> None:
    monitor = watch()
    monitor._phase.restart()
    monitor._detect_transfer()
    before = monitor._phase.now.since
    (tmp_path / "file").write_bytes(bytes(2 * watchdog.TRANSFER_BYTES))
    monitor._detect_transfer()
    assert monitor._phase.now.since > before


def test_reads_of_the_watchdog_are_no_progress() -> None:
    monitor = watch()
    monitor._phase.enter("saving a checkpoint", transfers=True)
    monitor._detect_transfer()
    before = monitor._phase.now.since
    for _ in range(1000):
        monitor._detect_transfer()
    assert monitor._phase.now.since == before


def test_stopped_and_continued_process_does_not_hang() -> None:
    monitor = watch()
    phase = monitor._phase
    phase.now = phase.now._replace(since=phase.now.since - 1000)
    monitor._detect_pause()
    assert time.monotonic() - phase.now.since > 999
    monitor._last_turn -= 1000
    monitor._detect_pause()
    assert time.monotonic() - phase.now.since < 900


def test_first_cause_is_kept() -> None:
    first, second = watch_all(2)
    assert first.ending() is None
    assert second.end_run(Ending(1, "first cause", 1))
    assert not first.end_run(Ending(0, "second cause", 1))
    ending = first.ending()
    assert ending is not None
    assert (ending.rank, ending.cause) == (1, "first cause")


@pytest.mark.parametrize("has_left", [True, False])
def test_exited_process_is_named_unless_it_left(
    has_left: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor, other = watch_all(2)
    identity = other.process.identity._replace(pid=2**22 + 1)
    other._put("process/1", other.process._replace(identity=identity))
    if has_left:
        other._put("left/1", True)
    assert monitor.end_for_lost_ranks() is not has_left
    assert ("rank 1 ended without a message" in capsys.readouterr().err) is not has_left
    ending = monitor.ending()
    assert has_left or (ending is not None and ending.rank == 1)


def test_unreachable_machine_ends_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    here, there = watch(1, 4, store, per_machine=2), watch(2, 4, store, per_machine=2)
    there._put("process/2", there.process._replace(host="node7", address="10.0.0.7"))
    responses = [True, False]
    monkeypatch.setattr(watchdog, "responds", lambda address: responses.pop(0))
    for silence in (0, LINK_SECONDS - 1, 2, 1):
        clock.now += silence
        if not silence:
            there._beat()
        here._check_next_rank()
    assert responses == []
    assert "machine node7 (10.0.0.7) with rank 2 has been silent" in capsys.readouterr().err
    ending = here.ending()
    assert ending is not None
    assert ending.rank == 2
