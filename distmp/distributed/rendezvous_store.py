"""The key-value store of torchrun's agent, shared by all ranks and kept across restarts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from distmp.distributed.limits import ARRIVAL_SECONDS, STORE_SECONDS
from distmp.distributed.rank_environment import STORE_VARIABLE, RankEnvironment, read_integer
from distmp.errors import DistmpError, keys_by_value, listed, rank_names

# Other modules import these from here.
__all__ = ["HashStore", "PrefixStore", "Store"]


CONNECT_SECONDS = 15.0
# Interval between reads of the store; it doubles from the first value to the last.
_POLL_SECONDS = (0.005, 0.25)

_attempt: int | None = None


class AttemptError(DistmpError):
    """Some ranks of this attempt did not start, or the store cannot be reached."""


def attempt() -> int:
    """Return how often the ranks of this job were started before, which is the same on all ranks.

    The first call is collective over all ranks if torchrun's agent hosts the store. Otherwise this
    is torchrun's own number.

    Raises:
        AttemptError: If the store cannot be reached, or a rank is missing.
    """
    global _attempt
    restarts = read_integer(os.environ, "TORCHELASTIC_RESTART_COUNT", default="0")
    if not is_hosted_by_agent():
        return restarts
    if _attempt is None:
        _attempt = Agreement(_reach(), RankEnvironment.from_variables(), restarts).number()
    return _attempt


def _reach() -> Store:
    try:
        return connect(CONNECT_SECONDS)
    except dist.DistError as error:
        host, port = address()
        raise AttemptError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} does not reach the store at "
            f"{host}:{port} within {CONNECT_SECONDS:g} s; check that this is the first machine's "
            f"address, and that no firewall blocks it ({str(error).splitlines()[0]})"
        ) from None


def is_hosted_by_agent() -> bool:
    """Return whether the launcher or torchrun's agent hosts the store, not rank 0."""
    return _launchers_store() is not None or (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def address() -> tuple[str, int]:
    """Return host and port of the store that all ranks of the job share."""
    return _launchers_store() or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _launchers_store() -> tuple[str, int] | None:
    run_id, _, endpoint = os.environ.get(STORE_VARIABLE, "").rpartition("@")
    if not endpoint or run_id != os.environ.get("TORCHELASTIC_RUN_ID"):
        return None
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def connect(timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection to the store of the job.

    Args:
        timeout_seconds: Timeout of connecting, and of an operation of the store.
    """
    host, port = address()
    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def for_attempt(store: Store, attempt: int) -> Store:
    """Return a view of the store with separate keys for each attempt.

    Without it (torch 2.13), gloo ranks read the addresses from before the restart and cannot
    connect.

    Args:
        store: The store of the job.
        attempt: Number of the attempt, see `attempt`.
    """
    return PrefixStore(f"distmp/attempt {attempt}", store)


def for_this_start(timeout_seconds: float | None = None) -> Store:
    """Return a new connection to the store of this start of the ranks.

    The launcher or torchrun's agent hosts it, see `for_current_attempt`; otherwise rank 0.

    Args:
        timeout_seconds: Timeout of connecting, and of an operation of the store; None: torch's.
    """
    if is_hosted_by_agent():
        return for_current_attempt(timeout_seconds or STORE_SECONDS)
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else default_pg_timeout
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def for_current_attempt(timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection with the keys of the current attempt, see `for_attempt`."""
    number = attempt()  # fails soon if the store cannot be reached
    return for_attempt(connect(timeout_seconds), number)


# Note [Number of an attempt]
# All ranks agree on how often the job started them before.
#
# torchrun's TORCHELASTIC_RESTART_COUNT is local to an agent: after a rank is killed, it is 1 on the
# machine of that rank and 0 on all others. If machines join or leave, ranks restart and no agent
# counts it. So the ranks agree through the store, which outlives them:
#
# 1. Each rank publishes a random number, which identifies its process.
# 2. When all ranks have published, rank 0 proposes these numbers. It proposes again when one of
#    them changes, because some may be from processes of an earlier attempt.
# 3. A rank acknowledges a proposal that contains its own number.
# 4. When all ranks have acknowledged the last proposal, rank 0 publishes the number of the attempt.
#
# A number is never assigned twice, and only processes of one proposal receive it. Processes of
# earlier attempts that are still alive can therefore delay an agreement, but not join it.


class Agreement:
    """The agreement of this process with the other ranks, see Note [Number of an attempt].

    Args:
        store: A store that outlives the ranks; only agreements use this connection.
        environment: Rank and number of ranks.
        restarts: Restarts that the agent of this rank counts. The number of the attempt is at
            least that of rank 0.

    Attributes:
        rank: Global rank of this process.
        process: A random number that identifies this process.
    """

    def __init__(self, store: Store, environment: RankEnvironment, restarts: int = 0) -> None:
        self._environment = environment
        self.rank, self._world_size = environment.rank, environment.world_size
        self._restarts = restarts
        self._limit_seconds = ARRIVAL_SECONDS
        self._job = PrefixStore("distmp/attempts", store)
        self._store = PrefixStore(f"of {self._world_size}", self._job)
        self.process = secrets.token_hex(8)
        self._proposed: list[bytes] = []
        self._proposal = ""
        self._acknowledged = ""

    def number(self) -> int:
        """Return the number of this attempt, 0 for the first. Every rank has to call it.

        Raises:
            AttemptError: If no further rank appears in time, or the store is gone.
        """
        try:
            self.publish()
            return self.wait_for_number()
        except dist.DistError as error:
            raise AttemptError(
                f"rank {self.rank} of {self._world_size} lost the store of the launcher while it "
                f"waited for the other ranks: {error}"
            ) from error

    def publish(self) -> None:
        """Announce this process to the other ranks."""
        self._store.set(f"host/{self.rank}", socket.gethostname())
        self._store.set(f"process/{self.rank}", self.process)
        self._store.add("arrivals", 1)

    def wait_for_number(self) -> int:
        """Take steps of the agreement until the number is known, and return it."""
        started = moved = time.monotonic()
        pause, most = _POLL_SECONDS
        progress = -1
        while (number := self.look()) is None:
            time.sleep(pause)
            pause = min(2 * pause, most)
            now = time.monotonic()
            if progress != (progress := self._progress()):
                moved = now
            if now - moved > self._limit_seconds:
                raise AttemptError(
                    f"{self._missing()} did not start within {now - started:.0f} s after rank "
                    f"{self.rank}; see the output there, and check that its machine is up and "
                    "reaches the first one"
                )
        # So that the next attempt does not wait for this process.
        self._store.compare_set(f"process/{self.rank}", self.process, "")
        return number

    def look(self) -> int | None:
        """Take the next step of the agreement; return the number once it is known."""
        if self._acknowledged and self._store.check([f"number/{self._acknowledged}"]):
            return int(self._store.get(f"number/{self._acknowledged}"))
        if self.rank == 0:
            self._propose()
        self._acknowledge()
        if self.rank == 0:
            self._decide()
        return None

    def _propose(self) -> None:
        processes = self._of_all("process")
        # If the number of rank 0 is from another process, that process proposes.
        if all(processes) and processes[0] == self.process.encode() and processes != self._proposed:
            self._proposed = processes
            self._proposal = str(self._store.add("proposals", 1))
            content = json.dumps([process.decode() for process in processes])
            self._store.set(f"proposal/{self._proposal}", content)
            self._store.set("proposal", self._proposal)

    def _acknowledge(self) -> None:
        if not self._store.check(["proposal"]):
            return
        latest = self._store.get("proposal").decode()
        if latest != self._acknowledged:
            processes = json.loads(self._store.get(f"proposal/{latest}"))
            if processes[self.rank] == self.process:
                self._acknowledged = latest
                self._store.set(f"acknowledged/{self.rank}", latest)

    def _decide(self) -> None:
        if self._proposal and set(self._of_all("acknowledged")) == {self._proposal.encode()}:
            number = self._job.add("attempts", 1) - 1
            if number < self._restarts:  # some attempts ended before they had agreed
                number = self._job.add("attempts", self._restarts - number) - 1
            self._store.set(f"number/{self._proposal}", str(number))

    def _of_all(self, key: str) -> list[bytes]:
        """Return what each rank has published, or one empty value if some have not."""
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        return list(self._store.multi_get(keys)) if self._store.check(keys) else [b""]

    def _progress(self) -> int:
        return int(self._store.add("arrivals", 0) + self._store.add("proposals", 0))

    def _missing(self) -> str:
        """Name the missing ranks, with their machines."""
        ranks = [rank for rank in range(self._world_size) if not self._has_come(rank)]
        places = keys_by_value({rank: self._place(rank) for rank in ranks})
        named = [f"{rank_names(ranks)} on {place}" for place, ranks in places.items()]
        return listed(named) or "ranks whose place other processes have taken"

    def _has_come(self, rank: int) -> bool:
        latest = self._value("proposal")
        if latest and latest == self._acknowledged:
            return self._value(f"acknowledged/{rank}") == latest
        return bool(self._value(f"process/{rank}"))

    def _place(self, rank: int) -> str:
        known = self._value(f"host/{rank}")
        return known or f"machine {rank // self._environment.local_world_size}"

    def _value(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""
