"""Requests to stop: signals and the end of the time are noted, and training ends after a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# Ctrl-C, preemption, and the two that schedulers can be told to send ahead of a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# Microbatches of an evaluation between two questions to the ranks whether to leave off.
ASK_EVERY = 8


class StopSignals:
    """Turns `STOP_SIGNALS` into a request that the training loop reads, inside a `with` block.

    A second SIGINT interrupts at once, for somebody who does not want to wait for the step. All
    others may come as often as they like, also while a checkpoint is being written. SIGUSR1 and
    SIGUSR2 are left to whoever has taken them before.

    SIGHUP, a terminal that closes, does not end a run. torchrun is the exception: it ends its ranks
    30 seconds after it, so that under it SIGHUP is a request like the others, unless it is ignored
    already (`nohup`, `distmp launch`).

    Attributes:
        received: Number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._interrupted = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            own = number in (signal.SIGINT, signal.SIGTERM)
            if own or signal.getsignal(number) == signal.SIG_DFL:
                self._before[number] = signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            ends_anyway = "TORCHELASTIC_RUN_ID" in os.environ
            handler = self._note if ends_anyway else signal.SIG_IGN
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
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


def ignore_stop_signals() -> None:
    """Let nothing but SIGKILL end this process any more: it is about to end by itself.

    torchrun ends the other ranks as soon as one of them has ended; a rank that it stops on its last
    instructions would have another exit code.
    """
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def asked_on_some_rank(asked: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether any rank has been asked to stop; every rank of the group has to call it."""
    if group is None:
        return asked
    flag = torch.tensor(int(asked))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


class until_asked(Iterator[T]):  # noqa: N801  # called like the functions of itertools
    """Yields items until some rank is asked to stop; all ranks leave off at the same one.

    Args:
        items: As many on every rank.
        asked: Whether this rank is asked to stop; called before every `ASK_EVERY`-th item.
        group: The ranks; None for a single process.

    Attributes:
        left_off: Whether it has ended before the items did.
    """

    def __init__(
        self, items: Iterable[T], asked: Callable[[], bool], group: dist.ProcessGroup | None
    ) -> None:
        self.left_off = False
        self._items = enumerate(items)
        self._asked = asked
        self._group = group

    def __next__(self) -> T:
        index, item = next(self._items)
        if index % ASK_EVERY == 0 and asked_on_some_rank(self._asked(), self._group):
            self.left_off = True
            raise StopIteration
        return item
