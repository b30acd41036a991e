"""Requests to stop: a signal is noted, and training ends after a whole step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopSignals:
    """Turns SIGINT and SIGTERM into a request that the training loop reads, inside a `with` block.

    A second SIGINT interrupts at once, for somebody who does not want to wait for the step.

    Attributes:
        received: Number of the first signal, or None.
        last: Number of the last signal that any of them has received in this process, or None.
    """

    last: int | None = None

    def __init__(self) -> None:
        self.received: int | None = None
        self._interrupted = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.received = self.received or number
        StopSignals.last = number
