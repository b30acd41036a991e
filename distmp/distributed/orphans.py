"""Ends a rank whose launcher was killed; otherwise it would continue and disturb the next job."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

from distmp.distributed.rank_environment import is_under_torchrun
from distmp.errors import LOST_PEER_EXIT_CODE
from distmp.utils.processes import signal_when_parent_ends, started

# Time for the current step and a last checkpoint.
END_SECONDS = 10.0
# Process ID of the launcher that started the ranks; torchrun does not set it.
LAUNCHER_VARIABLE = "DISTMP_LAUNCHER_PID"

_POLL_SECONDS = 1.0
# SIGSTKFLT, which Linux does not use. Its number also is a time in seconds, see `_kill_later`.
_LAUNCHER_ENDED = 16

_launcher: int | None = None


def is_orphan() -> bool:
    """Return whether the launcher that `end_with_launcher` watches has ended."""
    return _launcher is not None and os.getppid() != _launcher


@contextlib.contextmanager
def end_with_launcher() -> Iterator[None]:
    """End this process after its launcher, at the latest after `END_SECONDS`, inside the context.

    The process receives SIGTERM, for training a request to stop: all ranks end after the same step,
    with a checkpoint. If that takes too long, the process is killed; the checkpoint before it stays
    intact. If native code holds the GIL, Linux kills the process after 16 seconds. Without torchrun
    or `distmp launch`, this does nothing.

    Use it around a custom training loop if its ranks should not outlive torchrun. The script
    decides what SIGTERM does; by default it kills the process.

    Example:
        >>> from distmp.distributed.orphans import end_with_launcher
        >>> with end_with_launcher():
        ...     steps = [*range(3)]  # the loop
    """
    global _launcher
    if not is_under_torchrun():
        yield
        return
    # The launcher may have ended before this call. torchrun passes no ID to its ranks. A process
    # that is not the parent but is alive has launched an outer run, in which this one is nested.
    passed = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
    _launcher = os.getppid() if started(passed) else passed
    stopped = threading.Event()
    thread = threading.Thread(target=_watch, args=(stopped,), name="launcher watch", daemon=True)
    thread.start()
    try:
        with _kill_later():
            yield
    finally:
        stopped.set()
        thread.join()


@contextlib.contextmanager
def _kill_later() -> Iterator[None]:
    """Let the kernel kill this process if it still runs some time after its launcher.

    Python runs neither threads nor handlers while native code holds the GIL, but the kernel calls
    the native handler of a signal. It passes the number of the signal, and `alarm` takes it as the
    number of seconds until SIGALRM.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(_LAUNCHER_ENDED, ctypes.cast(libc.alarm, ctypes.c_void_p))
    signal_when_parent_ends(_LAUNCHER_ENDED)
    try:
        yield
    finally:
        signal_when_parent_ends(0)
        if is_orphan():
            signal.alarm(0)


def _watch(stopped: threading.Event) -> None:
    while not is_orphan():
        if stopped.wait(_POLL_SECONDS):
            return
    if os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):
            message = (
                f"distmp: the launcher (process {_launcher}) has ended; its ranks end within "
                f"{END_SECONDS:.0f} s, after a checkpoint if there is time\n"
            )
            os.write(2, message.encode())
    os.kill(os.getpid(), signal.SIGTERM)
    if not stopped.wait(END_SECONDS):
        os._exit(LOST_PEER_EXIT_CODE)
