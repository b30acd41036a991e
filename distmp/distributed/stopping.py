"""Requests to stop: signals and the end of the time are noted, and training ends after a step.

Nothing heavy is imported here before it is used: a process that imports torch has to be able to
stop in order while it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeVar

from distmp.errors import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

# Ctrl-C, preemption, and the two that schedulers can be told to send ahead of a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# Microbatches of an evaluation between two questions to the ranks whether to leave off.
ASK_EVERY = 8

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT


def exit_code_after(number: int | None) -> int:
    """Return the exit code of a run that has stopped in order, after a signal or without one.

    75 sends a job back in its queue, which nobody wants who has pressed Ctrl-C.
    """
    return INTERRUPTED_EXIT_CODE if number == signal.SIGINT else STOPPED_EXIT_CODE


def stop_while_starting() -> None:
    """Have `STOP_SIGNALS` end this process in order from now on, until it has something to lose.

    That is the case once somebody else has handled a signal: see `put_back`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """End the process where it stands: nothing has been started yet, and nothing is cut off."""
    code, name = exit_code_after(number), signal.Signals(number).name
    message = f"distmp: stopped by {name} before anything had begun (exit code {code})\n"
    with contextlib.suppress(OSError):
        os.write(2, message.encode())
    os._exit(code)


def put_back(handlers: Mapping[int, signal._HANDLER]) -> None:
    """Put signal handlers back; only `stop_while_starting` has no say any more.

    Whoever has handled signals has begun something. How that ended is what the exit code tells, and
    the process is about to end with it.

    Args:
        handlers: What `signal.signal` has returned, by signal.
    """
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_IGN if handler is _end else handler)


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
        last: Number of the last signal that any of them has received in this process, or None.
    """

    last: int | None = None

    def __init__(self) -> None:
        self.received: int | None = None
        self._interrupted = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            own = number in (signal.SIGINT, signal.SIGTERM)
            if own or signal.getsignal(number) in (signal.SIG_DFL, _end):
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
        put_back(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.received = self.received or number
        StopSignals.last = number


@contextlib.contextmanager
def mortal() -> Iterator[None]:
    """Let SIGTERM and SIGINT kill this process for a while, in which it has nothing to lose.

    For code that waits outside of Python, where no handler runs before it returns: a rank that
    connects to others, of which some have gone, keeps torchrun waiting for half a minute.
    """
    deadly = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in deadly}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    import torch
    import torch.distributed as dist

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
