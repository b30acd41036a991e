"""Agree with all ranks on the number of this attempt: how often the job started them before.

torchrun's TORCHELASTIC_RESTART_COUNT is local to an agent: after a rank is killed, it is 1 on the
machine of that rank and 0 on all others. If machines join or leave, ranks restart and no agent
counts it. So the ranks agree through the store, which outlives them:

1. Each rank publishes a random number, which identifies its process.
2. When all ranks have published, rank 0 proposes these numbers. It proposes again when one of them
   changes, because some may be from processes of an earlier attempt.
3. A rank acknowledges a proposal that contains its own number.
4. When all ranks have acknowledged the last proposal, rank 0 publishes the number of the attempt.

A number is never assigned twice, and only processes of one proposal receive it. Processes of
earlier attempts that are still alive can therefore delay an agreement, but not join it.
"""

from __future__ import annotations

import json
import secrets
import socket
import time

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distmp.distributed.limits import ARRIVAL_SECONDS, SAY_AFTER_SECONDS
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import LISTED, DistmpError, rank_names, ranks_by_value
from distmp.masking import print_message

# Interval between reads of the store; it doubles from the first value to the last.
_POLL_SECONDS = (0.005, 0.25)


class AttemptError(DistmpError):
    """Some ranks of this attempt did not start, or the store cannot be reached."""


class Agreement:
    """The agreement of this process with the other ranks.

    Args:
        store: A store that outlives the ranks; only agreements use this connection.
        environment: Rank and number of ranks.
        restarts: Restarts that the agent of this rank counts. The number of the attempt is at
            least that of rank 0.
        limit_seconds: Seconds without a new rank after which `number` fails.

    Attributes:
        rank: Global rank of this process.
        process: A random number that identifies this process.
    """

    def __init__(
        self,
        store: Store,
        environment: RankEnvironment,
        restarts: int = 0,
        limit_seconds: float = ARRIVAL_SECONDS,
    ) -> None:
        self._environment = environment
        self.rank, self._world_size = environment.rank, environment.world_size
        self._restarts = restarts
        self._limit_seconds = limit_seconds
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
        progress, has_said = -1, False
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
            if now - started > SAY_AFTER_SECONDS and not has_said:
                has_said = True
                self._say(f"{self._missing()}, up to {self._limit_seconds:g} s for each")
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
        places = ranks_by_value({rank: self._place(rank) for rank in ranks})
        named = [f"{rank_names(ranks)} on {place}" for place, ranks in places.items()]
        if len(named) > LISTED:
            named[LISTED:] = [f"and {len(named) - LISTED} more machines"]
        return "; ".join(named) or "ranks whose place other processes have taken"

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

    def _say(self, whom: str) -> None:
        """Print the ranks that are missing, once per machine, if there are several machines."""
        own = self._environment
        if own.local_rank == 0 and own.world_size > own.local_world_size:
            print_message(f"rank {self.rank} waits for {whom}")
