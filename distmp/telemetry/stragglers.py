"""Which rank keeps the others waiting, found out every now and then while a run goes on."""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distmp.distributed.collectives import all_gather
from distmp.distributed.own_time import STEPS, OwnTime, StepClock
from distmp.distributed.world import World
from distmp.parallel.settings import SHARDED_STRATEGIES

# A rank is slow if it takes so many times the median of the others, twice in a row.
SLOW = 1.5
# Their collectives do not all go through distmp, so that waiting cannot be told from work.
NOT_COMPARED = ("hsdp", "fsdp1")
# A step after a longer pause does not count.
PAUSE_SECONDS = 1e-3


class Stragglers:
    """Compares the own times of ranks, and names the slow ones.

    Every `every` steps ranks exchange two numbers; the answer is read a step later, when it is
    there. No step waits for it.

    Args:
        world: The ranks, all of which make one at the same time.
        clock: Measures this rank.
        strategy: The strategy in force.
        every: Steps between two comparisons; 0: never.
        say: Where to say what is found.
    """

    def __init__(
        self,
        world: World,
        clock: StepClock,
        strategy: str,
        *,
        every: int,
        say: Callable[[str], object],
    ) -> None:
        self._world = world
        self._clock = clock
        comparable = world.world_size > 1 and strategy not in NOT_COMPARED
        self._every = every if comparable else 0
        # On CUDA sharded models gather and reduce beside computation.
        self._hidden = world.device.type == "cuda" and strategy in SHARDED_STRATEGIES
        self._watch = Watch(self._names() if self._every else [], say)
        self._asked: _Question | None = None

    def _names(self) -> list[str]:
        hosts: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=self._world.group)
        return [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]

    def before(self, step: int) -> None:
        """Call it before a step, counted from 1."""
        # What is measured begins at the end of this step, and is the next one.
        self._clock.active = bool(self._every) and self._every - step % self._every <= STEPS

    def after(self, step: int, paused_seconds: float) -> None:
        """Call it on all ranks after a step.

        Args:
            step: Its number, counted from 1.
            paused_seconds: What something else than training took between it and the one before,
                a checkpoint for one.
        """
        if paused_seconds > PAUSE_SECONDS:
            self._clock.drop_last()
        if self._every and step % self._every == 0:
            self._asked = _Question(step, self._clock.take(), self._world)

    def seconds(self, step: int) -> list[float] | None:
        """Return the own seconds per step of each rank if they were compared after `step`.

        Whoever is slow is named on the way. A rank without a measurement has NaN.
        """
        if self._asked is None or self._asked.step != step:
            return None
        seconds = own_seconds(self._asked.answer(), hidden=self._hidden)
        self._asked = None
        self._watch.look(step, seconds)
        return seconds


class _Question:
    """Times of all ranks on their way, asked for without waiting for the device."""

    def __init__(self, step: int, mine: OwnTime | None, world: World) -> None:
        self.step = step
        numbers = torch.tensor(mine or (math.nan, math.nan), dtype=torch.float64)
        on_cuda = world.device.type == "cuda"
        if on_cuda:
            numbers = numbers.pin_memory().to(world.device, non_blocking=True)
        gathered = numbers.new_empty(2 * world.world_size)
        all_gather(gathered, numbers, world.group).wait()
        self._answers = gathered.to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event() if on_cuda else None
        if self._ready is not None:
            self._ready.record(torch.cuda.current_stream(world.device))

    def answer(self) -> list[OwnTime]:
        """Wait for the answers; they are there when the next step has been started."""
        if self._ready is not None:
            self._ready.synchronize()
        return [OwnTime(*numbers) for numbers in self._answers.view(-1, 2).tolist()]


def own_seconds(times: Sequence[OwnTime], *, hidden: bool) -> list[float]:
    """Return what each rank's own time is.

    Args:
        times: Of all ranks.
        hidden: Whether collectives run beside computation. Then only what a rank waits longer than
            the one that waits least counts as waiting: the transfer itself takes all of them alike.
    """
    least = min((t.waited for t in times if not math.isnan(t.waited)), default=0.0)
    return [t.between - t.waited + (least if hidden else 0.0) for t in times]


class Watch:
    """Remembers who is slow since when, and says so once.

    Args:
        names: What each rank is called.
        say: Where to say it.
    """

    def __init__(self, names: Sequence[str], say: Callable[[str], object]) -> None:
        self._names = names
        self._say = say
        self._since: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self, step: int, seconds: Sequence[float]) -> None:
        """Judge the own times of all ranks after a step."""
        for rank, mine in enumerate(seconds):
            others = [s for s in (*seconds[:rank], *seconds[rank + 1 :]) if not math.isnan(s)]
            middle = statistics.median(others) if others else math.nan
            if mine > SLOW * middle:
                # Once may be chance.
                if self._since.setdefault(rank, step) < step and rank not in self._told:
                    self._told.add(rank)
                    self._say(
                        f"{self._names[rank]} takes {mine / middle:.1f} x the median of the others "
                        f"({1000 * mine:.3g} ms a step, theirs {1000 * middle:.3g} ms), since step "
                        f"{self._since[rank]}"
                    )
            else:
                self._since.pop(rank, None)
                if rank in self._told:
                    self._told.remove(rank)
                    self._say(f"{self._names[rank]} is as fast as the others again, step {step}")
