from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from distmp.telemetry.rank_log import RankLog

LIBC = ctypes.CDLL(None)


class Ended(NamedTuple):
    status: int
    output: str
    errors: str


def in_a_process(program: Callable[[], None]) -> Ended:
    """Run `program` in a child; return its exit status and its complete output."""
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        for stream, (_, write) in zip((1, 2), pipes, strict=True):
            os.dup2(write, stream)
        for ends in pipes:
            for end in ends:
                os.close(end)
        try:
            # Buffered, as Python buffers output to a pipe.
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            program()
            sys.stdout.flush()
        finally:
            os._exit(sys.exc_info()[0] is not None)
    for _, write in pipes:
        os.close(write)
    texts = []
    for read, _ in pipes:
        with open(read, "rb") as file:
            texts.append(file.read().decode())
    return Ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *texts)


def write_lines(word: str) -> None:
    """Write a line in each of the possible ways."""
    sys.stdout.write(f"{word} of Python\n")
    os.write(1, f"{word} of a descriptor\n".encode())
    sys.stderr.write(f"{word} error of Python\n")
    LIBC.dprintf(2, f"{word} warning of C\n".encode())
    subprocess.run(["echo", f"{word} of a child"], check=True)


ENDINGS = ("of Python", "of a descriptor", "error of Python", "warning of C", "of a child")


def test_output_is_copied_and_printed(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.log"

    def program() -> None:
        with RankLog() as log:
            log.start("--- a start")
            write_lines("early")
            time.sleep(0.3)  # until it has been copied
            log.place(path)
            write_lines("late")
        write_lines("afterwards")

    for _ in range(2):
        ended = in_a_process(program)
        assert ended.status == 0
        for word in ("early", "late", "afterwards"):
            for what in ENDINGS:
                output = (
                    ended.errors if what in ("error of Python", "warning of C") else ended.output
                )
                assert output.count(f"{word} {what}\n") == 1
    lines = path.read_text().splitlines()
    # A second start appends.
    for start in (lines[:11], lines[11:]):
        assert start[0] == "--- a start"
        assert sorted(start[1:6]) == sorted(f"early {what}" for what in ENDINGS)
        assert sorted(start[6:]) == sorted(f"late {what}" for what in ENDINGS)


def test_log_is_complete_after_kill(tmp_path: Path) -> None:
    def program() -> None:
        log = RankLog()
        log.start("--- a start")
        log.place(tmp_path / "log")
        for number in range(500):
            sys.stdout.write(f"line {number}\n")
        os.write(2, b"terminate called\n")
        os.kill(os.getpid(), signal.SIGKILL)

    ended = in_a_process(program)
    assert ended.status == -signal.SIGKILL
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(500)]
    assert "terminate called" in lines
    assert ended.output.splitlines()[-1] == "line 499"
    assert ended.errors == "terminate called\n"


def test_log_goes_on_without_reader(tmp_path: Path) -> None:
    def program() -> None:
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(read)
        with RankLog() as log:
            log.start("--- a start")
            log.place(tmp_path / "log")
            os.write(1, b"first\n")
            time.sleep(0.3)  # `tee` could end
            os.write(1, b"second\n")

    assert in_a_process(program).status == 0
    assert (tmp_path / "log").read_text() == "--- a start\nfirst\nsecond\n"


def test_job_signals_do_not_stop_copying(tmp_path: Path) -> None:
    """Slurm sends them to all processes before it ends a job."""

    def program() -> None:
        with RankLog() as log:
            log.start("--- a start")
            log.place(tmp_path / "log")
            while {child.name() for child in psutil.Process().children()} != {"tee"}:
                time.sleep(0.01)  # they start as shells
            for child in psutil.Process().children(recursive=True):
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                    child.send_signal(number)
            time.sleep(0.1)
            sys.stdout.write("saved a checkpoint\n")

    ended = in_a_process(program)
    assert (ended.status, ended.output) == (0, "saved a checkpoint\n")
    assert "saved a checkpoint" in (tmp_path / "log").read_text()


def test_unwritable_log_file_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def program() -> None:
        logging.getLogger("distmp").addHandler(logging.StreamHandler(sys.stderr))
        with RankLog() as log:
            log.start("--- a start")
            log.place(tmp_path / "file" / "logs" / "rank-0.log")
            sys.stdout.write("it continues\n")

    ended = in_a_process(program)
    assert (ended.status, ended.output) == (0, "it continues\n")
    assert "no log of this rank" in ended.errors


def test_unstarted_log_writes_no_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RankLog() as log:
        log.place(tmp_path / "log")
        os.write(1, b"hello\n")
    assert capfd.readouterr().out == "hello\n"
    assert not (tmp_path / "log").exists()
