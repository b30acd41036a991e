"""A rank ends after its launcher, even if it runs no Python."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.progress import wait_until
from tests.torchrun import environment

RANK = """
import ctypes, os, signal
from pathlib import Path
from distmp.distributed.orphans import end_with_launcher

os.environ.update(TORCHELASTIC_RUN_ID="run", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
signal.signal(signal.SIGTERM, lambda number, frame: None)
signal.siginterrupt(signal.SIGTERM, False)
with end_with_launcher():
    Path("begun").touch()
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # holds the GIL
Path("returned").touch()
"""
ORPHAN = """
import os, signal
from distmp.distributed import orphans

os.environ.update(TORCHELASTIC_RUN_ID="run", RANK="0", WORLD_SIZE="1", LOCAL_RANK="1")
launcher = os.fork()
if not launcher:
    os._exit(0)
os.waitid(os.P_PID, launcher, os.WEXITED | os.WNOWAIT)  # it stays a zombie
os.environ[orphans.LAUNCHER_VARIABLE] = str(launcher)
with orphans.end_with_launcher():
    signal.pause()
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_launcher_that_ended_before_its_rank_watches_it_is_noticed() -> None:
    command = [sys.executable, "-c", ORPHAN]
    done = subprocess.run(command, env=environment(), timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process about its parent")
def test_orphaned_rank_that_holds_gil_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, cwd=tmp_path, env=environment()) as launcher:
        wait_until(lambda: launcher.poll() is not None or (tmp_path / "begun").exists())
        (rank,) = psutil.Process(launcher.pid).children()
        launcher.kill()
    try:
        wait_until(lambda: not rank.is_running())
    finally:
        if rank.is_running():
            rank.kill()
    assert not (tmp_path / "returned").exists()
