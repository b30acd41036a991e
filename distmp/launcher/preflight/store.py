"""What ranks tell each other before they train, through the store that their launcher keeps."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from distmp.distributed import rendezvous_store
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import LOST_PEER_EXIT_CODE, DistmpError

# How long the store may take to answer.
STORE_SECONDS = 15.0
# After that much more a process ends that could not end by itself.
SPARE_SECONDS = 5.0
# After it has spoken a rank stays for so long, the others longer: its exit code counts.
_LAST_WORDS_SECONDS = 1.0
_POLL_SECONDS = 0.02

_ADVICE = "see that this address is the first machine's, and that no firewall is in the way"


class PreflightError(DistmpError):
    """Something that this rank has found before it could tell the others."""


class PreflightStore:
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
        return PrefixStore(f"preflight/{rendezvous_store.restarts()}/{self.world_size}", store)

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
            told.append(f"{rank_names(ranks)} {where}")
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


def rank_names(ranks: Sequence[int]) -> str:
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
