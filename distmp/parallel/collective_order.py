"""Whether all ranks gather and reduce the same modules in the same order.

FSDP matches the collectives of ranks by their order alone. If ranks run different modules, one
rank's shard of a module is gathered into another module of the next rank, without an error where
sizes happen to agree. So each collective is compared with the one that stood in its place the last
time. Where it is another one, and wherever there is no last time, ranks ask each other before it
begins. In a steady run that costs a comparison of two tuples, and neither host nor device waits.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Hashable, Iterator
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from distmp.distributed import rank_monitor
from distmp.distributed.world import World
from distmp.errors import TrainingError

Kind = Literal["gather", "reduce", "end of forward", "end", "microbatches"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# How long the others may take to come to the place where this rank asks.
ANSWER_SECONDS = 120.0
# How often a rank that asks looks whether others wait elsewhere.
PATIENCE_SECONDS = 3.0


class Collective(NamedTuple):
    """One collective of FSDP.

    Attributes:
        kind: What it does; ends and the number of microbatches stand in the order without being
            one.
        unit: Index of the group of parameters.
        elements: What this rank contributes, or how many microbatches it has.
    """

    kind: Kind
    unit: int
    elements: int


END_OF_FORWARD = Collective("end of forward", -1, 0)
END = Collective("end", -1, 0)


class CollectiveOrder:
    """Follows the collectives of this rank; all ranks make one at the same time.

    Args:
        world: All ranks that have to agree, more than one.
        units: Names of the groups of parameters, by index.
        answer_seconds: How long to wait for the others' answer.
        advice: What to do where ranks differ.
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
        # A group of its own: what is asked here must not get into the way of what is watched.
        # Weakly held: gloo's threads have to end when the process group is destroyed, not later.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=answer_seconds))
        self._group = weakref.ref(group)
        self._monitor = rank_monitor.current()
        self._known: dict[Hashable, list[Collective]] = {}
        self._pass: Hashable = None
        self._expected: list[Collective] = []
        self._done: list[Collective] = []
        self._differs = True
        self._microbatches = 0

    def announce(self, microbatches: int) -> None:
        """Say how many microbatches the next step has on this rank.

        Raises:
            TrainingError: If another rank has others.
        """
        if microbatches != self._microbatches:
            self._ask(Collective("microbatches", -1, microbatches))
            self._microbatches = microbatches

    def begin(self, kind_of_pass: Hashable) -> None:
        """Begin a forward, with backward or without.

        Args:
            kind_of_pass: Passes of one kind are expected to be alike.
        """
        self.end()
        self._pass = kind_of_pass
        self._expected = self._known.get(kind_of_pass, [])
        self._differs = kind_of_pass not in self._known

    def note(self, collective: Collective) -> None:
        """Call it right before a collective.

        Raises:
            TrainingError: On the ranks that are about to do something else than the others.
        """
        if not self._differs:
            place = len(self._done)
            expected = self._expected[place] if place < len(self._expected) else END
            self._differs = collective != expected
        if self._differs:
            self._ask(collective)
        self._done.append(collective)
        if self._monitor is not None:
            self._monitor.collectives += 1

    def end(self) -> None:
        """Call it when the pass has ended, if there is one; another one may follow at once."""
        if not self._done:
            return
        if self._differs or len(self._done) < len(self._expected):
            self._ask(END)
        self._known[self._pass] = self._done
        self.abandon()

    def abandon(self) -> None:
        """Forget the pass that is under way: it failed."""
        self._done = []
        self._expected = self._known.get(self._pass, [])
        self._differs = self._pass not in self._known

    def _ask(self, mine: Collective) -> None:
        """Compare what ranks are about to do."""
        numbers = torch.tensor([KINDS.index(mine.kind), mine.unit, mine.elements])
        answers = [torch.empty_like(numbers) for _ in range(self._world_size)]
        work: Any = dist.all_gather(answers, numbers, group=self._group(), async_op=True)
        begun = time.monotonic()
        pause = 1e-5
        before: dict[int, int] = {}
        with self._comparing():
            while self._monitor is not None and not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                if time.monotonic() - begun > PATIENCE_SECONDS:
                    begun = time.monotonic()
                    before = self._look_for_others(mine, before)
        try:
            work.wait()
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self._rank} is about to {self._in_words(mine)}, unlike the last time, and "
                f"another rank did not come to this place within {self._seconds:g} s; "
                f"{self._advice}"
            ) from error
        found = [Collective(KINDS[kind], unit, n) for kind, unit, n in map(_numbers, answers)]
        if any(other != found[0] for other in found):
            raise TrainingError(f"{self._all_in_words(found)}; {self._advice}")

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        """Let other ranks know that this one waits for them in a comparison."""
        if self._monitor is None:
            yield
            return
        self._monitor.compares = True
        try:
            yield
        finally:
            self._monitor.compares = False

    def _look_for_others(self, mine: Collective, before: dict[int, int]) -> dict[int, int]:
        """Look for ranks that wait in a collective of their own, twice in the same one.

        Args:
            mine: What this rank is about to do.
            before: How many collectives such ranks had begun the last time.

        Returns:
            The same of now.

        Raises:
            TrainingError: If there are any.
        """
        if self._monitor is None:
            return {}
        waiting = {
            rank: presence
            for rank, presence in self._monitor.query(range(self._world_size)).items()
            if presence is not None
            and presence.waits_in
            and not presence.compares
            # Not in a collective of the user's own, before this call of the engine.
            and presence.engine_calls >= self._monitor.engine_calls
        }
        for rank, presence in waiting.items():
            if before.get(rank) == presence.collectives:
                raise TrainingError(
                    f"rank {self._rank} is about to {self._in_words(mine)}, unlike the last time, "
                    f"and rank {rank} waits in {presence.waits_in}; {self._advice}"
                )
        return {rank: presence.collectives for rank, presence in waiting.items()}

    def _all_in_words(self, found: list[Collective]) -> str:
        ranks: dict[Collective, list[str]] = {}
        for rank, collective in enumerate(found):
            ranks.setdefault(collective, []).append(str(rank))
        return "ranks differ in what they run: " + ", ".join(
            f"rank{'s' * (len(who) > 1)} {', '.join(who)} "
            f"{'are' if len(who) > 1 else 'is'} about to {self._in_words(collective)}"
            for collective, who in ranks.items()
        )

    def _in_words(self, collective: Collective) -> str:
        if collective == END:
            return "end the pass"
        if collective == END_OF_FORWARD:
            return "end forward"
        if collective.kind == "microbatches":
            return f"take a step of {collective.elements} microbatches"
        name = self._units[collective.unit] or "the model's own parameters"
        what = f"gather {name}" if collective.kind == "gather" else f"reduce gradients of {name}"
        return f"{what} ({collective.elements} elements)"


ADVICE = (
    "with a sharded strategy every rank has to run as many microbatches, and the same modules in "
    "the same order in each of them and in every evaluation; run all of them and multiply by zero "
    "what a rank does not need, or use strategy = 'ddp'"
)


def _numbers(answer: torch.Tensor) -> tuple[int, int, int]:
    kind, unit, elements = answer.tolist()
    return kind, unit, elements
