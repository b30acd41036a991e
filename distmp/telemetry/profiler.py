"""The time of recorded steps, and their exposed communication."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distmp.distributed.progress import COMPARISON, SAVING, VALIDATION
from distmp.distributed.wait_times import Interval, overlap

# Events of torch's profiler, in Chrome's format.
Events = Sequence[Mapping[str, Any]]
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


def measured(events: Events, *, on_cuda: bool) -> tuple[float, float] | None:
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
    kernels = [event for event in device if not _communicates(event)]
    main = steps[0]["tid"]
    operators = [event for event in complete if event["tid"] == main and _computes(event)]
    window = [*map(_span, steps)]
    if device:
        # The device finishes after the host.
        window.append((max(stop for _, stop in window), max(_span(event)[1] for event in device)))
    pauses = [_span(event) for event in complete if event["name"] in PAUSES]
    busy = map(_span, kernels if on_cuda else operators)
    communication = map(_span, filter(_communicates, complete))
    step = overlap(window, without=pauses)
    exposed = overlap(window, communication, without=[*pauses, *busy])
    return step / len(steps) / 1e6, exposed / len(steps) / 1e6


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
