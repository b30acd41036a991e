"""Stop a launcher: forward the signal to its ranks, wait for them, and do not restart them.

torchrun itself kills ranks 30 seconds after SIGTERM, which it also sends when more machines join,
is killed by SIGUSR1, and restarts ranks after any exit code other than 0.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import psutil

from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, restore_handlers
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE
from distmp.utils.processes import holds_within

_ORDERLY = (STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE)

# Exit codes of ranks that a stop signal killed before their handlers were installed. SIGTERM is
# excluded, because torchrun sends it itself.
_REQUESTS = tuple(-number for number in STOP_SIGNALS if number != signal.SIGTERM)

# Left to torchrun, which forwards it and kills the ranks if they do not exit.
_TORCHRUNS_SIGNALS = "SIGQUIT"

# The third Ctrl-C kills the ranks.
_MAX_INTERRUPTS = 3
# Once one rank has exited after a checkpoint, the others have saved too and are exiting.
_EXIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


def cause_of_stop(received: signal.Signals | None, exit_code: int) -> str:
    """Return what stopped a launcher, as the end of "stopped ...".

    Args:
        received: The signal that the launcher received first; None if a rank stopped by itself.
        exit_code: The exit code of the ranks.
    """
    if received is not None:
        return f"by {received.name}"
    # A KeyboardInterrupt in the code of a rank ends it immediately, SIGINT after a checkpoint.
    interrupted = exit_code == INTERRUPTED_EXIT_CODE
    return "by SIGINT or KeyboardInterrupt in a rank" if interrupted else "after a checkpoint"


class OrderlyStop:
    """Stops the ranks of this process after a checkpoint, inside a `with` block around torchrun.

    A signal of `STOP_SIGNALS` is forwarded to every rank of this machine. Once a rank has exited
    after that, or has exited with the code of an orderly stop without a signal here, this class
    waits for all others and ends torchrun's agent as if it had received a signal. Ranks may take as
    long as they need to save; with torchrun's `--shutdown-timeout` they are killed after that many
    seconds. Ranks that are stopped (SIGSTOP) are continued; if one still is after `_EXIT_SECONDS`,
    all are killed. They are continued after a rank has failed, too. SIGHUP, which a closing
    terminal sends, is ignored here and in the ranks.

    Args:
        options: The options of torchrun, changed so that its handlers do not replace the ones of
            this class.

    Attributes:
        received: The first signal received here, or None.
        killed: Whether ranks had to be killed.
    """

    def __init__(self, options: Namespace) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = 0
        self.killed = False
        self._shutdown_timeout: float | None = getattr(options, "shutdown_timeout", None)
        self._in_handler = False
        self._codes: set[int] = set()
        self._previous_handlers: dict[int, signal._HANDLER] = {}
        if hasattr(options, "signals_to_handle"):
            options.signals_to_handle = _TORCHRUNS_SIGNALS

    def __enter__(self) -> OrderlyStop:
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._forward)
        self._previous_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._previous_handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_timeout)
        self._previous_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._on_child_exit)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        restore_handlers(self._previous_handlers)

    def saving_first(self, stop_workers: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Return torchrun's method that stops ranks; they save before it if more machines join."""

        def stop(agent: Any, group: Any) -> None:
            if group.state.name == "HEALTHY":  # no rank has failed
                _send(os.kill, running_ranks(), signal.SIGTERM)
                limit = math.inf if self._shutdown_timeout is None else self._shutdown_timeout
                holds_within(_all_have_exited, limit)
            stop_workers(agent, group)

        return stop

    def exit_code(self) -> int:
        """Return the exit code of the launcher after this class has ended torchrun."""
        if self.received is not None and self.killed:
            return 128 + self.received
        if self._interrupts > 1:
            # The user did not wait for a checkpoint, so the exit codes of the ranks do not matter.
            return INTERRUPTED_EXIT_CODE
        # The signal kills ranks that have no handlers yet; these have nothing to save.
        expected = {0, *_ORDERLY, *(() if self.received is None else (-self.received,))}
        failures = sorted(self._codes - expected, key=lambda code: code == LOST_PEER_EXIT_CODE)
        if failures:
            return failures[0] if failures[0] > 0 else 128 - failures[0]
        interrupted = self.received == signal.SIGINT or INTERRUPTED_EXIT_CODE in self._codes
        return INTERRUPTED_EXIT_CODE if interrupted else STOPPED_EXIT_CODE

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            timeout = self._shutdown_timeout
            seconds = _EXIT_SECONDS if timeout is None else max(timeout, _POLL_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        self._interrupts += number == signal.SIGINT
        ranks = running_ranks()
        if not ranks:
            self._end_torchrun()
        if self._interrupts == _MAX_INTERRUPTS:
            self._kill_ranks(number, frame)
        # The exit of the first rank must not wait for those that have no signal yet.
        self._in_handler, was_in_handler = True, self._in_handler
        _send(os.kill, ranks, number)
        # Ranks that are stopped (SIGSTOP) would not handle other signals.
        _send(os.killpg, ranks, signal.SIGCONT)
        self._in_handler = was_in_handler
        self._on_child_exit(number, frame)

    def _on_timeout(self, number: int, frame: FrameType | None) -> None:
        if self._shutdown_timeout is not None or any(map(_is_stopped, running_ranks())):
            self._kill_ranks(number, frame)

    def _kill_ranks(self, number: int, frame: FrameType | None) -> None:
        self.killed = True
        # The exit of the first rank calls `_on_child_exit` here, before the next one is killed.
        self._in_handler = True
        _send(os.killpg, running_ranks(), signal.SIGKILL)
        self._end_torchrun()

    def _on_child_exit(self, number: int, frame: FrameType | None) -> None:
        """Check whether the exit of a child ends the run, and if so wait for the others."""
        if self._in_handler:
            return
        codes = _exit_codes()
        if any(codes.values()):  # torchrun ends the others by SIGTERM
            _send(os.killpg, codes, signal.SIGCONT)
        died = [code for code in codes.values() if code in _REQUESTS]
        if died and self.received is None:
            self._forward(-died[0], frame)
        orderly = any(code in _ORDERLY for code in codes.values())
        if not orderly and (self.received is None or set(codes.values()) <= {None}):
            return
        self._in_handler = True
        holds_within(_all_have_exited, _EXIT_SECONDS)
        self._in_handler = False
        self._codes = {code for code in _exit_codes().values() if code is not None}
        if self._codes != {0}:
            self._end_torchrun()

    def _end_torchrun(self) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        received = self.received or signal.SIGTERM
        raise SignalException(f"the ranks were stopped by {received.name}", received)


def running_ranks() -> list[int]:
    """Return the process ids of the ranks: torchrun starts each in a new session."""
    ranks = []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                ranks.append(child.pid)
    return ranks


def _send(send: Callable[[int, int], None], ranks: Iterable[int], number: int) -> None:
    """Send a signal to each rank that is left, or to its process group."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            send(rank, number)


def _is_stopped(rank: int) -> bool:
    """Return whether a signal (SIGSTOP) or a debugger has stopped a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        status = psutil.Process(rank).status()
        return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _exit_codes() -> dict[int, int | None]:
    """Return the exit code of each rank: None while it runs, -N if signal N killed it."""
    return {rank: _exit_code(rank) for rank in running_ranks()}


def _all_have_exited() -> bool:
    return None not in _exit_codes().values()


def _exit_code(child: int) -> int | None:
    with contextlib.suppress(ChildProcessError):
        # WNOWAIT leaves the child to torchrun's own wait.
        if state := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
    return None
