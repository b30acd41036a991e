"""Lets the kernel signal a process whose parent has ended, even while native code holds the GIL."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def signal_when_parent_ends(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Args:
        number: The signal; 0: none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
