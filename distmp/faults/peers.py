"""Exchange heartbeats, phases and failure causes between ranks.

Messages go through the rendezvous store (`distmp.distributed.rendezvous_store`) instead of
collectives, because they have to work while a rank is missing from a collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from distmp.distributed.rendezvous_store import Store


@dataclass(frozen=True)
class RankPlace:
    """The machine and process of a rank.

    Attributes:
        host: Name of its machine.
        pid: Its process id.
        stack: The file descriptor of its `SharedStack`.
        address: The address at which other machines reach its machine; "" if unknown.
    """

    host: str
    pid: int
    stack: int
    address: str = ""


@dataclass(frozen=True)
class Status:
    """A heartbeat.

    Attributes:
        count: Number of the heartbeat.
        idle: Seconds since the main thread last made progress.
        limit: Limit of `idle` in seconds; beyond it, the rank hangs.
        doing: The current phase as text.
    """

    count: int
    idle: float
    limit: float
    doing: str


NO_STATUS = Status(0, 0.0, float("inf"), "startup, before its first heartbeat")
"""Stands for the heartbeat of a rank that has sent none."""


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a query of its state.

    Attributes:
        doing: The current phase as text.
        idle: Seconds since the main thread last made progress.
        waits_in: The collective in which the host waits, or "".
        synchronizes: The call in which the host waits for the device, or "".
        collectives: Number of collectives that it has started, by process group, see
            `flight_recorder.started`.
        last: Name of the collective that distmp started last.
        stack: The stack of the main thread, with the innermost call last.
        host: Name of its machine.
    """

    doing: str
    idle: float
    waits_in: str
    synchronizes: str
    collectives: dict[str, int]
    last: str
    stack: str
    host: str = ""


@dataclass(frozen=True)
class Trace:
    """Contents of the flight recorder of a rank, sent after its `Answer`.

    Attributes:
        pending: Number and name of the collectives that have not completed, by process group, see
            `flight_recorder.pending`.
        file: Path of the file with NCCL's recorder, or "".
        problem: Why it could not be written, in one line, or "".
    """

    pending: dict[str, list[tuple[int, str]]]
    file: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Ending:
    """Why the ranks of a run end.

    Attributes:
        rank: The rank that failed, is gone, or detected a hang.
        step: The current step, or 0 before the first one.
        cause: The cause in one line.
        exit_code: Exit code of that rank.
        silent: Ranks that do not answer.
    """

    rank: int
    step: int
    cause: str
    exit_code: int
    silent: list[int] = field(default_factory=list)


class Peers:
    """Exchanges messages with all ranks of a run.

    Every method uses the store and raises `torch.distributed.DistError` if it is gone.

    Args:
        store: A store that only the ranks of this run share.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store

    def introduce(self, place: RankPlace) -> None:
        """Publish the process of this rank, after a first heartbeat."""
        self._put(f"place/{self.rank}", asdict(place))

    def places(self) -> dict[int, RankPlace] | None:
        """Return the process of every rank, or None before all have published theirs."""
        keys = [f"place/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            return None
        return {rank: RankPlace(**value) for rank, value in enumerate(self._get(keys))}

    def known_places(self) -> dict[int, RankPlace]:
        """Return the process of every rank that has published its own."""
        places = self._present("place", range(self.world_size))
        return {rank: RankPlace(**value) for rank, value in places.items()}

    def beat(self, status: Status) -> None:
        """Publish a heartbeat."""
        self._put(f"status/{self.rank}", asdict(status))

    def statuses(self) -> dict[int, Status]:
        """Return the last heartbeat of every rank that has not left; `NO_STATUS` before it."""
        keys = [f"status/{rank}" for rank in range(self.world_size)]
        if self._store.check(keys):
            values = dict(enumerate(self._get(keys)))
        else:
            values = self._present("status", range(self.world_size))
        statuses = dict.fromkeys(range(self.world_size), NO_STATUS)
        statuses |= {rank: Status(**value) for rank, value in values.items() if value}
        return {rank: s for rank, s in statuses.items() if values.get(rank, True)}

    def leave(self) -> None:
        """Publish that this rank has ended, with or without an error."""
        self._put(f"status/{self.rank}", None)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has published its end."""
        return self._get([f"status/{rank}"])[0] is None

    def ask(self) -> None:
        """Ask every rank for its state."""
        self._put("question", True)

    def is_asked(self) -> bool:
        """Whether a rank has called `ask`."""
        return self._store.check(["question"])

    def answer(self, answer: Answer) -> None:
        """Publish the state of this rank."""
        self._put(f"answer/{self.rank}", asdict(answer))

    def answers(self, ranks: Iterable[int]) -> dict[int, Answer]:
        """Return the answers that have arrived."""
        return {rank: Answer(**value) for rank, value in self._present("answer", ranks).items()}

    def publish_trace(self, trace: Trace) -> None:
        """Publish the contents of the flight recorder of this rank."""
        self._put(f"trace/{self.rank}", asdict(trace))

    def traces(self, ranks: Iterable[int]) -> dict[int, Trace]:
        """Return the traces that have arrived."""
        return {rank: Trace(**value) for rank, value in self._present("trace", ranks).items()}

    def end(self, ending: Ending) -> bool:
        """Publish why the run ends; return whether this rank was the first to do so."""
        text = json.dumps(asdict(ending))
        return bool(self._store.compare_set("ending", "", text) == text.encode())

    def ending(self) -> Ending | None:
        """Return why the run ends, or None while it continues."""
        return Ending(**self._get(["ending"])[0]) if self._store.check(["ending"]) else None

    def _present(self, kind: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Return the messages of a kind that have arrived, by rank."""
        keys = {rank: f"{kind}/{rank}" for rank in ranks}
        present = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._get([key])[0] for rank, key in present.items()}

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, keys: list[str]) -> list[Any]:
        return [json.loads(value) for value in self._store.multi_get(keys)]
