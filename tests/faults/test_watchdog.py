"""Detection of hanging ranks, the places where they wait, and the messages between ranks."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distmp.distributed import flight_recorder
from distmp.distributed.progress import PhaseTracker
from distmp.distributed.rendezvous_store import HashStore
from distmp.faults import stacks, watchdog
from distmp.faults.peers import Ending, Peers, RankPlace, Status
from distmp.faults.watchdog import Observer, Watchdog
from distmp.utils import frames
from tests.progress import of_children
from tests.ranks import ranks

LIMIT = 10.0


def statuses(*idle: float, count: int = 1) -> dict[int, Status]:
    return {rank: Status(count, seconds, LIMIT, "step 3") for rank, seconds in enumerate(idle)}


def test_all_ranks_have_to_be_over_their_limit() -> None:
    assert Observer().is_hang(statuses(11, 12, 13), now=100)
    assert not Observer().is_hang(statuses(11, 12, 9), now=100)
    assert not Observer().is_hang({}, now=100)


def test_the_idle_time_of_a_stopped_rank_continues() -> None:
    """Its last heartbeat says 0 s: a report would say that nothing has moved for that long."""
    observer = Observer()
    observer.until(100, statuses(0, 11))
    idle = {rank: status.idle for rank, status in observer.until(112, statuses(0, 11)).items()}
    assert idle == {0: 12, 1: 23}


def test_silence_counts_from_the_last_heartbeat() -> None:
    observer = Observer()
    assert not observer.is_hang(statuses(1, 1), now=100)
    # Rank 0 publishes that it waits; rank 1 publishes nothing any more.
    assert not observer.is_hang({0: Status(2, 8, LIMIT, ""), 1: statuses(1, 1)[1]}, now=107)
    assert not observer.is_hang({0: Status(3, 10.5, LIMIT, ""), 1: statuses(1, 1)[1]}, now=108.9)
    assert observer.is_hang({0: Status(4, 11, LIMIT, ""), 1: statuses(1, 1)[1]}, now=109.1)


def test_a_phase_that_may_take_longer_has_another_limit() -> None:
    slow = {**statuses(11, 11), 2: Status(1, 11, 60, "compiling")}
    assert not Observer().is_hang(slow, now=0)


def test_a_rank_that_never_sent_a_heartbeat_does_not_get_the_time_of_the_first_step() -> None:
    """Nor does one that is silent, which no longer is in the phase that may take longer."""
    peers = Peers(HashStore(), 0, 2)
    peers.beat(Status(1, 11, 60, "compiling"))
    observer = Observer(LIMIT)
    assert not observer.is_hang(peers.statuses(), now=100)
    assert not observer.is_hang(peers.statuses(), now=110)
    assert observer.is_hang(peers.statuses(), now=110.1)
    peers.beat(Status(2, 0.0, 60, "compiling"))
    assert not observer.is_hang(peers.statuses(), now=111)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 9)), max_size=40))
def test_while_some_rank_makes_progress_there_is_no_hang(events: list[tuple[int, float]]) -> None:
    """Some rank makes progress at least every 9 seconds; the others may be arbitrarily late."""
    observer, now, last = Observer(), 0.0, dict.fromkeys(range(4), 0.0)
    for count, (rank, seconds) in enumerate(events):
        now += seconds
        last[rank] = now
        seen = {r: Status(count, now - since, LIMIT, "") for r, since in last.items()}
        assert not observer.is_hang(seen, now)
    seen = {r: Status(-1, now + 10.1 - since, LIMIT, "") for r, since in last.items()}
    assert observer.is_hang(seen, now + 10.1)


class Waiting:
    """The handle of a collective that never ends."""

    def wait(self) -> None:
        threading.Event().wait()


def test_the_place_of_a_thread_that_waits_for_a_collective() -> None:
    def finish() -> None:
        Waiting().wait()

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    until(lambda: "in wait\n" in stacks.show(sys._current_frames()[thread.ident or 0]))
    frame = sys._current_frames()[thread.ident or 0]
    assert "in finish\n" in stacks.show(frame)
    assert frames.collective(frame) == ""  # it appears to wait for another thread
    while frame.f_code is not finish.__code__:
        assert frame.f_back is not None
        frame = frame.f_back
    assert frames.collective(frame).startswith("work.wait (finish, ")


@ranks(2)
def test_the_collective_of_a_blocked_rank_and_the_count_of_collectives(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    noticed = tmp_path / "noticed"  # rank 1 stays away until rank 0 was seen waiting for it
    rank = dist.get_rank()

    def look() -> None:
        while not (noticed.exists() if rank == 1 else frames.collective(stacks.main_thread())):
            time.sleep(0.05)
        (started,) = flight_recorder.started().values()
        seen.append((frames.collective(stacks.main_thread()), started))
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
        assert place.startswith("all_reduce (test_the_collective_of_a_blocked_rank_")
        assert started == 2
    else:
        assert place == ""
        assert started == 1


@ranks(2)
def test_the_collective_of_a_thread_that_is_joined(tmp_path: Path) -> None:
    """For example the thread that writes a checkpoint in the background."""
    group = dist.new_group(backend="gloo")
    noticed = tmp_path / "noticed"
    places: list[str] = []

    def look() -> None:
        while not (place := frames.collective(stacks.main_thread())):
            time.sleep(0.05)
        places.extend([place, stacks.show(stacks.main_thread())])
        noticed.touch()

    def write() -> None:
        dist.all_gather_object([None, None], "value", group=group)

    if dist.get_rank() == 0:
        threading.Thread(target=look, daemon=True).start()
    else:
        until(noticed.exists)
    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    if dist.get_rank() == 0:
        until(lambda: len(places) == 2)
        assert places[0].startswith("all_gather_object (write, ")
        assert "in write\n" in places[1]


def test_another_process_shows_its_stack() -> None:
    shared = stacks.SharedStack()
    try:
        stack = stacks.of_process(os.getpid(), shared.descriptor)
    finally:
        shared.close()
    assert "in test_another_process_shows_its_stack" in stack
    assert stacks.of_process(2**22 + 1, 3) == ""


def watch(peers: Peers, current_phase: PhaseTracker, seconds: float = 100.0) -> Watchdog:
    return Watchdog(peers, current_phase, seconds, seconds, interval_seconds=0.02)


def until(condition: object) -> None:
    progress = of_children()
    while not condition():  # type: ignore[operator]
        assert progress.problem() is None
        time.sleep(0.01)


def test_a_rank_publishes_heartbeats_until_it_leaves() -> None:
    store, current_phase = HashStore(), PhaseTracker()
    peers = Peers(store, 0, 1)
    monitor = watch(peers, current_phase)
    monitor.start()
    current_phase.begin_step(5, first=False)
    current_phase.enter("forward of microbatch", 2)
    until(lambda: peers.statuses()[0].doing == "step 5, forward of microbatch 2")
    first = peers.statuses()[0].count
    until(lambda: peers.statuses()[0].count > first)
    places = peers.places()
    assert places is not None
    assert places[0].pid == os.getpid()
    monitor.stop()
    assert peers.statuses() == {}
    assert peers.has_left(0)


def test_transferred_bytes_are_progress_in_phases_that_transfer(tmp_path: Path) -> None:
    current_phase = PhaseTracker()
    monitor = watch(Peers(HashStore(), 0, 1), current_phase)
    for transfers in (False, True):
        current_phase.enter("saving a checkpoint", transfers=transfers)
        monitor._detect_transfer()
        before = current_phase.now.since
        monitor._detect_transfer()
        assert current_phase.now.since == before
        (tmp_path / "file").write_bytes(bytes(2 * watchdog.TRANSFER_BYTES))
        monitor._detect_transfer()
        assert (current_phase.now.since > before) is transfers


def test_a_process_that_was_stopped_does_not_hang() -> None:
    current_phase = PhaseTracker()
    monitor = watch(Peers(HashStore(), 0, 1), current_phase)
    current_phase.now = current_phase.now._replace(since=current_phase.now.since - 1000)
    monitor._detect_pause()
    assert time.monotonic() - current_phase.now.since > 999
    monitor._last_turn -= 1000
    monitor._detect_pause()
    assert time.monotonic() - current_phase.now.since < 900


def test_the_first_cause_counts() -> None:
    store = HashStore()
    first, second = Peers(store, 0, 2), Peers(store, 1, 2)
    assert first.ending() is None
    assert second.end(Ending(1, 3, "first cause", 1))
    assert not first.end(Ending(0, 3, "second cause", 1))
    ending = first.ending()
    assert ending is not None
    assert (ending.rank, ending.cause) == (1, "first cause")


def test_a_process_that_is_gone_is_named_unless_it_had_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = HashStore()
    own, others = Peers(store, 0, 2), Peers(store, 1, 2)
    for peers, pid in ((own, os.getpid()), (others, 2**22 + 1)):
        peers.beat(Status(1, 0.0, LIMIT, ""))
        peers.introduce(RankPlace(socket.gethostname(), pid, 0))
    others.leave()
    monitor = watch(own, PhaseTracker())
    assert not monitor.end_for_lost_ranks()
    others.beat(Status(2, 0.0, LIMIT, ""))
    assert monitor.end_for_lost_ranks()
    assert "rank 1 ended without a message" in capsys.readouterr().err
    ending = own.ending()
    assert ending is not None
    assert ending.rank == 1
