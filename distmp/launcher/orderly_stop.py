"""How a launcher stops: it hands the request to its ranks, waits for them, and starts none again.

torchrun by itself kills ranks 30 seconds after SIGTERM, dies of SIGUSR1, and starts ranks again
that ended with an exit code other than 0, whatever it means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from argparse import Namespace
from types import FrameType, TracebackType

import psutil

from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, restore_handlers
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE

_ORDERLY = (STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE)

# What kills ranks that have not come far enough to obey. torchrun sends them SIGTERM by itself.
_REQUESTS = tuple(-number for number in STOP_SIGNALS if number != signal.SIGTERM)

# What is left to torchrun: it passes this on and kills the ranks if they do not obey.
_TORCHRUNS_SIGNALS = "SIGQUIT"

# With the third one nobody wants to wait for anything: ranks that ignored two are killed.
_MOST_INTERRUPTS = 3
# Once one rank has ended in order, the others have saved too and are on their last words.
_LAST_WORDS_SECONDS = 60.0
_POLL_SECONDS = 0.05


class OrderlyStop:
    """Stops the ranks below this process in order, inside a `with` block around torchrun.

    A signal of `STOP_SIGNALS` goes to every rank of this machine. Once a rank has ended after that,
    or has ended with the code of an orderly stop although nobody here was asked, all others are
    waited for, and torchrun's agent ends as if it had received a signal. How long ranks may take to
    save is up to whoever sent the signal; with torchrun's `--shutdown-timeout` they are killed so
    many seconds after it. SIGHUP, a terminal that closes, is ignored here and in the ranks.

    Args:
        options: torchrun's; its own handlers must not replace the ones of this class.

    Attributes:
        asked: The first signal received here, or None.
        killed: Whether ranks had to be killed.
    """

    def __init__(self, options: Namespace) -> None:
        self.asked: signal.Signals | None = None
        self._interrupts = 0
        self.killed = False
        self._patience: float | None = getattr(options, "shutdown_timeout", None)
        self._waiting = False
        self._codes: set[int] = set()
        self._before: dict[int, signal._HANDLER] = {}
        if hasattr(options, "signals_to_handle"):
            options.signals_to_handle = _TORCHRUNS_SIGNALS

    def __enter__(self) -> OrderlyStop:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._pass_on)
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._look_after)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        restore_handlers(self._before)

    def exit_code(self) -> int:
        """Return the exit code of the launcher after `torchrun` was ended by this class."""
        if self.asked is not None and self.killed:
            return 128 + self.asked
        # Ranks that had not come far enough to take the request die of it, and have lost nothing.
        expected = {0, *_ORDERLY, *(() if self.asked is None else (-self.asked,))}
        failures = sorted(self._codes - expected, key=lambda code: code == LOST_PEER_EXIT_CODE)
        if failures:
            return failures[0] if failures[0] > 0 else 128 - failures[0]
        interrupted = self.asked == signal.SIGINT or INTERRUPTED_EXIT_CODE in self._codes
        return INTERRUPTED_EXIT_CODE if interrupted else STOPPED_EXIT_CODE

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked = signal.Signals(number)
            if self._patience is not None:
                signal.setitimer(signal.ITIMER_REAL, max(self._patience, _POLL_SECONDS))
        self._interrupts += number == signal.SIGINT
        ranks = _ranks()
        if not ranks:
            self._end_torchrun()
        if self._interrupts == _MOST_INTERRUPTS:
            self._kill(number, frame)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        self.killed = True
        # The end of the first rank calls `_look_after` right here, before the next one is killed.
        self._waiting = True
        for rank in _ranks():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)
        self._end_torchrun()

    def _look_after(self, number: int, frame: FrameType | None) -> None:
        """See whether the end of a child means the end of the run, and wait for the others."""
        if self._waiting:
            return
        codes = _exit_codes()
        if self.asked is None and (died := [code for code in codes.values() if code in _REQUESTS]):
            self._pass_on(-died[0], frame)
        orderly = any(code in _ORDERLY for code in codes.values())
        if not orderly and (self.asked is None or set(codes.values()) <= {None}):
            return
        self._waiting = True
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while None in codes.values() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            codes = _exit_codes()
        self._waiting = False
        self._codes = {code for code in codes.values() if code is not None}
        if self._codes != {0}:
            self._end_torchrun()

    def _end_torchrun(self) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        asked = self.asked or signal.SIGTERM
        raise SignalException(f"the ranks were stopped by {asked.name}", asked)


def _ranks() -> list[int]:
    """Return the process ids of the ranks: torchrun gives each a session of its own."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                found.append(child.pid)
    return found


def _exit_codes() -> dict[int, int | None]:
    """Return the exit code of each rank, minus the signal that killed it; None while it runs."""
    return {rank: _exit_code(rank) for rank in _ranks()}


def _exit_code(child: int) -> int | None:
    try:
        # Left for torchrun to wait for.
        state = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
