"""Finds what a Python thread executes: its frames, the line of user code, the collective."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import textwrap
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# Code that is not the user's: the standard library, distmp, installed packages.
_NOT_USER_CODE = (
    os.path.join(sysconfig.get_path("stdlib"), ""),
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
)
_DEVICE_WAIT = re.compile(r"\.(synchronize|item|tolist|cpu|numpy)\(")
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Number of calls of a stack that are shown; the outermost ones are the same in every run.
CALLS = 12


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def working_frame(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a thread, or of the thread that it joins."""
    frames = sys._current_frames()
    frame = frames.get(thread_id)
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


def stack_text(frame: FrameType | None) -> str:
    """Return the stack of a frame in Python's format, with the innermost call last."""
    calls = traceback.extract_stack(frame) if frame else []
    shown = [call for call in calls if not call.filename.endswith("torch/nn/modules/module.py")]
    return textwrap.dedent("".join(traceback.format_list(shown[-CALLS:])))


def user_line(thread_id: int) -> str:
    """Return the innermost line of the user's code that a thread executes.

    Args:
        thread_id: `threading.Thread.ident` of a thread of this process.

    Returns:
        "FILE:LINE in FUNCTION (`source`)". If no code is the user's, the innermost line of all; ""
        for a thread that has ended.
    """
    frames = list(outwards(sys._current_frames().get(thread_id)))
    if not frames:
        return ""
    frame = next(filter(_is_user_code, frames), frames[0])
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line).strip()
    place = f"{file}:{line} in {frame.f_code.co_name}"
    return f"{place} (`{source}`)" if source else place


def collective(frame: FrameType | None) -> str:
    """Return the collective that a thread waits in, with its caller, or "" if it waits in none.

    A collective is a function in torch's `distributed_c10d`, or a call of `wait` on the work that
    such a function returned.
    """
    name = ""
    for inner in outwards(frame):
        file = inner.f_code.co_filename
        if file.endswith("torch/distributed/distributed_c10d.py"):
            name = inner.f_code.co_name
        elif "torch/distributed/c10d_logger.py" not in file:
            if not name:
                line = linecache.getline(file, inner.f_lineno)
                waits = ".wait(" in line and "/torch/utils/data/" not in file
                name = "work.wait" if waits and "threading" not in file else ""
            return f"{name} ({_place(inner)})" if name else ""
    return name


def device_wait(frame: FrameType | None) -> str:
    """Return the call in which a thread waits for its device and the calling line, or "".

    It is recognized by its name: a `synchronize` of torch, or a call in the innermost line of code
    that copies from the device. A thread that executes such a line on CPUs does not wait.
    """
    name = ""
    for inner in outwards(frame):
        file = inner.f_code.co_filename
        if "/torch/cuda/" in file:
            name = inner.f_code.co_name
            continue
        if name:
            return f"{name} ({_place(inner)})" if name == "synchronize" else ""
        call = _DEVICE_WAIT.search(linecache.getline(file, inner.f_lineno))
        return f"{call[1]} ({_place(inner)})" if call else ""
    return ""


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name}, {Path(*path.parts[-3:])}:{frame.f_lineno}"


def _is_user_code(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return file in ("<stdin>", "<string>")
    return not file.startswith(_NOT_USER_CODE) and not any(part in file for part in _INSTALLED)
