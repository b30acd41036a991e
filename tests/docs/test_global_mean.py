"""The examples of the page on the global mean run, and its figures are measured."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import distmp
from benchmarks.figures import ROOT
from distmp.parallel.matrices import apply_reduce_dtype
from tests.parallel import test_global_mean as cases
from tests.parallel import test_tensor_parallel
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "global-mean.md").read_text()
# The model, data and reference of the lab.
LAB = (ROOT / "examples" / "labs" / "03_mean_of_means.py").read_text().partition("# ## The loop")[0]
TOKENS = ast.literal_eval(re.findall(r"^TOKENS = (.*)$", LAB, re.MULTILINE)[0])


def example() -> list[Tensor]:
    """Run the example with tensor parallelism; return the weights that it has trained."""
    (imports,) = re.findall(r"```python\n(.*?)\n\n\ndef ", PAGE, flags=re.DOTALL)
    (block,) = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(f"{imports}\n{block}", "global-mean.md", "exec"), names)
    assert not names["scaler"].step_skipped
    return [parameter.detach().full_tensor() for parameter in names["model"].parameters()]


def test_example_trains_equal_weights_on_all_ranks() -> None:
    first, *others = run_ranks(example, 4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def errors() -> tuple[float, float]:
    """Return the error of the gradient of a mean of means, and that with `global_mean`."""
    lab: dict[str, Any] = {}
    exec(compile(LAB, "lab", "exec"), lab)
    wrapped = DistributedDataParallel(lab["build"]())
    own = lab["microbatches"](dist.get_rank())
    found = []
    for uses_global_mean in (False, True):
        wrapped.zero_grad()
        for index, (inputs, labels) in enumerate(own):
            with cases.unsynchronized(wrapped, last=index == len(own) - 1):
                loss = cross_entropy(wrapped(inputs), labels, reduction="sum")
                if uses_global_mean:
                    tokens = sum(TOKENS[dist.get_rank()])
                    loss = distmp.global_mean(loss, tokens, wrapped, microbatches=len(own))
                else:
                    loss = loss / len(labels) / len(own)
                loss.backward()
        error = lab["flat_gradient"](wrapped) - lab["expected"]
        found.append(float(error.norm() / lab["expected"].norm()))
    return found[0], found[1]


def test_error_of_mean_of_means_agrees_with_page() -> None:
    page = " ".join(PAGE.split())
    for (first, second), text in zip(
        TOKENS, ("{} and {} tokens on one", "{} and {} on another"), strict=True
    ):
        assert text.format(first, second) in page
    assert f"over all {sum(map(sum, TOKENS))} tokens" in page
    (percent,) = re.findall(r"has an error of ([\d.]+)%", page)
    for mean_of_means, ours in run_ranks(errors, 2):
        assert f"{100 * mean_of_means:.1f}" == percent
        assert ours < 1e-6
    assert "With `global_mean` the error is below 1e-6" in page


def tensor_parallel_errors() -> tuple[float, float]:
    step = test_tensor_parallel.sharded()
    before = test_tensor_parallel.gradient_error(*step)
    apply_reduce_dtype(step[0])
    return before, test_tensor_parallel.gradient_error(*step)


def test_error_of_tensor_parallel_reductions_agrees_with_page() -> None:
    (before, after) = re.findall(r"falls from (\S+) to below (\S+),", " ".join(PAGE.split()))[0]
    for found_before, found_after in run_ranks(tensor_parallel_errors, 4):
        assert found_before == pytest.approx(float(before), rel=0.2)  # kernels round differently
        assert found_after < float(after)
