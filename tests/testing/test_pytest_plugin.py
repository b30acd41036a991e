"""The pytest plugin, as another project uses it."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.torchrun import python, run

pytest_plugins = ["pytester"]

PROJECT = """
import os, time
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

@pytest.mark.ranks(2, timeout=1)
def test_hangs():
    if dist.get_rank() == 0:
        time.sleep(100)

@pytest.mark.ranks(2)
def test_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()

@pytest.mark.ranks(2)
def test_skips_on_one_rank():
    if dist.get_rank() == 1:
        pytest.skip("no such device")
    dist.barrier()

def test_without_ranks():
    assert not dist.is_initialized()
"""


def test_marked_tests_run_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["distmp.testing.pytest_plugin"]\n')
    options = "-p", "no:cacheprovider", "--strict-markers", "-rs"
    shown = run(python("-m", "pytest", *options, "."), tmp_path).stdout
    assert "3 failed, 3 passed, 1 skipped" in shown
    assert "no such device" in shown
    assert "ArithmeticError: the first cause\n\nbefore the failure" in shown
    assert "rank 0 of 2: process 0 terminated with exit code 1\n\nTimeout (0:00:01)!" in shown
    assert "in test_hangs" in shown
    assert "rank 1 of 2: process 1 terminated with exit code 7" in shown
    running = psutil.process_iter(["cmdline"])  # None for a process that has ended meanwhile
    left = [each for each in running if str(tmp_path) in " ".join(each.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=10)[1] == []


@pytest.mark.parametrize(
    "arguments",
    ["0", "'two'", "True", "", "2, 5, 1", "2, timeout='x'", "2, 0", "2, port=1", "2, n=2"],
)
def test_wrong_marker_is_refused_at_collection(arguments: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.ranks({arguments})\ndef test_marked(): pass\n"
        "def test_other(): pass"
    )
    result = pytester.runpytest("-p", "distmp.testing.pytest_plugin")
    message = r"test_marked: Mark\(name='ranks', .*: write ranks\(n, timeout=60\), with n = 1"
    assert re.search(message, result.stdout.str())
    result.assert_outcomes(errors=1)


def test_wrong_marker_of_a_parameter_fails_the_test(pytester: pytest.Pytester) -> None:
    marked = "pytest.param(1, marks=pytest.mark.ranks(0))"
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.parametrize('x', [{marked}])\ndef test_marked(x): pass"
    )
    result = pytester.runpytest("-p", "distmp.testing.pytest_plugin")
    result.assert_outcomes(failed=1)
    assert "args=(0,), kwargs={}): write" in result.stdout.str()
