"""What ranks tell each other beside training: that they live, where they stand, why they end.

Messages go through the rendezvous store (`distmp.distributed.rendezvous_store`), not through
collectives: they have to work while a rank is missing from a collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from distmp.distributed.rendezvous_store import Store


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: its machine and process, and the file descriptor for its stack."""

    host: str
    pid: int
    stack: int


@dataclass(frozen=True)
class Status:
    """A sign of life.

    Attributes:
        count: Another number in each of them.
        idle: Seconds since the main thread last got further.
        limit: After how many such seconds something is wrong.
        doing: Where it is, in words.
    """

    count: int
    idle: float
    limit: float
    doing: str


@dataclass(frozen=True)
class Answer:
    """Where a rank says it stands, when it is asked.

    Attributes:
        doing: What it does, in words.
        idle: Seconds since it last got further.
        waits_in: The collective that it waits in, or "".
        collectives: How many collectives it has started; -1: not known.
        last: Name of the collective that distmp has started last.
        stack: Of the main thread, the innermost call last.
    """

    doing: str
    idle: float
    waits_in: str
    collectives: int
    last: str
    stack: str


@dataclass(frozen=True)
class Ending:
    """Why the ranks of a run end.

    Attributes:
        rank: Where it began: the rank that failed, is gone, or has found that others hang.
        step: Step that was under way, 0 before the first one.
        cause: In one line.
        exit_code: Of that rank.
        silent: Ranks that do not answer.
    """

    rank: int
    step: int
    cause: str
    exit_code: int
    silent: list[int] = field(default_factory=list)


class Peers:
    """All ranks of a run, as one of them reaches them.

    Every method talks to the store and raises `torch.distributed.DistError` where that is gone.

    Args:
        store: Shared by the ranks, and by nobody else.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store

    def introduce(self, place: RankPlace) -> None:
        """Say where this rank runs, after a first sign of life."""
        self._put(f"place/{self.rank}", asdict(place))

    def places(self) -> dict[int, RankPlace] | None:
        """Return where every rank runs, or None before all have said so."""
        keys = [f"place/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            return None
        return {rank: RankPlace(**value) for rank, value in enumerate(self._get(keys))}

    def beat(self, status: Status) -> None:
        """Give a sign of life."""
        self._put(f"status/{self.rank}", asdict(status))

    def statuses(self) -> dict[int, Status]:
        """Return the last sign of life of every rank that has not left."""
        keys = [f"status/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            return {}
        return {rank: Status(**value) for rank, value in enumerate(self._get(keys)) if value}

    def leave(self) -> None:
        """Say that this rank has come to its end, in order or not."""
        self._put(f"status/{self.rank}", None)

    def has_left(self, rank: int) -> bool:
        """Whether a rank that has introduced itself said that it came to its end."""
        return self._get([f"status/{rank}"])[0] is None

    def ask(self) -> None:
        """Ask every rank where it stands."""
        self._put("question", True)

    def is_asked(self) -> bool:
        """Whether somebody has."""
        return self._store.check(["question"])

    def answer(self, answer: Answer) -> None:
        """Say where this rank stands."""
        self._put(f"answer/{self.rank}", asdict(answer))

    def answers(self, ranks: Iterable[int]) -> dict[int, Answer]:
        """Return the answers that have come."""
        keys = {rank: f"answer/{rank}" for rank in ranks}
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: Answer(**self._get([key])[0]) for rank, key in there.items()}

    def end(self, ending: Ending) -> bool:
        """Say why the run ends; return whether this rank was the first to do so."""
        text = json.dumps(asdict(ending))
        return bool(self._store.compare_set("ending", "", text) == text.encode())

    def ending(self) -> Ending | None:
        """Return why the run ends, or None while it goes on."""
        return Ending(**self._get(["ending"])[0]) if self._store.check(["ending"]) else None

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, keys: list[str]) -> list[Any]:
        return [json.loads(value) for value in self._store.multi_get(keys)]
