"""Checks that all ranks gather and reduce the same modules in the same order.

Collectives of FSDP are matched by their order alone. If ranks run different modules, one rank's
shard of a module is gathered into a different module of another rank, without an error if sizes
happen to be equal. So each collective is compared with the one at the same position of the previous
pass. If it differs, or if there is no previous pass, ranks compare their next collectives through
the store before these start. In a steady run this costs a comparison of two tuples, and
neither host nor device waits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Mapping
from typing import Literal, NamedTuple

from distmp.distributed import rank_monitor
from distmp.distributed.rank_monitor import RankMonitor, RankStatus, Statuses
from distmp.distributed.world import World
from distmp.errors import TrainingError, keys_by_value, rank_names

Kind = Literal["gather", "reduce", "end of forward", "end", "microbatches", "next"]

# How long a rank in a comparison waits for ranks that make no progress, see `AwaitedRanks`.
ANSWER_SECONDS = 120.0
# Time after which a rank in a comparison checks the status of the others.
PATIENCE_SECONDS = 2.0

_numbers = itertools.count()


class ComparedCollective(NamedTuple):
    """One collective of FSDP, or an event that ranks compare in the same way.

    Attributes:
        kind: The collective; the ends of passes and the number of microbatches are events.
        unit: Index of the parameter group; -1 for events.
        elements: Number of elements that this rank contributes, or its number of microbatches.
    """

    kind: Kind
    unit: int
    elements: int


END_OF_FORWARD = ComparedCollective("end of forward", -1, 0)
END = ComparedCollective("end", -1, 0)


class CollectiveOrder:
    """Records the collectives of this rank and compares their order with that of other ranks.

    All ranks have to construct it in the same order.

    Args:
        world: The ranks to compare.
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
        self._units = units
        self._seconds = answer_seconds
        self._monitor = rank_monitor.current() if world.world_size > 1 else None
        self._number = next(_numbers)
        self._comparisons = 0
        self._known: dict[Hashable, list[ComparedCollective]] = {}
        self._pass: Hashable = None
        self._differs = True
        self._microbatches = 0
        self.abandon()

    def compare_microbatches(self, microbatches: int) -> None:
        """Compare the number of microbatches of the next step between ranks, if it has changed.

        Raises:
            TrainingError: If the number differs between ranks.
        """
        if microbatches != self._microbatches:
            self._compare(ComparedCollective("microbatches", -1, microbatches))
            self._microbatches = microbatches

    def compare_next(self, has_next: bool) -> None:
        """Compare between ranks whether their iterables have another microbatch.

        Raises:
            TrainingError: If only some ranks have one.
        """
        self._compare(ComparedCollective("next", -1, int(has_next)))

    def begin(self, kind_of_pass: Hashable) -> None:
        """Begin a forward, with or without a backward.

        Args:
            kind_of_pass: Passes of one kind are expected to run the same collectives.
        """
        self.end()
        self._pass = kind_of_pass
        self.abandon()

    def note(self, collective: ComparedCollective) -> None:
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
            self._monitor.own.collectives += 1

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
        self._done: list[ComparedCollective] = []
        self._expected = self._known.get(self._pass, [])
        self._differs = self._pass not in self._known

    def _compare(self, local: ComparedCollective) -> None:
        """Compare the next collectives of the ranks.

        Raises:
            TrainingError: If ranks differ, or if no rank that this one waits for makes progress.
            LostPeerError: If another rank has ended.
        """
        if self._monitor is None:
            return
        own = self._monitor.own
        self._comparisons += 1
        comparison, text = f"order {self._number}/{self._comparisons}", self._describe(local)
        # Kept after an error, so that the other ranks raise it as well.
        own.comparison, own.compares = comparison, text
        problem = _Waiting(self._monitor, self._seconds, self._advice).problem
        patience = min(PATIENCE_SECONDS, self._seconds / 4)
        self._monitor.meet(f"{comparison}/{text}", problem, patience)
        own.compares = ""

    def _describe(self, collective: ComparedCollective) -> str:
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


class _Waiting:
    """A comparison in which this rank waits for others.

    Args:
        monitor: The monitor of this rank.
        seconds: Time without progress of any awaited rank after which they are stuck.
        advice: What to do if ranks differ, the end of the error message.
    """

    def __init__(self, monitor: RankMonitor, seconds: float, advice: str) -> None:
        self._monitor = monitor
        self._advice = advice
        self._awaited = AwaitedRanks(seconds)
        # Number of started collectives of the ranks that waited in the previous check.
        self._waiting: dict[int, int] = {}

    def problem(self, statuses: Statuses) -> TrainingError | None:
        """Return the error if ranks differ or will not arrive; None while they may arrive."""
        monitor, own = self._monitor, self._monitor.own
        here = {
            rank: status.compares
            for rank, status in statuses.items()
            if status is not None and status.comparison == own.comparison and status.compares
        }
        if set(here.values()) - {own.compares}:
            by_rank = {**here, monitor.rank: own.compares}
            return TrainingError(f"{_describe_all(by_rank)}; {self._advice}")
        absent = {rank: status for rank, status in statuses.items() if rank not in here}
        why = self._why_waiting(absent)
        if not why and (stuck := self._awaited.why_stuck(absent)):
            who = monitor.describe(absent) or "none is missing"
            why = f"waits for ranks that have {stuck}: {who}"
        if not why:
            return None
        return TrainingError(
            f"rank {monitor.rank} is about to {own.compares}, and {why}; {self._advice}"
        )

    def _why_waiting(self, absent: Statuses) -> str:
        """Return which rank waits in the same collective as in the previous check, as text.

        Such a rank will not reach the comparison.
        """
        before, self._waiting = self._waiting, {}
        for rank, status in absent.items():
            # Not in a collective of the user's code before this call of the engine.
            if status and status.waits_in and status.engine_calls >= self._monitor.own.engine_calls:
                if before.get(rank) == status.collectives:
                    return f"rank {rank} waits in {status.waits_in}"
                self._waiting[rank] = status.collectives
        return ""


def _describe_all(by_rank: Mapping[int, str]) -> str:
    return "ranks run different code: " + ", ".join(
        f"{rank_names(ranks)} {'are' if len(ranks) > 1 else 'is'} about to {collective}"
        for collective, ranks in keys_by_value(dict(sorted(by_rank.items()))).items()
    )


ADVICE = (
    "with a sharded strategy every rank has to run the same number of microbatches, and the same "
    "modules in the same order in each microbatch and evaluation; run all modules and multiply the "
    "outputs that a rank does not need by zero, or use strategy = 'ddp'"
)


# A rank is busy if it uses a processor for this share of the time. One that polls something, with
# pauses, uses less; on an overloaded machine a busy rank does not get much more.
BUSY_SHARE = 0.01
# The same for child processes. Services that record or monitor the run use less.
CHILD_SHARE = 0.2
# How many times longer a rank may be busy without beginning a call or a collective.
BUSY_LIMITS = 30


class AwaitedRanks:
    """Tracks the progress of ranks while this rank waits for them.

    Args:
        seconds: Time without progress of any awaited rank after which they are stuck. They are also
            stuck after `BUSY_LIMITS` times as long without a call of an engine or a collective.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # The latest status of each rank, and when this rank saw it.
        self._seen: dict[int, tuple[RankStatus, float]] = {}
        self._progress_at = self._call_at = time.monotonic()

    def why_stuck(self, awaited: Mapping[int, RankStatus | None]) -> str:
        """Return why the ranks are stuck, as text; "" while they may continue.

        Args:
            awaited: The status of the awaited ranks; None for a rank that does not answer.
        """
        now = time.monotonic()
        for rank, status in awaited.items():
            if status is not None:
                before, since = self._seen.get(rank, (None, now))
                self._seen[rank] = (status, now)
                if before is None or _calls(before) != _calls(status):
                    self._progress_at = self._call_at = now
                elif _is_busy(before, status, now - since):
                    self._progress_at = now
        if now - self._progress_at > self._seconds:
            return f"made no progress for {self._seconds:g} s"
        if now - self._call_at > BUSY_LIMITS * self._seconds:
            return f"been busy without a call of the engine for {BUSY_LIMITS * self._seconds:g} s"
        return ""


def _calls(status: RankStatus) -> tuple[int, int]:
    return status.engine_calls, status.collectives


def _is_busy(before: RankStatus, after: RankStatus, seconds: float) -> bool:
    if (before.line, before.waits_in) != (after.line, after.waits_in):
        return True
    if after.waits_in:  # it may poll the device, which is no progress
        return False
    return (
        after.busy_seconds - before.busy_seconds > BUSY_SHARE * seconds
        or after.child_seconds - before.child_seconds > CHILD_SHARE * seconds
    )
