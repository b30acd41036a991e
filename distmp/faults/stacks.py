"""Where a thread stands: its Python stack, and the collective that it waits in."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from distmp.utils.frames import outwards

# Calls that are shown; the outermost ones are the same in every run.
CALLS = 12
# One that nobody else uses. Its handler needs no interpreter: it answers from code that holds it.
SIGNAL = signal.SIGRTMAX - 5
ANSWER_SECONDS = 2.0


def main_thread() -> FrameType | None:
    """Return the innermost frame of the main thread, or of the thread whose end it waits for."""
    frames = sys._current_frames()
    frame = frames.get(threading.main_thread().ident or 0)
    other = _joined(frame)
    return frame if other is None else frames.get(other.ident or 0, frame)


def _joined(frame: FrameType | None) -> threading.Thread | None:
    """Return the thread whose end a thread waits for, if it does."""
    for inner in outwards(frame):
        if inner.f_code is threading.Thread.join.__code__:
            return inner.f_locals["self"]
        if inner.f_code.co_filename != threading.__file__:
            break
    return None


def show(frame: FrameType | None) -> str:
    """Return the stack below a frame in Python's own form, the innermost call last."""
    calls = traceback.extract_stack(frame) if frame else []
    shown = [call for call in calls if not call.filename.endswith("torch/nn/modules/module.py")]
    return textwrap.dedent("".join(traceback.format_list(shown[-CALLS:])))


class SharedStack:
    """Lets another process of this machine read the stacks of this one, whatever it is busy with.

    Attributes:
        descriptor: Of a file in memory, where they appear on `SIGNAL`.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stacks")
        faulthandler.register(SIGNAL, file=self.descriptor, all_threads=True)

    def close(self) -> None:
        """Stop to answer."""
        faulthandler.unregister(SIGNAL)
        os.close(self.descriptor)


def of_process(pid: int, descriptor: int) -> str:
    """Return the stack of another process on this machine, or "" if it does not answer.

    Args:
        pid: Of a process with a `SharedStack`.
        descriptor: The `SharedStack`'s.
    """
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            _, found, text = path.read_text().partition("Current thread ")
            if found and "\n" in text:
                # Python 3.10 to 3.14: a heading, a line for each call, an empty line.
                lines = text.split("\n\n")[0].splitlines()[1:]
                return "".join(f"{line}\n" for line in reversed(lines[:CALLS]))
            time.sleep(0.05)
    return ""
