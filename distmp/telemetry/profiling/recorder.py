"""Records the steps that a configuration names, and says where their time went."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from distmp.distributed.progress import CurrentPhase, activity
from distmp.distributed.world import World
from distmp.telemetry.profiling import breakdown, cuda_memory, memory
from distmp.telemetry.profiling.settings import ProfileConfig
from distmp.telemetry.profiling.summary import SUMMARY, RankSummary, Summary, longest
from distmp.telemetry.profiling.trace import Trace

logger = logging.getLogger("distmp")


class StepProfiler:
    """Records chosen steps on every rank; a `with` block around the steps.

    It writes a trace (`trace-rank0.json`, for Perfetto), what took memory (`memory-rank0.json`, on
    CUDA also `memory-rank0.pickle` for pytorch.org/memory_viz), and for all ranks `summary.json`.
    When the block ends with an error, each rank leaves what it has, without the summary.

    Args:
        config: Which steps.
        directory: Where the files go, made when there are any.
        world: The ranks, all of which make one at the same time.
        say: Where to say what was found; on the first rank.
    """

    def __init__(
        self, config: ProfileConfig, directory: Path, world: World, say: Callable[[str], object]
    ) -> None:
        self._window = config.window
        self._directory = directory
        self._world = world
        self._say = say
        self._on_cuda = world.device.type == "cuda"
        self._begun = False
        self._profile: profile | None = None
        self._ranges = _Ranges()

    def before(self, step: int) -> None:
        """Begin or end to record, as is due before a step, counted from 1; all ranks call it."""
        if self._profile is not None:
            if step > self._window[-1]:
                self.finish()
        elif self._window and not self._begun and step >= self._window[0]:
            self._begun = True
            left = range(step, self._window[-1] + 1)
            if left != self._window:
                what = f"records from there to step {left[-1]}" if left else "records nothing"
                self._say(f"profile: this run goes on with step {step}, and {what}")
            if left:
                self._start()

    def finish(self) -> None:
        """End to record, if it has begun, and say what was found; all ranks call it."""
        if self._profile is None:
            return
        mine = self._stop()
        everyone: list[RankSummary | None] = [mine]
        if self._world.group is not None:
            everyone = [None] * self._world.world_size
            dist.all_gather_object(everyone, mine, group=self._world.group)
        known = [rank for rank in everyone if rank is not None]
        if self._world.rank == 0 and known:
            self._tell(Summary(*self._ranges.steps, known))

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
            if self._window and not self._begun:
                self._say(f"profile: nothing is recorded, step {self._window[0]} was not taken")
        elif self._profile is not None:
            # The other ranks may be gone or elsewhere: nothing is exchanged.
            failed_in = activity.now
            self._stop()
            # Where the error came up is part of its message.
            activity.now = failed_in
            logger.warning("profile: what was recorded until the error is in %s", self._directory)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            # What was launched before is none of these steps'.
            torch.cuda.synchronize(self._world.device)
            activities.append(ProfilerActivity.CUDA)
            cuda_memory.start()
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()
        activity.observer = self._ranges

    def _stop(self) -> RankSummary | None:
        """End to record, write the files of this rank, and return what is in them."""
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        activity.observer = None
        self._ranges.close()
        activity.enter("writing a profile", transfers=True)
        if self._on_cuda:
            # After an error the device may not answer.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._world.device)
        recorded.stop()
        try:
            return self._write(recorded)
        except (OSError, ValueError) as error:
            logger.warning("cannot write the profile: %s; the run goes on without it", error)
            return None
        finally:
            if self._on_cuda:
                cuda_memory.stop()

    def _write(self, recorded: profile) -> RankSummary | None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._on_cuda:
            cuda_memory.write(self._file("memory", "pickle"))
        path = self._file("trace", "json")
        recorded.export_chrome_trace(str(path))
        trace = Trace.read(
            json.loads(path.read_bytes())["traceEvents"], self._ranges.places, on_cuda=self._on_cuda
        )
        if not trace.window:
            return None
        if self._on_cuda and not trace.device:
            logger.warning("torch's profiler has seen no kernel; it may lack permission")
        used = memory.of_trace(trace)
        if used is not None:
            self._file("memory", "json").write_text(json.dumps(used.to_json()))
        return self._summary(trace, used)

    def _summary(self, trace: Trace, used: memory.Memory | None) -> RankSummary:
        parts = breakdown.of_trace(trace)
        steps = len(trace.steps)
        return RankSummary(
            rank=self._world.rank,
            host=socket.gethostname(),
            seconds=parts.breakdown(steps),
            idle_phase=breakdown.most_idle_phase(trace, parts),
            operators=longest(trace.own_times(), steps),
            peak_bytes=None if used is None else used.peak_bytes,
            peak_place="" if used is None else f"{used.phase} of {used.step}",
        )

    def _tell(self, summary: Summary) -> None:
        try:
            summary.write(self._directory / SUMMARY)
        except OSError as error:
            logger.warning("cannot write the profile: %s; the run goes on without it", error)
        self._say(f"profile of {summary.title}; in {self._directory}:\n{summary.text()}")

    def _file(self, what: str, ending: str) -> Path:
        return self._directory / f"{what}-rank{self._world.rank}.{ending}"


class _Ranges:
    """Shows in a trace what the main thread does, as ranges inside those of the steps.

    Attributes:
        places: Names of the ranges.
        steps: First and last step.
    """

    def __init__(self) -> None:
        self.places: set[str] = set()
        self.steps = (0, 0)
        self._step: Any = None
        self._place: Any = None

    def __call__(self, doing: CurrentPhase) -> None:
        if self._step is None or doing.step != self.steps[1]:
            self.close()
            self.steps = (self.steps[0] or doing.step, doing.step)
            self._step = _begun(f"step {doing.step}")
        else:
            _end(self._place)
        self.places.add(doing.place)
        self._place = _begun(doing.place)

    def close(self) -> None:
        """End the ranges that are open."""
        _end(self._place)
        _end(self._step)
        self._place = self._step = None


def _begun(name: str) -> Any:
    opened = record_function(name)
    opened.__enter__()
    return opened


def _end(opened: Any) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)
