from __future__ import annotations

import doctest
import inspect
import io
import subprocess
import sys

import pytest
import torch

import distmp
from distmp.distributed.world import leave
from tests.torchrun import environment, python

HEAVY = (
    "accelerate",
    "matplotlib",
    "rich",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tyro",
)


def test_public_names_exist() -> None:
    assert sorted(distmp.__all__) == distmp.__all__
    assert all(hasattr(distmp, name) for name in distmp.__all__)
    assert (
        sorted(name for names in distmp._PUBLIC_NAMES.values() for name in names) == distmp.__all__
    )
    with pytest.raises(AttributeError, match="module 'distmp' has no attribute 'engines'"):
        _ = distmp.engines


@pytest.mark.parametrize("name", distmp.__all__)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    public = getattr(distmp, name)
    module = inspect.getmodule(public)
    assert module is not None
    finder = doctest.DocTestFinder(recurse=False)
    (examples,) = finder.find(public, name, module, extraglobs={"torch": torch})
    assert examples.examples
    output = io.StringIO()
    failed, _ = doctest.DocTestRunner().run(examples, out=output.write)
    leave()  # forgets the arguments of `distmp.init`
    assert not failed, output.getvalue()


def test_importing_brings_nothing_heavy_that_torch_has_not_brought() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import distmp;"
        f"print([name for name in {HEAVY!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_importing_waits_for_torch_until_something_is_used() -> None:
    program = (
        "import sys, distmp; assert 'torch' not in sys.modules;"
        "print(distmp.parallel.ParallelConfig.__name__, distmp.policy('fp32').name)"
    )
    done = subprocess.run(python("-c", program), env=environment(), capture_output=True, text=True)
    assert done.stdout == "ParallelConfig fp32\n", done.stderr
