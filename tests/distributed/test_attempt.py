"""Ranks agree on the number of their attempt, whatever was restarted when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distmp.distributed import rendezvous_store
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rendezvous_store import Agreement, AttemptError, HashStore, Store
from tests.ranks import run_ranks

WORLD_SIZE = 3


def rank(store: Store, number: int, world_size: int = WORLD_SIZE) -> Agreement:
    agreement = Agreement(store, RankEnvironment(number, 0, world_size, 1))
    agreement._limit_seconds = 0.3
    return agreement


def agree(*ranks: Agreement) -> list[int]:
    """Run the agreement of ranks in threads, as processes do, and return their numbers."""
    numbers: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda i=i, r=r: numbers.update({i: r.number()}))
        for i, r in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [numbers[number] for number in range(len(ranks))]


def test_attempts_are_numbered_consecutively() -> None:
    store = HashStore()
    for number in range(4):
        assert agree(*(rank(store, r) for r in range(WORLD_SIZE))) == [number] * WORLD_SIZE


def test_numbering_continues_at_other_world_size() -> None:
    store = HashStore()
    for number, world_size in enumerate((2, 1, 4, 2)):
        assert agree(*(rank(store, r, world_size) for r in range(world_size))) == (
            [number] * world_size
        )


def test_attempts_that_ended_before_agreement_count() -> None:
    store = HashStore()
    for restarts, number in ((0, 0), (4, 4), (4, 5), (9, 9)):
        environments = [RankEnvironment(r, 0, 2, 1) for r in range(2)]
        ranks = [Agreement(store, e, restarts) for e in environments]
        assert agree(*ranks) == [number] * 2


def test_missing_rank_is_named_with_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    agree(*(rank(store, r) for r in range(WORLD_SIZE)))
    store.set("distmp/attempts/of 3/host/1", "node7")
    expected = r"rank 1 on node7 did not start within \d+ s after rank 0"
    attempt_of_0 = rank(store, 0)
    rank(store, 2).publish()
    with pytest.raises(AttemptError, match=expected):
        attempt_of_0.number()


def as_rank(restarts: list[int], port: int) -> int:
    """Return the number on a rank, with the count of restarts that its own agent has."""
    import os

    own = restarts[int(os.environ["RANK"])]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(own),
    )
    world_size = int(os.environ["WORLD_SIZE"])
    store = rendezvous_store.for_current_attempt()
    store.add("ranks", 1)
    store.wait(["ranks"])
    while store.add("ranks", 0) < world_size:
        time.sleep(0.05)
    return rendezvous_store.attempt()


def test_agents_with_different_counts_agree_on_attempt() -> None:
    """After a kill on the second machine, its agent counts a restart and the first one does not."""
    server = rendezvous_store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number, restarts in enumerate(([0, 0], [0, 1], [1, 1])):
        numbers = run_ranks(as_rank, 2, restarts, server.port, initialize=False)
        assert numbers == [number] * 2


class Interleaved:
    """Processes of the same ranks whose steps a list of decisions interleaves."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.current = [self._start(r) for r in range(WORLD_SIZE)]
        self.old: list[Agreement] = []
        self.numbers: dict[Agreement, int] = {}

    def _start(self, number: int) -> Agreement:
        process = rank(self.store, number)
        process.publish()
        return process

    def restart(self, number: int) -> None:
        self.old.append(self.current[number])
        self.current[number] = self._start(number)

    def step(self, process: Agreement) -> None:
        if process not in self.numbers and (number := process.look()) is not None:
            self.numbers[process] = number

    def settle(self) -> None:
        for _ in range(12):
            for process in (*self.current, *self.old):
                self.step(process)

    def all_agree(self) -> bool:
        return all(process in self.numbers for process in self.current)


decisions = st.lists(
    st.tuples(st.sampled_from(["step", "old", "restart", "all"]), st.integers(0, WORLD_SIZE - 1)),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@example([("step", 0), ("step", 1), ("step", 2), ("step", 0), ("step", 0), ("restart", 0)])
@given(decisions)
def test_restart_at_any_time_keeps_attempts_separate(choices: list[tuple[str, int]]) -> None:
    """A number is never shared by processes that were not started for the same attempt."""
    world = Interleaved()
    actions: dict[str, Callable[[int], None]] = {
        "step": lambda r: world.step(world.current[r]),
        "old": lambda r: [world.step(p) for p in world.old[r::WORLD_SIZE]] and None,
        "restart": world.restart,
        # As torchrun does: an agent that restarts its ranks makes all others restart theirs.
        "all": lambda _: [world.restart(r) for r in range(WORLD_SIZE)] and None,
    }
    for action, number in choices:
        actions[action](number)
    world.settle()
    # Ranks that have the number of an attempt that others have left are restarted by their agents.
    for number, process in enumerate(world.current):
        if not world.all_agree() and process in world.numbers:
            world.restart(number)
    world.settle()
    assert world.all_agree()
    assert len({world.numbers[process] for process in world.current}) == 1
    last = world.numbers[world.current[0]]
    assert all(number < last for p, number in world.numbers.items() if p not in world.current)
    by_number: dict[int, list[int]] = {}
    for process, number in world.numbers.items():
        by_number.setdefault(number, []).append(process.rank)
    assert all(len(ranks) == len(set(ranks)) for ranks in by_number.values())


def test_process_of_earlier_attempt_raises_error() -> None:
    store = HashStore()
    old = rank(store, 0)
    old.publish()
    assert agree(*(rank(store, r) for r in range(WORLD_SIZE))) == [0] * WORLD_SIZE
    with pytest.raises(AttemptError):
        old.wait_for_number()
    assert json.loads(store.get("distmp/attempts/of 3/proposal/1"))[0] != old.process
