"""The line of the user's code that a thread executes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch

from distmp.utils import frames


def sleeping(event: threading.Event) -> None:
    event.wait()


def test_user_line_of_thread_waiting_in_standard_library() -> None:
    event = threading.Event()
    thread = threading.Thread(target=sleeping, args=[event])
    thread.start()
    try:
        line = frames.user_line(thread.ident or 0)
    finally:
        event.set()
        thread.join()
    number = sleeping.__code__.co_firstlineno + 1
    assert line == f"{__file__}:{number} in sleeping (`event.wait()`)"
    assert frames.user_line(thread.ident or 0) == ""


def test_user_line_below_installed_package() -> None:
    lines = []
    parameter = torch.ones((), requires_grad=True)
    parameter.register_hook(lambda _: lines.append(frames.user_line(threading.get_ident())))
    parameter.square().backward()
    assert lines[0].startswith(f"{__file__}:")
    assert "lines.append(" in lines[0]


def test_innermost_line_without_user_code(tmp_path: Path) -> None:
    finished = threading.Event()
    timer = threading.Timer(60, finished.set)
    timer.start()
    try:
        assert "threading.py" in frames.user_line(timer.ident or 0)
    finally:
        timer.cancel()
        timer.join()


class Value:
    """Has methods with the names of tensor methods that wait for the device."""

    def item(self) -> str:
        return frames.device_wait(sys._getframe(1))

    tolist = cpu = sum = item


def test_line_copying_from_device_waits_for_it() -> None:
    value = Value()
    assert value.item().startswith("item (test_line_copying_from_device_waits_for_it, ")
    assert value.tolist().startswith("tolist (")
    assert value.cpu().startswith("cpu (")
    assert value.sum() == ""
    assert frames.device_wait(None) == ""


def test_caller_of_synchronization_is_shown(tmp_path: Path) -> None:
    """The function of torch.cuda is not shown: it is the same for events, streams and devices."""
    directory = tmp_path / "torch" / "cuda"
    directory.mkdir(parents=True)
    source = "".join(
        f"def {name}(look):\n    return look()\n\n" for name in ("synchronize", "current_stream")
    )
    functions: dict[str, Any] = {}
    exec(compile(source, str(directory / "streams.py"), "exec"), functions)

    def look() -> str:
        return frames.device_wait(sys._getframe(1))

    def read() -> str:
        place: str = functions["synchronize"](look)
        return place

    assert read().startswith("synchronize (read, ")
    assert functions["current_stream"](look) == ""
