"""How long this rank waits for the others in collectives.

Ranks end a step together, so that all of them seem to be as slow as the slowest. What tells them
apart is waiting: the slowest waits least.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Moment:
    """A point in time: of the host, or of the current stream of a CUDA device.

    Args:
        device: Whose time it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_past(self) -> bool:
        """Whether the device has come there."""
        return self._event is None or self._event.query()

    def until(self, later: Moment) -> float:
        """Return the seconds to a later moment of the same device; both must be past."""
        if self._event is None or later._event is None:
            return later._host - self._host
        return self._event.elapsed_time(later._event) / 1000


Span = tuple[Moment, Moment]


class Waiting:
    """Notes when this rank waits for collectives, while it is asked to.

    Attributes:
        active: Whether it does. Nothing is noted and nothing is paid otherwise.
    """

    def __init__(self) -> None:
        self.active = False
        self._spans: list[Span] = []

    def watch(self, work: dist.Work, tensor: Tensor) -> dist.Work:
        """Return a collective that was started, with its waiting noted if that is wanted."""
        return _Watched(work, tensor.device, self._spans) if self.active else work

    def take(self) -> list[Span]:
        """Return what was noted since the last time."""
        spans = self._spans.copy()
        self._spans.clear()
        return spans


class _Watched(dist.Work):
    """A collective that notes when somebody waits for it."""

    def __init__(self, work: dist.Work, device: torch.device, spans: list[Span]) -> None:
        super().__init__()
        self._work = work
        self._device = device
        self._spans = spans

    def wait(self, *timeout: timedelta) -> bool:
        before = Moment(self._device)
        done: Any = self._work.wait(*timeout)
        self._spans.append((before, Moment(self._device)))
        return done


waiting = Waiting()
"""That of this process."""
