"""Exchange messages between ranks before training, through the launcher's store."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from distmp.distributed import rendezvous_store
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import LOST_PEER_EXIT_CODE, DistmpError, rank_names
from distmp.launcher.network import LARGE_MESSAGE, MTU_ADVICE

# Timeout of the connection to the store.
STORE_SECONDS = 15.0
# Time after the limit until faulthandler ends a process that the watchdog could not end.
SPARE_SECONDS = 5.0
# A rank that computes, for example while it compiles kernels or starts NCCL, makes progress. In a
# phase that waits for other ranks this ends after so many limits, because NCCL polls.
BUSY_LIMITS = 3
_BUSY_SHARE = 0.1
_BEAT_SECONDS = 1.0
# The rank that reports exits after this time, the others later, so that its exit code counts.
_EXIT_SECONDS = 1.0
_POLL_SECONDS = 0.02
_PROGRESS = "progress"
_LARGE_MESSAGES = "sending a large message to the first machine"
EXCHANGE = "exchanging data with its neighbors"

_ADVICE = "check that this is the first machine's address, and that no firewall blocks it"


class PreflightError(DistmpError):
    """A problem of this rank before it could reach the others."""


class PreflightStore:
    """Exchanges messages between ranks through the store, without collectives.

    Args:
        environment: Rank and world size of this process.
        limit_seconds: Time without progress of any rank after which the watchdog ends the process.
        longest_seconds: Time after which it does so in any case.
    """

    def __init__(
        self, environment: RankEnvironment, limit_seconds: float, longest_seconds: float
    ) -> None:
        self.environment = environment
        self.rank, self.world_size = environment.rank, environment.world_size
        self._limit = limit_seconds
        self._longest = longest_seconds
        self._address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._store: Any = None
        self._watchdogs: Any = None
        self._own: set[str] = set()
        self._phase = "connecting to the store"
        self._count = 0
        self._alone = True
        self._entered = time.monotonic()

    def connect(self) -> None:
        """Connect to the store.

        Raises:
            PreflightError: If it cannot be reached.
        """
        # Two connections, because a wait blocks its connection for other threads.
        self._store, self._watchdogs = self._new_connection(), self._new_connection()

    def _new_connection(self) -> PrefixStore:
        seconds = min(STORE_SECONDS, self._limit / 2)
        try:
            store = rendezvous_store.for_this_start(seconds)
        except RuntimeError as error:
            raise PreflightError(
                f"preflight: rank {self.rank} on {socket.gethostname()} does not reach the store "
                f"at {self._address} within {seconds:g} s; {_ADVICE} ({_first_line(error)})"
            ) from None
        return PrefixStore("preflight", store)

    def enter(self, phase: str, *, alone: bool = False) -> None:
        """Publish this rank's next phase.

        Args:
            phase: For messages, such as "multiplying matrices".
            alone: Whether the rank works without others, so that it makes progress while it
                computes.
        """
        self._phase, self._alone, self._entered = phase, alone, time.monotonic()
        entry = {"phase": phase, "host": socket.gethostname(), "pid": os.getpid()}
        self._count += 1
        self.put(f"phase/{self.rank}", {**entry, "count": self._count})
        self._store.add(_PROGRESS, 1)

    def check_large_messages(self) -> None:
        """Send a message of many packets to the machine of the store and receive it.

        Small ones have arrived by now. A large one never does if the path drops full packets
        silently; the watchdog then names the phase.
        """
        self.enter(_LARGE_MESSAGES)
        self.put(f"large/{self.rank}", LARGE_MESSAGE)
        self.get(f"large/{self.rank}")

    def put(self, key: str, value: Any) -> None:
        """Publish a JSON value."""
        self._own.add(key)
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Wait for a value and return it; the watchdog limits the wait."""
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        return json.loads(self._store.get(key))

    def clear(self) -> None:
        """Delete this rank's messages: another rank may replace it without a restart."""
        for key in self._own:
            self._store.delete_key(key)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the process if no rank makes progress, even if the interpreter is blocked."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=[done], name="preflight", daemon=True)
        self._arm()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        # Its thread works without the GIL, in case native code never releases it.
        faulthandler.dump_traceback_later(self._limit + SPARE_SECONDS, exit=True)

    def _watch(self, done: threading.Event) -> None:
        started = now = time.monotonic()
        cpu, progress, idle = time.process_time(), 0, 0.0
        interval = min(_BEAT_SECONDS, self._limit / 10)
        while not done.wait(interval):
            last, now = now, time.monotonic()
            before, cpu = cpu, time.process_time()
            # If this thread did not run for long, the machine is busy or was suspended.
            idle += min(now - last, 2 * interval)
            if (latest := self._beat(cpu - before > _BUSY_SHARE * interval)) > progress:
                progress, idle = latest, 0.0
                self._arm()
            if idle > self._limit or now - started > self._longest:
                self._end(idle)

    def _beat(self, busy: bool) -> int:
        """Publish whether this rank makes progress, and return the progress of all ranks."""
        if self._watchdogs is None:
            return 0
        patience = math.inf if self._alone else BUSY_LIMITS * self._limit
        counts = busy and time.monotonic() - self._entered < patience
        try:
            return int(self._watchdogs.add(_PROGRESS, int(counts)))
        except RuntimeError:
            return 0  # reported if it lasts

    def _end(self, idle: float) -> NoReturn:
        try:
            message = self._timeout_message(idle)
        except RuntimeError as error:
            message = (
                f"rank {self.rank} on {socket.gethostname()} lost the store at "
                f"{self._address} while {self._phase} ({_first_line(error)})"
            )
        if message:
            sys.stderr.write(f"distmp: preflight: {message}\n")
            sys.stderr.flush()
        time.sleep(_EXIT_SECONDS if message else 3 * _EXIT_SECONDS)
        os._exit(1 if message else LOST_PEER_EXIT_CODE)

    def _timeout_message(self, idle: float) -> str:
        """Return the message to print, or an empty string if another rank prints it."""
        if self._watchdogs is None:
            return (
                f"rank {self.rank} on {socket.gethostname()} is still {self._phase} at "
                f"{self._address} after {idle:.0f} s; {_ADVICE}"
            )
        reporter = self._watchdogs.compare_set("reporter", "", str(self.rank)).decode()
        if reporter != str(self.rank):
            return ""
        entries: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            if self._watchdogs.check([f"phase/{rank}"]):
                entries[rank] = json.loads(self._watchdogs.get(f"phase/{rank}"))
        return describe_late_ranks(
            entries, self.world_size, self.environment.local_world_size, idle
        )


def describe_late_ranks(
    entries: Mapping[int, Mapping[str, Any]],
    world_size: int,
    local_world_size: int,
    seconds: float,
) -> str:
    """Return a message that names the ranks for which the others are waiting.

    Args:
        entries: For each rank its phase ("phase"), the number of phases it has entered ("count"),
            and its process ("host", "pid").
        world_size: Number of ranks, some of which may have no entry.
        local_world_size: Number of ranks per machine.
        seconds: Time without progress.
    """
    missing = [rank for rank in range(world_size) if rank not in entries]
    hosts = {rank // local_world_size: str(entry["host"]) for rank, entry in entries.items()}
    if missing:
        parts = []
        for node in sorted({rank // local_world_size for rank in missing}):
            ranks = [rank for rank in missing if rank // local_world_size == node]
            where = f"on {hosts[node]}" if node in hosts else f"on machine {node}, host unknown"
            parts.append(f"{rank_names(ranks)} {where}")
        known = ", ".join(sorted(set(hosts.values())))
        return (
            f"no message from {'; '.join(parts)} within {seconds:.0f} s (received: ranks on "
            f"{known}); see its own output, and check that it reaches the first machine"
        )
    least, most = (choose(e["count"] for e in entries.values()) for choose in (min, max))
    late = {rank: entry for rank, entry in entries.items() if entry["count"] == least}
    parts = [f"rank {rank} on {entry['host']} (pid {entry['pid']})" for rank, entry in late.items()]
    phase = next(iter(late.values()))["phase"]
    if least == most and phase != EXCHANGE:
        return (
            f"all ranks are still {phase} after {seconds:.0f} s ({', '.join(parts)}); machines may "
            "not reach each other on the selected interfaces: check GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME and firewalls"
        )
    late_ranks = f"{', '.join(parts)} {'is' if len(parts) == 1 else 'are'} still {phase}"
    if phase in (_LARGE_MESSAGES, EXCHANGE):
        return f"{late_ranks} after {seconds:.0f} s; {MTU_ADVICE}"
    return f"{late_ranks} after {seconds:.0f} s; the other ranks are waiting"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
