from __future__ import annotations

import io
import math
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.telemetry.console import Console, progress_line
from distmp.telemetry.settings import LogConfig
from tests.telemetry.samples import record


def _plain(every: int = 10) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(LogConfig(every=every), stream=stream), stream


def _shown_steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"step +(\d+)/", text)]


def test_plain_lines_are_printed_at_configured_steps() -> None:
    console, stream = _plain(every=10)
    for step in range(3, 46):
        validation_loss = 2.5 if step == 33 else None
        console.step(record(step, skipped=step in (7, 8), validation_loss=validation_loss), 45)
    assert _shown_steps(stream.getvalue()) == [3, 7, 8, 10, 20, 30, 33, 40, 45]
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 9


def test_plain_messages_keep_order_and_text() -> None:
    console, stream = _plain()
    console.message("[bold]model[/bold] :smile: 12")
    console.step(record(1), 45)
    console.message("saved")
    first, second, third = stream.getvalue().splitlines()
    assert first == "[bold]model[/bold] :smile: 12"
    assert second.startswith("step  1/45")
    assert third == "saved"


@pytest.mark.parametrize(
    ("settings", "quiet"), [(LogConfig(console="off"), False), (LogConfig(), True)]
)
def test_disabled_console_prints_nothing(settings: LogConfig, quiet: bool) -> None:
    stream = io.StringIO()
    console = Console(settings, quiet=quiet, stream=stream)
    console.message("hello")
    console.step(record(1, skipped=True), 1)
    assert stream.getvalue() == ""


def test_time_left_ignores_first_and_old_steps() -> None:
    console, stream = _plain(every=1)
    for step in range(1, 101):
        seconds = 500.0 if step == 1 else 2.0 if step <= 30 else 1.0
        console.step(record(step, step_seconds=seconds), 3700)
    lines = stream.getvalue().splitlines()
    assert f"{'2:03:16':>8} left" in lines[1]  # 3698 steps of 2 s
    assert f"{'1:00:00':>8} left" in lines[99]  # 3600 steps of 1 s


def test_stream_without_unicode_gets_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(LogConfig(), stream=stream).message("größe → 1")
    assert raw.getvalue() == b"gr\\xf6\\xdfe \\u2192 1\n"


def test_stream_without_encoding_gets_text() -> None:
    """A user may have replaced standard output by an object that copies it."""
    lines: list[str] = []
    copying: Any = SimpleNamespace(write=lines.append, flush=lambda: None)
    Console(LogConfig(), stream=copying).message("größe")
    assert lines == ["größe\n"]


def test_pipe_gets_plain_lines_immediately() -> None:
    script = """
import sys
from distmp.telemetry.console import Console
from distmp.telemetry.settings import LogConfig
from tests.telemetry.samples import record
Console(LogConfig()).step(record(1), 30)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # The process waits for its input, so this returns only if the line was flushed.
    line = process.stdout.readline()
    rest, _ = process.communicate()
    assert line.startswith("step  1/30  loss   2.3456")
    assert "\x1b" not in line
    assert rest == ""
    assert process.returncode == 0


def test_step_without_output_is_cheap() -> None:
    console, _ = _plain()
    console.step(record(1), 10**6)
    records = [record(step) for step in range(11, 20)]
    best = min(_seconds_per_step(console, records) for _ in range(50))
    assert best < 50e-6


def _seconds_per_step(console: Console, records: list[Any]) -> float:
    begin = time.perf_counter()
    for item in records:
        console.step(item, 10**6)
    return (time.perf_counter() - begin) / len(records)


SCRIPT_WITHOUT_READER = """
import sys
from distmp.telemetry.console import Console
from distmp.telemetry.settings import LogConfig
from distmp.telemetry.console import flush_standard_streams
from tests.telemetry.samples import record
console = Console(LogConfig())
for step in range(1, 2001):
    console.step(record(step), 20)  # every step after the last one is printed
print("printed by user code")
flush_standard_streams()
sys.stderr.write("the end\\n")
sys.exit(75)
"""


@pytest.mark.parametrize("command", ["{} | head -1", "{} > /dev/full"])
def test_closed_reader_does_not_end_run(command: str) -> None:
    program = shlex.join([sys.executable, "-c", SCRIPT_WITHOUT_READER])
    errors = "(" + program + " 2>&3; echo code $? >&3)"
    done = subprocess.run(
        ["bash", "-c", "exec 3>&2; " + command.format(errors)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert lines[1:] == ["the end", "code 75"], done.stderr
    assert "the output of this run cannot be written any more" in lines[0]


def test_closed_terminal_does_not_end_run(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            with open(1, "w", closefd=False) as sys.stdout:
                console = Console(LogConfig(every=1))
                console.step(record(1), 9)
                while not (tmp_path / "closed").exists():
                    time.sleep(0.01)
                for step in range(2, 10):
                    console.step(record(step), 9)
                    sys.stdout.write("printed by user code\n")
                console.message("a message")
            status = 75
        finally:
            os._exit(status)
    os.read(terminal, 100)
    os.close(terminal)
    (tmp_path / "closed").touch()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 75


def test_progress_line_has_all_fields() -> None:
    assert progress_line(record(120, skipped_total=3), 5000, 221.0) == (
        "step  120/5000  loss   2.3456      3:41 left  12.3k tok/s  norm    0.987"
        "  skipped   3  scale  2^16  lr 3.00e-04   1.2 GiB"
    )


def test_notes_follow_the_columns() -> None:
    plain = progress_line(record(7), 100, 60.0)
    metrics = {"accuracy": 0.75}
    validated = record(7, skipped=True, validation_loss=2.5, validation_metrics=metrics)
    noted = progress_line(validated, 100, 60.0)
    assert noted == plain + "  validation loss 2.5000  accuracy 0.7500  this step skipped"


_SOME = st.sampled_from([0.0, 1e-7, 0.5, 9.99, 123.456, 999.9, 1e5, 1e38, math.inf, math.nan])


@given(_SOME, _SOME, st.integers(-14, 24), st.integers(0, 999), st.floats(0, 1e7))
def test_columns_are_aligned(
    loss: float, norm: float, exponent: int, skips: int, left: float
) -> None:
    typical = progress_line(record(1), 5000, 60.0)
    other = record(4999, loss=loss, grad_norm=norm, loss_scale=2.0**exponent, skipped_total=skips)
    line = progress_line(other, 5000, left)
    assert line.isascii()
    for word in ("loss", "tok/s", "lr", "norm", "scale", "skipped", "left"):
        assert line.index(word) == typical.index(word)
