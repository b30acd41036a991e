"""Periodically detect ranks that are slower than the others during training."""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Callable, Sequence

import torch

from distmp.distributed.collectives import all_gather
from distmp.distributed.wait_times import STEPS, ComputeTime
from distmp.distributed.world import World
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.training.callbacks.callback import Callback, PendingStep, StepResult, TrainingLoop
from distmp.training.run import Run
from distmp.utils.host_copy import HostCopy, numbers_to_device

# A rank is slow if it takes this many times the median of the others, twice in a row.
SLOW = 1.5
# distmp does not start all of their collectives, so waiting and work cannot be distinguished.
NOT_COMPARED = ("hsdp",)
# A step after a longer pause is not measured.
PAUSE_SECONDS = 1e-3


class StragglerDetection(Callback):
    """Compares the compute times of ranks, and reports slow ones.

    Every `every` steps ranks exchange two numbers. The result is read a step later, so that no step
    waits for it.

    Args:
        run: The run.
    """

    every = 50

    def __init__(self, run: Run) -> None:
        self._world, self._clock, strategy = run.world, run.engine.clock, run.engine.strategy
        self._compares = run.world.world_size > 1 and strategy not in NOT_COMPARED
        # On CUDA, sharded models overlap collectives with computation.
        self._hidden = run.world.device.type == "cuda" and strategy in SHARDED_STRATEGIES
        hosts = run.world.ranks.gather(socket.gethostname()) if self._compares else []
        names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
        self._detector = SlowRankDetector(names, run.console.message)
        self._pending: tuple[int, HostCopy] | None = None
        self._paused_seconds = 0.0

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        """Start measuring this rank, if a comparison is due soon."""
        # The pauses since the previous step. `Profiling`, called before, may have paused the timer.
        self._paused_seconds = trainer.timer.paused_seconds
        # The measurement starts at the end of this step and covers the next one.
        self._clock.active = self._compares and self.every - step % self.every <= STEPS

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Start the exchange between ranks, if it is due. No rank waits for it."""
        if self._paused_seconds > PAUSE_SECONDS:
            self._clock.drop_last()
        if self._compares and step.step % self.every == 0:
            self._pending = step.step, _gather(self._clock.take(), self._world)

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Read the times that ranks exchanged after this step, and log which ranks are slow.

        A rank without a measurement has NaN.
        """
        if self._pending is None or self._pending[0] != result.step:
            return
        # The times have arrived once the next step has started.
        times = [ComputeTime(*numbers) for numbers in self._pending[1].read()]
        result.rank_seconds = compute_seconds(times, hidden=self._hidden)
        self._pending = None
        self._detector.update(result.step, result.rank_seconds)


def _gather(own: ComputeTime | None, world: World) -> HostCopy:
    """Start to gather the times of all ranks, without waiting for them."""
    numbers = numbers_to_device(own or (math.nan, math.nan), torch.float64, world.device)
    gathered = numbers.new_empty(2 * world.world_size)
    all_gather(gathered, numbers, world.group).wait()
    return HostCopy(gathered.view(-1, 2))


def compute_seconds(times: Sequence[ComputeTime], *, hidden: bool) -> list[float]:
    """Return the compute time of each rank, in seconds.

    Args:
        times: The measured times of all ranks.
        hidden: Whether collectives overlap with computation. If so, the waiting time of a rank is
            its excess over the rank that waits least, because the transfer takes the same time on
            all ranks.
    """
    least = min((t.waited for t in times if not math.isnan(t.waited)), default=0.0)
    return [t.between - t.waited + (least if hidden else 0.0) for t in times]


class SlowRankDetector:
    """Tracks which ranks are slow, and logs each change once.

    Args:
        names: Names of all ranks.
        log: Called with a message when a rank becomes slow or recovers.
    """

    def __init__(self, names: Sequence[str], log: Callable[[str], object]) -> None:
        self._names = names
        self._log = log
        self._since: dict[int, int] = {}
        self._reported: set[int] = set()

    def update(self, step: int, seconds: Sequence[float]) -> None:
        """Compare the compute times of all ranks after a step."""
        for rank, own in enumerate(seconds):
            others = [s for s in (*seconds[:rank], *seconds[rank + 1 :]) if not math.isnan(s)]
            median = statistics.median(others) if others else math.nan
            if own > SLOW * median:
                # A single occurrence may be chance.
                if self._since.setdefault(rank, step) < step and rank not in self._reported:
                    self._reported.add(rank)
                    self._log(
                        f"{self._names[rank]} takes {own / median:.1f} x the median of the others "
                        f"({1000 * own:.3g} ms a step, theirs {1000 * median:.3g} ms), since step "
                        f"{self._since[rank]}"
                    )
            else:
                self._since.pop(rank, None)
                if rank in self._reported:
                    self._reported.remove(rank)
                    self._log(f"{self._names[rank]} is as fast as the others again, step {step}")
