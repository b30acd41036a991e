"""The leak check of conftest.py, run on tests that leak."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKY_TESTS = """
import os, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist

def test_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEAN", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    thread = threading.Thread(target=time.sleep, args=(0.1,))
    thread.start()

def test_variable(): os.environ["LEAK"] = "1"
def test_removed_variable(): del os.environ["HOME"]
def test_file(): open("left", "w").close()
def test_directory(tmp_path): os.chdir(tmp_path)
def test_thread(): threading.Thread(target=time.sleep, args=(2,), name="sleeper").start()
def test_process(): globals()["kept"] = subprocess.Popen(["sleep", "60"])
def test_handler(): signal.signal(signal.SIGTERM, signal.SIG_IGN)
def test_dtype(): torch.set_default_dtype(torch.float64)
def test_threads(): torch.set_num_threads(torch.get_num_threads() + 1)
def test_precision(): torch.set_float32_matmul_precision("high")
def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
def test_clean_again(): pass
"""

# Expected report of the leak of each test. No leak is reported twice: conftest.py undoes them.
LEAKS = {
    "test_variable": "environment variable LEAK = '1'",
    "test_removed_variable": "environment variable HOME = None",
    "test_file": "file {}/left",
    "test_directory": "working directory ",
    "test_thread": "thread sleeper",
    "test_process": "process ",
    "test_handler": "handler of SIGTERM",
    "test_dtype": "torch's default dtype = torch.float64",
    "test_threads": "torch's number of threads = ",
    "test_precision": "torch's matmul precision = high",
    "test_group": "default process group",
}


@pytest.mark.nightly
def test_each_leak_fails_the_test_that_caused_it(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    root = str(Path(__file__).parents[1])
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider"]
    environment = {**os.environ, "COLUMNS": "300", "PYTHONPATH": root}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"{len(LEAKS) + 2} passed, {len(LEAKS)} errors" in run.stdout
    for test, leak in LEAKS.items():
        reported = f"::{test} - Failed: the test leaks: {leak.format(tmp_path)}"
        [line] = [line for line in run.stdout.splitlines() if reported in line]
        assert ";" not in line
