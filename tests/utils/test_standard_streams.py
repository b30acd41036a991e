from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import TINY, corpus, environment

PRINTS = """
import os, sys
from distmp.utils.standard_streams import open_closed
open_closed()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
print("to standard output", flush=True)
print("to standard error", file=sys.stderr, flush=True)
sys.exit(file < 3)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ""])
def test_output_does_not_reach_a_file_in_the_place_of_a_closed_stream(
    closed: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(shell, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == ""
    assert (done.stdout == "") == (" >&-" in f" {closed}")
    assert (done.stderr == "") == ("2>&-" in closed)


@pytest.mark.nightly
def test_a_run_without_output_streams(tmp_path: Path) -> None:
    words = [*TINY, f"--data.path={corpus(tmp_path / 'data')}", "--run-dir=run", "--steps=1"]
    command = [sys.executable, "-m", "distmp.train", *words]
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    assert subprocess.run(shell, cwd=tmp_path, env=environment()).returncode == 0
    assert "step 1/1 " in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
