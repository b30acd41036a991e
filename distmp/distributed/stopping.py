"""Requests to stop: signals are recorded, and training ends cleanly after a step.

torch is imported only where it is used: a process has to be able to stop cleanly while it imports
torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from distmp.distributed.rank_environment import is_under_torchrun
from distmp.errors import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

# Ctrl-C, preemption, and the two that schedulers can be configured to send before a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# Microbatches of an evaluation between two checks for a stop request.
CHECK_EVERY = 8

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT


def exit_code_after(number: int | None) -> int:
    """Return the exit code of a run that has stopped cleanly.

    75 requeues a job, which is not wanted after Ctrl-C.

    Args:
        number: The signal that has stopped the run; None without a signal.
    """
    return INTERRUPTED_EXIT_CODE if number == signal.SIGINT else STOPPED_EXIT_CODE


def exit_on_stop_signals() -> None:
    """Make `STOP_SIGNALS` end this process immediately, while it is still starting.

    `StopSignals` and other handlers replace this; see `restore_handlers`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    """End the process immediately. Nothing has been started yet that this could interrupt."""
    code, name = exit_code_after(number), signal.Signals(number).name
    message = f"distmp: stopped by {name} before anything had begun (exit code {code})\n"
    with contextlib.suppress(OSError):
        os.write(2, message.encode())
    os._exit(code)


def restore_handlers(handlers: Mapping[int, signal._HANDLER]) -> None:
    """Restore signal handlers, except those of `exit_on_stop_signals`, which become SIG_IGN.

    Code that handled signals has started its work. The process is about to end with the exit code
    of that work, and a late signal must not replace it.

    Args:
        handlers: What `signal.signal` has returned, by signal.
    """
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_IGN if handler is _exit else handler)


@contextlib.contextmanager
def handling(handlers: Mapping[int, signal._HANDLER]) -> Iterator[None]:
    """Install signal handlers, and restore those before them at the end, see `restore_handlers`."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        restore_handlers(before)


class StopSignals:
    """Turns `STOP_SIGNALS` into a request that the training loop reads, inside a `with` block.

    A second SIGINT raises KeyboardInterrupt immediately, for users who do not want to wait for the
    step. All other signals may repeat, also while a checkpoint is written. SIGUSR1 and SIGUSR2 are
    not handled if another handler was installed before.

    SIGHUP (the terminal was closed) is ignored, except under torchrun, which ends its ranks 30
    seconds after it: there SIGHUP is a request like the others, unless it is ignored already
    (`nohup`, `distmp launch`).

    Attributes:
        received: Number of the first signal that this object received, or None.
        last: Number of the last signal that any `StopSignals` of this process received; None before
            and after the outermost `with` block.
    """

    last: int | None = None
    _depth = 0

    def __init__(self) -> None:
        self.received: int | None = None
        self._interrupted = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            always = number in (signal.SIGINT, signal.SIGTERM)
            if always or signal.getsignal(number) == _exit or _is_default(number):
                self._before[number] = signal.signal(number, self._handle)
        if _is_default(signal.SIGHUP):
            handler = self._handle if is_under_torchrun() else signal.SIG_IGN
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
        StopSignals._depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        restore_handlers(self._before)
        StopSignals._depth -= 1
        if not StopSignals._depth:
            StopSignals.last = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.received = self.received or number
        StopSignals.last = number


def _is_default(number: int) -> bool:
    """Return whether nothing handles a signal.

    Python does not know the handlers of native code, such as of `faulthandler.register`.
    """
    status = Path("/proc/self/status")  # it, or a part of it, is missing in some sandboxes
    text = status.read_text() if status.exists() else ""
    caught = (text.partition("SigCgt:")[2].split() or ["0"])[0]
    return signal.getsignal(number) == signal.SIG_DFL and not int(caught, 16) & (1 << (number - 1))


def default_signal_handlers() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGINT kill this process inside the context.

    For native code that blocks, during which Python runs no signal handlers: torchrun would wait
    half a minute for a rank that connects to ended ranks. Use it only before there is state to
    save.
    """
    return handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL))


def ignore_stop_signals() -> None:
    """Ignore every stop signal from now on: the process is about to end by itself.

    torchrun ends the other ranks as soon as one has ended; a rank that it stops during its last
    instructions would end with a different exit code.
    """
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def stop_requested_on_any_rank(stop_requested: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether any rank has a request to stop; every rank of the group has to call it."""
    if group is None:
        return stop_requested
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(stop_requested))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


@dataclass(eq=False)
class until_stop_requested(Iterable[T]):  # noqa: N801  # called like the functions of itertools
    """Yields items until any rank has a request to stop; all ranks stop at the same item.

    Args:
        items: The items; their number is the same on every rank.
        stop_requested: Returns whether this rank has a request to stop. Called before every
            `CHECK_EVERY`-th item.
        group: The ranks; None for a single process.

    Attributes:
        ended_early: Whether a request to stop has ended the iteration.
    """

    items: Iterable[T]
    stop_requested: Callable[[], bool]
    group: dist.ProcessGroup | None
    ended_early: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[T]:
        """Yield the items, once."""
        for index, item in enumerate(self.items):
            if index % CHECK_EVERY == 0:
                self.ended_early = stop_requested_on_any_rank(self.stop_requested(), self.group)
                if self.ended_early:
                    return
            yield item
