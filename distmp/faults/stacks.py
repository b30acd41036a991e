"""Read the Python stack of another process of this machine."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

from distmp.utils.frames import CALLS

# An unused real-time signal. Its handler also works while other code holds the GIL.
SIGNAL = signal.SIGRTMAX - 5
ANSWER_SECONDS = 2.0


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
