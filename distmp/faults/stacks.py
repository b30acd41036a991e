"""Read the Python stack of a thread or of another process."""

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

# Number of calls shown; the outermost ones are the same in every run.
CALLS = 12
# An unused real-time signal. Its handler also works while other code holds the GIL.
SIGNAL = signal.SIGRTMAX - 5
ANSWER_SECONDS = 2.0


def main_thread() -> FrameType | None:
    """Return the innermost frame of the main thread, or of the thread that it joins."""
    frames = sys._current_frames()
    frame = frames.get(threading.main_thread().ident or 0)
    other = _joined(frame)
    return frame if other is None else frames.get(other.ident or 0, frame)


def _joined(frame: FrameType | None) -> threading.Thread | None:
    """Return the thread that a frame's thread is joining, or None."""
    for inner in outwards(frame):
        if inner.f_code is threading.Thread.join.__code__:
            return inner.f_locals["self"]
        if inner.f_code.co_filename != threading.__file__:
            break
    return None


def show(frame: FrameType | None) -> str:
    """Return the stack of a frame in Python's format, with the innermost call last."""
    calls = traceback.extract_stack(frame) if frame else []
    shown = [call for call in calls if not call.filename.endswith("torch/nn/modules/module.py")]
    return textwrap.dedent("".join(traceback.format_list(shown[-CALLS:])))


class SharedStack:
    """Lets another process of this machine read the stacks of this one, even if it is blocked.

    Attributes:
        descriptor: Descriptor of a file in memory, to which `SIGNAL` writes the stacks.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stacks")
        faulthandler.register(SIGNAL, file=self.descriptor, all_threads=True)

    def close(self) -> None:
        """Stop answering."""
        faulthandler.unregister(SIGNAL)
        os.close(self.descriptor)


def of_process(pid: int, descriptor: int) -> str:
    """Return the stack of another process on this machine, or "" if it does not answer.

    Args:
        pid: Id of a process with a `SharedStack`.
        descriptor: The descriptor of that `SharedStack`.
    """
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            _, heading, text = path.read_text().partition("Current thread ")
            if heading and "\n" in text:
                # Python 3.10 to 3.14 write a heading, a line for each call, and an empty line.
                lines = text.split("\n\n")[0].splitlines()[1:]
                return "".join(f"{line}\n" for line in reversed(lines[:CALLS]))
            time.sleep(0.05)
    return ""
