from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from benchmarks.gpu.outcomes import Outcomes, cause_in, cause_of_failure
from tests.progress import wait_until
from tests.torchrun import environment, python

TESTS = """
import time
import pytest

@pytest.fixture
def fails_at_the_end():
    yield
    raise RuntimeError("leaks")

def test_good(): pass
def test_skipped(): pytest.skip("no device")
def test_bad(): assert 1 == 2, "one is not two"
def test_also_bad(): raise ValueError("later")
def test_leaking(fails_at_the_end): pass
def test_endless(): time.sleep(600)
"""


def start(directory: Path) -> subprocess.Popen[bytes]:
    """Start the tests in a directory; their outcomes are written to its file `outcomes`."""
    options = ("-p", "benchmarks.gpu.outcomes", f"--outcomes={directory / 'outcomes'}")
    return subprocess.Popen(
        python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_some.py"),
        cwd=directory,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )


def test_tests_are_counted_even_if_the_run_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    with start(tmp_path) as process:
        endless = "test_some.py::test_endless"
        wait_until(lambda: Outcomes.read(tmp_path / "outcomes").running == endless)
        os.kill(process.pid, signal.SIGKILL)
    found = Outcomes.read(tmp_path / "outcomes")
    assert found[:3] == (1, 3, 1)
    assert found.cause == "test_some.py::test_bad: AssertionError: one is not two"


def test_a_file_that_cannot_be_imported_counts_as_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import not_there\n")
    with start(tmp_path) as process:
        assert process.wait() != 0
    found = Outcomes.read(tmp_path / "outcomes")
    assert found[:3] == (0, 1, 0)
    assert found.cause == "test_some.py: ModuleNotFoundError: No module named 'not_there'"


def test_without_outcomes() -> None:
    assert Outcomes.read(Path("not there")) == (0, 0, 0, "", "")


def test_the_first_traceback_is_the_cause() -> None:
    output = (
        "starting\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "a.py", line 1\n'
        "[rank1]:     f()\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "a.py", line 2\n'
        "[rank0]: DistBackendError: peer gone\n"
        "  ChildFailedError: \n"
    )
    assert cause_in(output) == "torch.OutOfMemoryError: CUDA out of memory"
    assert cause_in("one\nskipped: no device\n\n") == "skipped: no device"
    assert cause_in("") == "no output"
    assert len(cause_in("x" * 1000)) == 300


def test_why_a_test_failed() -> None:
    indented = 'rank 1 raised\n  Traceback (most recent call last):\n    File "a"\n  KeyError: 3\n'
    assert cause_of_failure(indented) == "KeyError: 3"
    died = "rank 0 of 4 died of signal SIGSEGV\nAll traceback entries are hidden.\n"
    assert cause_of_failure(died) == "rank 0 of 4 died of signal SIGSEGV"
    asserted = "    def test():\n>   f()\nE   AssertionError: Traceback (most recent call last):\n"
    assert cause_of_failure(asserted) == "AssertionError: Traceback (most recent call last):"
