"""Checks that all ranks gather and reduce the same modules in the same order.

Collectives of FSDP are matched by their order alone. If ranks run different modules, one rank's
shard of a module is gathered into a different module of another rank, without an error if sizes
happen to be equal. So each collective is compared with the one at the same position of the previous
pass. If it differs, or if there is no previous pass, ranks compare what they are about to do before
the collective starts. In a steady run this costs a comparison of two tuples, and neither host nor
device waits.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Hashable, Mapping
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from distmp.distributed import rank_monitor
from distmp.distributed.awaited import AwaitedRanks
from distmp.distributed.lost_peers import is_lost_connection
from distmp.distributed.rank_monitor import RankStatus
from distmp.distributed.world import World
from distmp.errors import TrainingError, rank_names, ranks_by_value

Kind = Literal["gather", "reduce", "end of forward", "end", "microbatches", "next"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# How long a rank in a comparison waits for ranks that make no progress, see `AwaitedRanks`.
ANSWER_SECONDS = 120.0
# Time after which a rank in a comparison first checks what the others do. The pauses between checks
# double, because every check asks all ranks.
PATIENCE_SECONDS = 3.0
# Timeout of the collective. `AwaitedRanks` ends a comparison much earlier.
COLLECTIVE_DAYS = 7


class Collective(NamedTuple):
    """One collective of FSDP, or an event that ranks compare in the same way.

    Attributes:
        kind: The collective; the ends of passes and the number of microbatches are events.
        unit: Index of the parameter group; -1 for events.
        elements: Number of elements that this rank contributes, or its number of microbatches.
    """

    kind: Kind
    unit: int
    elements: int


END_OF_FORWARD = Collective("end of forward", -1, 0)
END = Collective("end", -1, 0)


class CollectiveOrder:
    """Records the collectives of this rank and compares their order with that of other ranks.

    All ranks have to construct it at the same time, because it creates a process group.

    Args:
        world: The ranks to compare, at least two.
        units: Names of the parameter groups, by index.
        answer_seconds: Time after which a comparison fails, in seconds without progress of any
            rank that has not reached it.
        advice: What to do if ranks differ, the end of the error message.
    """

    def __init__(
        self,
        world: World,
        units: list[str],
        answer_seconds: float = ANSWER_SECONDS,
        advice: str | None = None,
    ) -> None:
        self._advice = advice or ADVICE
        self._rank = world.rank
        self._world_size = world.world_size
        self._units = units
        self._seconds = answer_seconds
        # A separate group, so that comparisons do not change the order of the compared collectives.
        # A weak reference, so that gloo's threads end when the process group is destroyed.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=answer_seconds))
        self._group = weakref.ref(group)
        self._monitor = rank_monitor.current()
        if self._monitor is not None:  # only then can it be known whether other ranks are busy
            dist.distributed_c10d._set_pg_timeout(timedelta(days=COLLECTIVE_DAYS), group)
        self._known: dict[Hashable, list[Collective]] = {}
        self._pass: Hashable = None
        self._expected: list[Collective] = []
        self._done: list[Collective] = []
        self._differs = True
        self._microbatches = 0

    def compare_microbatches(self, microbatches: int) -> None:
        """Compare the number of microbatches of the next step between ranks, if it has changed.

        Raises:
            TrainingError: If the number differs between ranks.
        """
        if microbatches != self._microbatches:
            self._compare(Collective("microbatches", -1, microbatches))
            self._microbatches = microbatches

    def compare_next(self, has_next: bool) -> None:
        """Compare between ranks whether their iterables have another microbatch.

        Raises:
            TrainingError: If only some ranks have one.
        """
        self._compare(Collective("next", -1, int(has_next)))

    def begin(self, kind_of_pass: Hashable) -> None:
        """Begin a forward, with or without a backward.

        Args:
            kind_of_pass: Passes of one kind are expected to run the same collectives.
        """
        self.end()
        self._pass = kind_of_pass
        self._expected = self._known.get(kind_of_pass, [])
        self._differs = kind_of_pass not in self._known

    def note(self, collective: Collective) -> None:
        """Record a collective; call this right before it starts.

        Raises:
            TrainingError: If ranks are about to run different collectives.
        """
        if not self._differs:
            index = len(self._done)
            expected = self._expected[index] if index < len(self._expected) else END
            self._differs = collective != expected
        if self._differs:
            self._compare(collective)
        self._done.append(collective)
        if self._monitor is not None:
            self._monitor.collectives += 1

    def end(self) -> None:
        """End the current pass, if there is one."""
        if not self._done:
            return
        if self._differs or len(self._done) < len(self._expected):
            self._compare(END)
        self._known[self._pass] = self._done
        self.abandon()

    def abandon(self) -> None:
        """Discard the current pass, which failed."""
        self._done = []
        self._expected = self._known.get(self._pass, [])
        self._differs = self._pass not in self._known

    def _compare(self, local: Collective) -> None:
        """Compare what ranks are about to do.

        Raises:
            TrainingError: If ranks differ, or if no rank that this one waits for makes progress.
            RuntimeError: If another rank has ended, see `is_lost_connection`.
        """
        numbers = torch.tensor([KINDS.index(local.kind), local.unit, local.elements])
        answers = [torch.empty_like(numbers) for _ in range(self._world_size)]
        work: Any = dist.all_gather(answers, numbers, group=self._group(), async_op=True)
        try:
            self._wait(work, local)
        except BaseException:
            # Keep the group until the process has ended, even if other code drops it. Its
            # destructor would wait for the pending comparison, so the process would not end, and
            # its launcher would not end the rank that is awaited.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group()))
            raise
        finally:
            if self._monitor is not None:
                self._monitor.compares = False
        try:
            work.wait()
        except RuntimeError as error:
            if is_lost_connection(error):
                raise
            why = f"made no progress for {self._seconds:g} s"
            raise self._no_answer(local, why, "another rank did not reach this point") from error
        by_rank = [
            Collective(KINDS[kind], unit, n)
            for kind, unit, n in (answer.tolist() for answer in answers)
        ]
        if any(other != by_rank[0] for other in by_rank):
            raise TrainingError(f"{self._describe_all(by_rank)}; {self._advice}")

    def _wait(self, work: Any, local: Collective) -> None:
        """Wait until all ranks reach the comparison, as long as absent ranks make progress.

        Raises:
            TrainingError: If they make none, or if a rank waits in a collective.
        """
        if self._monitor is None:
            return
        self._monitor.compares = True  # other ranks see that this one waits in a comparison
        awaited = AwaitedRanks(self._seconds)
        seen: dict[int, int] = {}
        pause, check_after = 1e-5, min(PATIENCE_SECONDS, self._seconds / 4)
        begun = time.monotonic()
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() - begun < check_after:
                continue
            # Of the ranks that have not reached the comparison.
            statuses = {
                rank: status
                for rank, status in self._monitor.query(range(self._world_size)).items()
                if status is None or not status.compares
            }
            seen = self._check_waiting_ranks(local, statuses, seen)
            why = awaited.why_stuck(statuses)
            if why and not work.is_completed():
                raise self._no_answer(
                    local, why, self._monitor.describe(statuses) or "none is missing"
                )
            check_after = min(2 * check_after, self._seconds / 4)
            begun = time.monotonic()

    def _no_answer(self, local: Collective, why: str, who: str) -> TrainingError:
        return TrainingError(
            f"rank {self._rank} is about to {self._describe(local)}, unlike the last time, and "
            f"waits for ranks that have {why}: {who}; {self._advice}"
        )

    def _check_waiting_ranks(
        self,
        local: Collective,
        statuses: Mapping[int, RankStatus | None],
        seen: Mapping[int, int],
    ) -> dict[int, int]:
        """Raise if a rank waits in the same collective as in the previous check.

        Args:
            local: What this rank is about to do.
            statuses: The status of the ranks that have not reached the comparison.
            seen: Number of started collectives by rank, of the ranks that waited in the previous
                check.

        Returns:
            The same for this check.

        Raises:
            TrainingError: If such a rank exists: it will not answer.
        """
        assert self._monitor is not None
        waiting = {
            rank: status
            for rank, status in statuses.items()
            if status is not None
            and status.waits_in
            # Not in a collective of the user's code before this call of the engine.
            and status.engine_calls >= self._monitor.engine_calls
        }
        for rank, status in waiting.items():
            if seen.get(rank) == status.collectives:
                raise TrainingError(
                    f"rank {self._rank} is about to {self._describe(local)}, unlike the last time, "
                    f"and rank {rank} waits in {status.waits_in}; {self._advice}"
                )
        return {rank: status.collectives for rank, status in waiting.items()}

    def _describe_all(self, by_rank: list[Collective]) -> str:
        return "ranks run different code: " + ", ".join(
            f"{rank_names(ranks)} {'are' if len(ranks) > 1 else 'is'} about to "
            f"{self._describe(collective)}"
            for collective, ranks in ranks_by_value(dict(enumerate(by_rank))).items()
        )

    def _describe(self, collective: Collective) -> str:
        if collective == END:
            return "end the pass"
        if collective == END_OF_FORWARD:
            return "end forward"
        if collective.kind == "microbatches":
            return f"run a step of {collective.elements} microbatches"
        if collective.kind == "next":
            return "run another microbatch" if collective.elements else "end the microbatches"
        name = self._units[collective.unit] or "the model's own parameters"
        what = f"gather {name}" if collective.kind == "gather" else f"reduce gradients of {name}"
        return f"{what} ({collective.elements} elements)"


ADVICE = (
    "with a sharded strategy every rank has to run the same number of microbatches, and the same "
    "modules in the same order in each microbatch and evaluation; run all modules and multiply the "
    "outputs that a rank does not need by zero, or use strategy = 'ddp'"
)
