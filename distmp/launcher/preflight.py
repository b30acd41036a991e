"""Preflight: whether all ranks are alike, reach each other and are equally fast, before they train.

Ranks first compare who they are through the store that the launcher keeps; then they meet as for
training; then they multiply matrices and exchange data, so that slow ones can be named. A watchdog
on every rank ends the job when time is up and names the ranks that did not get as far as the rest.

    torchrun ... -m distmp.launcher.preflight --config FILE      # nothing but this
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from distmp import settings
from distmp.config import RunConfig, load
from distmp.errors import LOST_PEER_EXIT_CODE, DistmpError, SetupError
from distmp.launcher import job_store
from distmp.launcher.circumstances import relevant, versions
from distmp.launcher.environment import RankEnvironment
from distmp.parallel.world import World, join, leave
from distmp.settings.flat import digest, flat
from distmp.telemetry.units import bytes_text

# All of the preflight, from when a rank begins it.
LIMIT_SECONDS = 50.0
# How long the store may take to answer.
STORE_SECONDS = 15.0
# After that much more a process ends that could not end by itself.
SPARE_SECONDS = 5.0
# After it has spoken a rank stays for so long, the others longer: its exit code counts.
_LAST_WORDS_SECONDS = 1.0
_POLL_SECONDS = 0.02

# How many times slower than the median of the others is worth a word.
SLOW_PRODUCT = 1.5
SLOW_LINK = 2.0

_ADVICE = "see that this address is the first machine's, and that no firewall is in the way"

# What is multiplied and what is sent; a fraction of a second of either.
_MATRIX = {"cpu": 512, "cuda": 4096}
_SENT_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_REPETITIONS = 10
# The best of a few times counts, and a busy processor is not busy for so long.
_PRODUCT_SECONDS = 0.2

# Variables that are meant to differ from rank to rank.
_OWN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "PET_",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
)


class PreflightError(DistmpError):
    """Something that this rank has found before it could tell the others."""


@dataclass(frozen=True)
class Identity:
    """Who a rank is, and what it ought to have in common with the others.

    Attributes:
        host: Name of its machine.
        pid: Its process.
        local_world_size: Ranks of its machine.
        versions: Of what computes and talks.
        digest: Of its configuration.
        environment: The variables that change how a run behaves.
    """

    host: str
    pid: int
    local_world_size: int
    versions: Mapping[str, str | None]
    digest: str
    environment: Mapping[str, str]


class Measured(NamedTuple):
    """How fast a rank was; times in seconds.

    Attributes:
        product: Of a matrix product.
        link: Of an exchange with the better of its two neighbours; 0.0 without neighbours.
        all_reduce: Of an all-reduce over all ranks, the same on all of them.
    """

    product: float
    link: float
    all_reduce: float


@dataclass(frozen=True)
class Report:
    """What the preflight found; nothing of it keeps the run from starting.

    Attributes:
        summary: One line of figures.
        warnings: A line for each oddity, naming ranks and machines.
    """

    summary: str
    warnings: list[str] = field(default_factory=list)


def is_wanted(config: RunConfig, environment: RankEnvironment) -> bool:
    """Whether a run begins with a preflight: by itself if there is more than one machine."""
    if config.preflight == "auto":
        return environment.world_size > environment.local_world_size
    return config.preflight == "always" and environment.world_size > 1


def join_checked(
    config: RunConfig, environment: RankEnvironment, limit_seconds: float = LIMIT_SECONDS
) -> tuple[World, Report]:
    """Meet the other ranks as `join` does, with a preflight around it; every rank has to call it.

    It takes a second or two where all is well, and never longer than `limit_seconds`: then the
    process ends with exit code 1, and one rank says which ranks did not get as far as the others.

    Returns:
        The ranks, and what there is to say about them, the same on every rank.

    Raises:
        PreflightError: If this rank does not reach the store.
        SetupError: On every rank, if versions or configurations differ; names ranks and settings.
    """
    started = time.monotonic()
    meeting = _Meeting(environment, limit_seconds)
    with meeting.watched():
        meeting.connect()
        meeting.enter("compare versions and configurations")
        warnings, identities = _compare(meeting, config)
        meeting.enter("connect to the other ranks")
        world = join(environment.local_rank, timeout_seconds=60 * config.timeout_minutes)
        measured = _measure(meeting, world, stride([who.local_world_size for who in identities]))
        meeting.forget()
    hosts = [f"rank {rank} on {who.host}" for rank, who in enumerate(identities)]
    summary = _summary(measured, identities, world, time.monotonic() - started)
    return world, Report(summary, [*warnings, *slow_ranks(measured, hosts)])


class _Meeting:
    """What ranks tell each other through the store, beside any collective.

    Args:
        environment: This rank among all.
        limit_seconds: When the watchdog ends the process.
    """

    def __init__(self, environment: RankEnvironment, limit_seconds: float) -> None:
        self.environment = environment
        self.rank, self.world_size = environment.rank, environment.world_size
        self._limit = limit_seconds
        self._deadline = time.monotonic() + limit_seconds
        self._address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._store: Any = None
        self._watchdogs: Any = None
        self._phase = "reach the store"

    def connect(self) -> None:
        """Reach the store.

        Raises:
            PreflightError: If it cannot be reached.
        """
        # Two connections: whoever waits on one of them keeps others from using it.
        self._store, self._watchdogs = self._new_connection(), self._new_connection()

    def _new_connection(self) -> PrefixStore:
        seconds = min(STORE_SECONDS, self._limit / 2)
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        except RuntimeError as error:
            raise PreflightError(
                f"preflight: rank {self.rank} on {socket.gethostname()} does not reach the store "
                f"at {self._address} within {seconds:g} s; {_ADVICE} ({_first_line(error)})"
            ) from None
        # What ranks said before a restart is no news.
        return PrefixStore(f"preflight/{job_store.restarts()}/{self.world_size}", store)

    def enter(self, phase: str) -> None:
        """Tell what this rank does next."""
        self._phase = phase
        entry = {"phase": phase, "host": socket.gethostname(), "pid": os.getpid()}
        count = int(self._store.add(f"count/{self.rank}", 1))
        self.put(f"phase/{self.rank}", {**entry, "count": count})

    def put(self, key: str, value: Any) -> None:
        """Tell the others something that JSON can hold."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Wait until somebody has told something; the watchdog sees to it that this ends."""
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        return json.loads(self._store.get(key))

    def forget(self) -> None:
        """Take back what this rank has told, as others may come in its place without a restart."""
        for key in ("count", "phase", "config", "identity"):
            self._store.delete_key(f"{key}/{self.rank}")
        if self.rank == 0:
            self._store.delete_key("result")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the process if the block takes too long, also where Python itself is stuck."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=[done], name="preflight", daemon=True)
        thread.start()
        # A thread of its own that needs no interpreter, for code that never lets go of it.
        faulthandler.dump_traceback_later(self._limit + SPARE_SECONDS, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            done.set()
            thread.join()

    def _watch(self, done: threading.Event) -> None:
        if done.wait(max(0.0, self._deadline - time.monotonic())):
            return
        try:
            message = self._last_words()
        except RuntimeError as error:
            message = (
                f"rank {self.rank} on {socket.gethostname()} has lost the store at "
                f"{self._address} while it was to {self._phase} ({_first_line(error)})"
            )
        if message:
            sys.stderr.write(f"distmp: preflight: {message}\n")
            sys.stderr.flush()
        time.sleep(_LAST_WORDS_SECONDS if message else 3 * _LAST_WORDS_SECONDS)
        os._exit(1 if message else LOST_PEER_EXIT_CODE)

    def _last_words(self) -> str:
        """Return what there is to say, or nothing if another rank says it."""
        if self._watchdogs is None:
            return (
                f"rank {self.rank} on {socket.gethostname()} is still to {self._phase} at "
                f"{self._address} after {self._limit:g} s; {_ADVICE}"
            )
        speaker = self._watchdogs.compare_set("speaker", "", str(self.rank)).decode()
        if speaker != str(self.rank):
            return ""
        entries: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            if self._watchdogs.check([f"phase/{rank}"]):
                entries[rank] = json.loads(self._watchdogs.get(f"phase/{rank}"))
        return who_is_behind(
            entries, self.world_size, self.environment.local_world_size, self._limit
        )


def who_is_behind(
    entries: Mapping[int, Mapping[str, Any]],
    world_size: int,
    local_world_size: int,
    seconds: float,
) -> str:
    """Name the ranks that keep the others waiting.

    Args:
        entries: What each rank does ("phase", and its number, "count"), where ("host", "pid").
        world_size: Number of ranks, some of which may have no entry.
        local_world_size: Ranks of each machine.
        seconds: How long the ranks have had.
    """
    silent = [rank for rank in range(world_size) if rank not in entries]
    hosts = {rank // local_world_size: str(entry["host"]) for rank, entry in entries.items()}
    if silent:
        told = []
        for node in sorted({rank // local_world_size for rank in silent}):
            ranks = [rank for rank in silent if rank // local_world_size == node]
            where = f"on {hosts[node]}" if node in hosts else f"on machine {node}, host unknown"
            told.append(f"{_names(ranks)} {where}")
        known = ", ".join(sorted(set(hosts.values())))
        return (
            f"no word from {'; '.join(told)} within {seconds:g} s (ranks on {known} have spoken); "
            "look at its own output, and whether it reaches the first machine"
        )
    least, most = (choose(e["count"] for e in entries.values()) for choose in (min, max))
    behind = {rank: entry for rank, entry in entries.items() if entry["count"] == least}
    told = [
        f"rank {rank} on {entry['host']} (pid {entry['pid']})" for rank, entry in behind.items()
    ]
    phase = next(iter(behind.values()))["phase"]
    if least == most:
        return (
            f"all ranks are still to {phase} after {seconds:g} s ({', '.join(told)}); machines "
            "may not reach each other on the interfaces that they have chosen: see "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and firewalls"
        )
    return (
        f"{', '.join(told)} {'is' if len(told) == 1 else 'are'} still to {phase} after "
        f"{seconds:g} s; the others wait"
    )


def _compare(meeting: _Meeting, config: RunConfig) -> tuple[list[str], list[Identity]]:
    """Compare ranks through the store; return oddities, and who the ranks are."""
    environment = meeting.environment
    values = flat(settings.to_mapping(config))
    mine = Identity(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_world_size=environment.local_world_size,
        versions=versions(),
        digest=digest(values),
        environment=relevant(os.environ),
    )
    meeting.put(f"config/{meeting.rank}", values)
    meeting.put(f"identity/{meeting.rank}", asdict(mine))
    if meeting.rank == 0:
        entries = [meeting.get(f"identity/{rank}") for rank in range(meeting.world_size)]
        identities = [Identity(**entry) for entry in entries]
        problems = differences(identities, lambda rank: meeting.get(f"config/{rank}"))
        warnings = odd_variables(identities)
        meeting.put("result", [problems, warnings, entries])
    problems, warnings, entries = meeting.get("result")
    if problems:
        raise SetupError({0: "preflight: " + "; ".join(problems)}, exit_code=2)
    return warnings, [Identity(**entry) for entry in entries]


def differences(
    identities: Sequence[Identity], configuration: Callable[[int], Mapping[str, Any]]
) -> list[str]:
    """Name what is not the same on all ranks: versions and settings, by rank and machine.

    Args:
        identities: Of all ranks.
        configuration: Returns the settings of a rank by dotted name; only asked if digests differ.
    """
    problems: list[str] = []
    for name in identities[0].versions:
        problems += _disagreement(
            f"version of {name}", [who.versions.get(name) for who in identities], identities
        )
    if len({who.digest for who in identities}) > 1:
        # One rank of each kind is enough to name the settings.
        first = {who.digest: rank for rank, who in reversed([*enumerate(identities)])}
        configurations = {digest: configuration(rank) for digest, rank in first.items()}
        of_rank = [configurations[who.digest] for who in identities]
        for name in dict.fromkeys(name for values in configurations.values() for name in values):
            problems += _disagreement(name, [values.get(name) for values in of_rank], identities)
    return problems


def odd_variables(identities: Sequence[Identity]) -> list[str]:
    """Name environment variables that are not the same on all ranks, and should probably be."""
    names = sorted({name for who in identities for name in who.environment})
    return [
        told
        for name in names
        if not name.startswith(_OWN_VARIABLES)
        for told in _disagreement(
            name, [who.environment.get(name) for who in identities], identities
        )
    ]


def _disagreement(
    name: str, values: Sequence[Any], identities: Sequence[Identity]
) -> Iterator[str]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("unset" if value is None else json.dumps(value), []).append(rank)
    if len(ranks) > 1:
        told = [
            f"{value} on {_names(who)} ({', '.join(sorted({identities[r].host for r in who}))})"
            for value, who in ranks.items()
        ]
        yield f"{name} differs: {', '.join(told)}"


def _measure(meeting: _Meeting, world: World, stride: int) -> list[Measured]:
    """Return how fast every rank is; all ranks get the same list."""
    device = world.device
    meeting.enter("multiply matrices")
    side = _MATRIX[device.type]
    matrix = torch.ones(side, side, device=device)
    product, until = math.inf, time.monotonic() + _PRODUCT_SECONDS
    while time.monotonic() < until or product == math.inf:
        product = min(product, _best_time(lambda: torch.mm(matrix, matrix), device))
    sent = torch.ones(_SENT_BYTES[device.type] // 4, device=device)
    meeting.enter("exchange data with its neighbours")
    links = [
        _best_time(lambda partner=partner: _exchange(sent, partner), device)  # type: ignore[misc]
        for partner in _in_step(partners(world.rank, world.world_size, stride), world)
    ]
    meeting.enter("add up data over all ranks")
    all_reduce = _best_time(lambda: dist.all_reduce(sent), device)
    mine = Measured(product, min(links, default=0.0), all_reduce)
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, tuple(mine), group=world.group)
    return [Measured(*numbers) for numbers in everyone]


def stride(local_sizes: Sequence[int]) -> int:
    """Return how far apart the ranks are that exchange data: on neighbouring machines.

    Args:
        local_sizes: For each rank, how many ranks its machine has.
    """
    alike = len(set(local_sizes)) == 1 and len(local_sizes) % local_sizes[0] == 0
    return local_sizes[0] if alike and local_sizes[0] < len(local_sizes) else 1


def partners(rank: int, world_size: int, stride: int) -> list[int | None]:
    """Return with whom a rank exchanges data in each round; None: it rests.

    Ranks that are `stride` apart form a ring, and everybody exchanges with both neighbours: one
    that is slow with both is slow itself.
    """
    count = world_size // stride
    place, lane = divmod(rank, stride)
    found: list[int | None] = []
    for pairs in _rounds(count):
        partner = pairs.get(place)
        found.append(None if partner is None else partner * stride + lane)
    return found


def _rounds(count: int) -> Iterator[dict[int, int]]:
    """Give who meets whom on a ring of so many places, as few rounds as there can be."""
    even = [(place, place + 1) for place in range(0, count - 1, 2)]
    odd = [(place, (place + 1) % count) for place in range(1, count - count % 2, 2)]
    closing = [(count - 1, 0)] if count % 2 and count > 1 else []
    for pairs in (even, odd if count > 2 else [], closing):
        if pairs:
            yield {a: b for pair in pairs for a, b in (pair, pair[::-1])}


def _in_step(rounds: Sequence[int | None], world: World) -> Iterator[int]:
    """Give the partners; each round begins at the same time on all ranks."""
    for partner in rounds:
        dist.barrier(group=world.group)
        if partner is not None:
            yield partner


def _exchange(sent: Tensor, partner: int) -> None:
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, partner),
        dist.P2POp(dist.irecv, received, partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _best_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of a few times, the one that other processes disturbed least."""
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def slow_ranks(measured: Sequence[Measured], hosts: Sequence[str]) -> list[str]:
    """Name the ranks that are far slower than the median of the others.

    Args:
        measured: Of all ranks.
        hosts: What each is called.
    """
    told = []
    for rank, numbers in enumerate(measured):
        others = [*measured[:rank], *measured[rank + 1 :]]
        for what, mine, theirs, limit in (
            ("a matrix product", numbers.product, [o.product for o in others], SLOW_PRODUCT),
            ("an exchange of data", numbers.link, [o.link for o in others if o.link], SLOW_LINK),
        ):
            middle = statistics.median(theirs) if theirs else 0.0
            if middle and mine > limit * middle:
                told.append(
                    f"{hosts[rank]} is slow: {what} takes {1000 * mine:.3g} ms, "
                    f"{mine / middle:.1f} x the median of the others"
                )
    return told


def _summary(
    measured: Sequence[Measured], identities: Sequence[Identity], world: World, seconds: float
) -> str:
    size = _SENT_BYTES[world.device.type]
    hosts = len({who.host for who in identities})
    products = [1000 * numbers.product for numbers in measured]
    links = [size / numbers.link for numbers in measured if numbers.link]
    told = [
        f"{len(measured)} ranks on {hosts} host{'s' if hosts > 1 else ''}, alike",
        f"matrix product {min(products):.3g} to {max(products):.3g} ms",
        f"all-reduce {bytes_text(size / max(n.all_reduce for n in measured))}/s",
    ]
    if links:
        told.append(f"links {bytes_text(min(links))}/s to {bytes_text(max(links))}/s")
    return f"{'; '.join(told)}; {seconds:.1f} s"


def _names(ranks: Sequence[int]) -> str:
    """Write ranks with runs drawn together: ranks 0-3, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {told}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Do nothing but the preflight, and return the exit code of this rank."""
    from distmp.train import run_as_rank

    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _only_check)


def _only_check(config: RunConfig, environment: RankEnvironment) -> int:
    if environment.world_size == 1:
        raise PreflightError("preflight: there is one rank; `distmp doctor` looks at one machine")
    _, report = join_checked(config, environment)
    if environment.rank == 0:
        for line in (report.summary, *report.warnings):
            sys.stdout.write(f"preflight: {line}\n")
    leave()
    return 0


if __name__ == "__main__":
    from distmp.train import end_process

    end_process(main())
