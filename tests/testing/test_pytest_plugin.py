"""The pytest plugin, as another project uses it."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

import distmp.testing  # noqa: F401
from tests.torchrun import python, run

# pytester forgets modules that a test imports first, and torch cannot be imported twice. So
# distmp.testing imports it above.
pytest_plugins = ["pytester"]

PROJECT = """
import os, threading, time, unittest
import pytest
import torch
import torch.distributed as dist

class TestMethods:
    @pytest.mark.ranks(2)
    def test_method(self):
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2

@pytest.mark.ranks(2)
@pytest.mark.parametrize("summand", [1.0])
def test_sum(summand, tmp_path):
    assert tmp_path.is_dir()
    total = torch.tensor(summand + dist.get_rank())
    dist.all_reduce(total)
    assert total == 3

@pytest.mark.ranks(2)
def test_fails():
    if dist.get_rank() == 1:
        print("before the failure")
        raise ArithmeticError("the first cause")
    dist.barrier()

@pytest.mark.ranks(2)
def test_fails_twice():
    if dist.get_rank() == 1:
        threading.Thread(target=time.sleep, args=[1]).start()  # it exits after the other one
        raise ArithmeticError("raised first")
    time.sleep(0.5)
    raise ArithmeticError("raised second")

@pytest.mark.ranks(2, timeout=1)
def test_hangs():
    if dist.get_rank() == 0:
        time.sleep(100)

@pytest.mark.ranks(2)
def test_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()

@pytest.mark.ranks(2, timeout=1)
def test_ends_early():
    if dist.get_rank() == 1:
        os._exit(0)

@pytest.mark.ranks(2)
def test_exits():
    if dist.get_rank() == 1:
        raise SystemExit(0)
    dist.barrier()

@pytest.mark.ranks(2)
def test_does_not_raise():
    with pytest.raises(ValueError):
        pass

@pytest.mark.ranks(2)
def test_skips():
    if dist.get_rank() == 1:
        pytest.skip("of rank 1")
    dist.barrier()

@pytest.mark.ranks(2)
def test_xfails():
    if dist.get_rank() == 1:
        pytest.xfail("known")
    dist.barrier()

@pytest.mark.ranks(2)
async def test_async():
    raise ArithmeticError

class TestOfUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_of_unittest(self):
        raise ArithmeticError

    def test_other(self):
        assert not dist.is_initialized()

def test_without_ranks():
    assert not dist.is_initialized()
"""


def test_marked_tests_run_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["distmp.testing.pytest_plugin"]\n')
    options = "-rsx", "-p", "no:cacheprovider", "--strict-markers"
    shown = run(python("-m", "pytest", *options, "."), tmp_path).stdout
    assert "8 failed, 4 passed, 1 skipped, 1 xfailed" in shown
    assert "1 error" in shown
    assert "\nTypeError: ranks do not await async tests; call asyncio.run in the test\n" in shown
    assert "\nranks: write a function, or a class without unittest.TestCase\n" in shown
    assert "ArithmeticError: the first cause\n----------------------------- Captured" in shown
    assert "ArithmeticError: raised first\n" in shown
    assert "raised second" not in shown
    assert "another exception occurred" not in shown
    assert "the direct cause of" not in shown
    assert "in test_does_not_raise\n" in shown
    assert "\nbefore the failure" in shown
    assert "rank 0 of 2: process 0 terminated with exit code 1\n" in shown
    assert "\nTimeout (0:00:01)!" in shown
    assert "RuntimeError: SystemExit: 0\n" in shown
    assert "RuntimeError: Failed: DID NOT RAISE ValueError\n" in shown
    assert "XFAIL test_project.py::test_xfails - known" in shown
    assert re.search(r"SKIPPED \[1\] test_project\.py:\d+: of rank 1\n", shown)
    assert "in test_hangs" in shown
    assert "rank 1 of 2: process 1 terminated with exit code 7" in shown
    running = psutil.process_iter(["cmdline"])  # None for a process that has ended meanwhile
    left = [each for each in running if str(tmp_path) in " ".join(each.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=10)[1] == []


@pytest.mark.parametrize("arguments", ["0", "'two'", "True", "", "2, 5, 1", "2, 0", "2, port=1"])
def test_wrong_marker_is_refused(arguments: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.ranks({arguments})\ndef test_marked(): pass\n"
        "def test_other(): pass"
    )
    result = pytester.runpytest("-p", "distmp.testing.pytest_plugin")
    result.stdout.fnmatch_lines(["*TypeError: *"])
    result.assert_outcomes(failed=1, passed=1)
