"""Record the configured steps with torch's profiler."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from distmp.distributed.progress import COMPARISON, SAVING, VALIDATION, CurrentPhase, current_phase
from distmp.distributed.world import World
from distmp.telemetry.settings import ProfileConfig
from distmp.utils.intervals import Interval, difference, intersection, length, union

# Phases between steps that are not part of any step.
PAUSES = (VALIDATION, COMPARISON, SAVING)
# Operators have a namespace, Python functions of autograd have none. Autograd nodes and user
# annotations contain hooks that wait for collectives: only operators inside of them compute.
_NO_COMPUTATION = ("autograd::", "torch::autograd::", "c10d::", "profiler::")
# Compiled code runs without operators.
_COMPILED = "## Call CompiledFxGraph"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# A smaller share of a step is not worth a note.
_MIN_SHARE = 0.05


class RankTimes(NamedTuple):
    """Times of a rank, in seconds per step, averaged over the recorded steps.

    Attributes:
        rank: Number of the rank.
        host: Name of its machine.
        step: Time of a step, without validation, checkpoints and comparisons between steps.
        exposed: Part of it in which a collective ran, and nothing was computed meanwhile.
    """

    rank: int
    host: str
    step: float
    exposed: float

    @property
    def own(self) -> float:
        """Time of a step without exposed communication, which includes the wait for other ranks."""
        return self.step - self.exposed


def summary(ranks: Sequence[RankTimes]) -> Iterator[str]:
    """Yield lines on the exposed communication, and on the rank for which the others wait."""
    step = statistics.fmean(rank.step for rank in ranks)
    exposed = statistics.fmean(rank.exposed for rank in ranks)
    share = exposed / step if step else 0.0
    yield f"{_ms(step)} a step; exposed communication: {_ms(exposed)} a step, {share:.0%}"
    slow = max(ranks, key=lambda rank: rank.own)
    others = statistics.median([rank.own for rank in ranks if rank is not slow] or [slow.own])
    if slow.own - others > _MIN_SHARE * slow.step:
        yield (
            f"rank {slow.rank} on {slow.host} slows down the others: its time without waiting is "
            f"{_ms(slow.own - others)} a step longer"
        )


def measured(events: Sequence[Mapping[str, Any]], *, on_cuda: bool) -> tuple[float, float] | None:
    """Return the time of a step and its exposed communication, in seconds, or None without steps.

    Args:
        events: The events of torch's profiler, in Chrome's format. Ranges named "step 1" and so on
            are the steps; those named like `PAUSES` do not count.
        on_cuda: Whether the rank computed on a CUDA device.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in complete if _is_step(event)]
    if not steps:
        return None
    device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    window = _window(steps, device, [event for event in complete if event["name"] in PAUSES])
    kernels = [event for event in device if not _communicates(event)]
    main = steps[0]["tid"]
    operators = [event for event in complete if event["tid"] == main and _computes(event)]
    busy = _spans(kernels if on_cuda else operators)
    communication = _spans(event for event in complete if _communicates(event))
    exposed = difference(intersection(window, communication), busy)
    return length(window) / len(steps) / 1e6, length(exposed) / len(steps) / 1e6


def _window(
    steps: Sequence[Mapping[str, Any]],
    device: Sequence[Mapping[str, Any]],
    pauses: Sequence[Mapping[str, Any]],
) -> list[Interval]:
    """Return the times of the steps without the pauses between them."""
    spans = [_span(step) for step in steps]
    if device:
        # The device finishes after the host.
        spans.append((max(stop for _, stop in spans), max(_span(event)[1] for event in device)))
    return difference(union(spans), _spans(pauses))


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return union(map(_span, events))


def _span(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _is_step(event: Mapping[str, Any]) -> bool:
    is_annotation = event.get("cat") == "user_annotation"
    return is_annotation and re.fullmatch(r"step [0-9]+", event["name"]) is not None


def _communicates(event: Mapping[str, Any]) -> bool:
    """Return whether it is a collective of gloo, or a kernel of NCCL."""
    name = event["name"]
    on_device = event.get("cat") in _ON_DEVICE
    return name.startswith("gloo:") or (on_device and name.lower().startswith("nccl"))


def _computes(event: Mapping[str, Any]) -> bool:
    name = event["name"]
    if name.startswith(_COMPILED):
        return True
    operator = event.get("cat") == "cpu_op" and "::" in name
    return operator and not name.startswith(_NO_COMPUTATION)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


logger = logging.getLogger("distmp")

# Rows of the table of operators.
_OPERATORS = 50
# An event of the CUDA allocator with its stack takes about a kilobyte.
_MAX_EVENTS = 100_000
# torch's functions for snapshots of CUDA memory are private. Tested with torch 2.11 and 2.13.
_record_memory: Any = torch.cuda.memory._record_memory_history
_dump_memory: Any = torch.cuda.memory._dump_snapshot


class StepProfiler:
    """Records the configured steps on every rank, in a `with` block around the steps.

    Each rank writes a trace (`trace-rank0.json`, for Perfetto), a table of its operators
    (`operators-rank0.txt`) and on CUDA a snapshot of its memory (`memory-rank0.pickle`, for
    pytorch.org/memory_viz). Rank 0 logs the time of a step and its exposed communication. If the
    block ends with an error, there is no summary.

    Args:
        config: The steps to record.
        directory: Directory of the files, created if needed.
        world: The process group; all ranks must create this object together.
        log: Called with the summary on the first rank.
    """

    def __init__(
        self, config: ProfileConfig, directory: Path, world: World, log: Callable[[str], object]
    ) -> None:
        self._window = config.window
        self._directory = directory
        self._world = world
        self._log = log
        self._on_cuda = world.device.type == "cuda"
        self._started = False
        self._profile: profile | None = None
        self._ranges = _Ranges()

    def before(self, step: int) -> None:
        """Start or stop recording before a step, counted from 1; all ranks must call it."""
        if self._profile is not None:
            if step > self._window[-1]:
                self.finish()
        elif step in self._window and not self._started:
            self._started = True
            self._start()

    def finish(self) -> None:
        """Stop recording, if it has started, and log the summary; all ranks must call it."""
        if self._profile is None:
            return
        own = self._stop()
        known = [rank for rank in self._world.ranks.gather(own) if rank is not None]
        if self._world.rank == 0 and known:
            first, last = self._ranges.steps
            ranks = "1 rank" if len(known) == 1 else f"{len(known)} ranks"
            what = f"profile of steps {first} to {last} on {ranks}, in {self._directory}"
            self._log("\n  ".join([what, *summary(known)]))

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
            if self._window and not self._started:
                self._log(f"profile: nothing was recorded, step {self._window[0]} did not run")
        elif self._profile is not None:
            # No collective: the other ranks may be gone or in other code.
            failed_in = current_phase.now
            self._stop()
            # The error message contains the phase in which the error was raised.
            current_phase.now = failed_in
            logger.warning("profile: the recording up to the error is in %s", self._directory)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            # Exclude kernels that were launched before these steps.
            torch.cuda.synchronize(self._world.device)
            activities.append(ProfilerActivity.CUDA)
            _record_memory(enabled="all", context="all", stacks="python", max_entries=_MAX_EVENTS)
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()
        current_phase.observer = self._ranges

    def _stop(self) -> RankTimes | None:
        """Stop recording, write the files of this rank, and return its times."""
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        current_phase.observer = None
        self._ranges.close()
        current_phase.enter("writing a profile", transfers=True)
        if self._on_cuda:
            # After an error the device may fail.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._world.device)
        recorded.stop()
        try:
            return self._write(recorded)
        except (OSError, ValueError) as error:
            logger.warning("cannot write the profile: %s; training continues without it", error)
            return None
        finally:
            if self._on_cuda:
                _record_memory(enabled=None)

    def _write(self, recorded: profile) -> RankTimes | None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._on_cuda:
            _dump_memory(str(self._file("memory", "pickle")))
        trace = self._file("trace", "json")
        recorded.export_chrome_trace(str(trace))
        by = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        operators = recorded.key_averages(group_by_input_shape=True)
        self._file("operators", "txt").write_text(operators.table(sort_by=by, row_limit=_OPERATORS))
        times = measured(json.loads(trace.read_bytes())["traceEvents"], on_cuda=self._on_cuda)
        return RankTimes(self._world.rank, socket.gethostname(), *times) if times else None

    def _file(self, what: str, ending: str) -> Path:
        return self._directory / f"{what}-rank{self._world.rank}.{ending}"


class _Ranges:
    """Marks the phases of the main thread in a trace, as ranges inside of those of the steps.

    Attributes:
        steps: First and last step.
    """

    def __init__(self) -> None:
        self.steps = (0, 0)
        self._step, self._place = contextlib.ExitStack(), contextlib.ExitStack()

    def __call__(self, doing: CurrentPhase) -> None:
        self._place.close()
        if doing.step != self.steps[1]:
            self._step.close()
            self.steps = (self.steps[0] or doing.step, doing.step)
            self._step.enter_context(record_function(f"step {doing.step}"))
        self._place.enter_context(record_function(doing.place))

    def close(self) -> None:
        """End the open ranges."""
        self._place.close()
        self._step.close()
