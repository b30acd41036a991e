"""The examples of the page on the global mean run, and its figures are measured."""

from __future__ import annotations

import copy
import re
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import distmp
from benchmarks.figures import ROOT
from distmp.parallel.matrices import apply_reduce_dtype
from tests.parallel import test_global_mean as cases
from tests.parallel import test_tensor_parallel
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "global-mean.md").read_text()
TOKENS = MappingProxyType({0: (60, 12), 1: (48, 20)})


def example() -> list[Tensor]:
    """Run the example with tensor parallelism; return the weights that it has trained."""
    (imports,) = re.findall(r"```python\n(.*?)\n\nmodel", PAGE, flags=re.DOTALL)
    (block,) = re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(f"{imports}\n{block}", "global-mean.md", "exec"), names)
    assert not names["scaler"].step_skipped
    return [parameter.detach().full_tensor() for parameter in names["model"].parameters()]


def test_example_trains_equal_weights_on_all_ranks() -> None:
    first, *others = run_ranks(example, 4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def microbatches(rank: int) -> list[cases.Microbatch]:
    """Return microbatches of one sequence without padding."""
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(cases.VOCABULARY, (2, 1, n), generator=generator) for n in TOKENS[rank]]
    return [cases.Microbatch(*row) for row in rows]


def errors() -> tuple[float, float]:
    """Return the error of the gradient of a mean of means, and that with `global_mean`."""
    torch.manual_seed(0)
    model = cases.Model()
    double = copy.deepcopy(model).double()
    _, expected = cases.reference(double, [microbatches(rank) for rank in TOKENS])
    wrapped = DistributedDataParallel(model)
    own = microbatches(dist.get_rank())
    found = []
    for uses_global_mean in (False, True):
        wrapped.zero_grad()
        for index, batch in enumerate(own):
            with cases.unsynchronized(wrapped, last=index == len(own) - 1):
                loss = cases.loss_sum(wrapped, batch)
                if uses_global_mean:
                    tokens = sum(TOKENS[dist.get_rank()])
                    loss = distmp.global_mean(loss, tokens, wrapped, microbatches=len(own))
                else:
                    loss = loss / batch.weight / len(own)
                loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        found.append(cases.relative_error(gradients, expected))
    return found[0], found[1]


def test_error_of_mean_of_means_agrees_with_page() -> None:
    page = " ".join(PAGE.split())
    for (first, second), text in zip(
        TOKENS.values(), ("{} and {} tokens on one", "{} and {} on another"), strict=True
    ):
        assert text.format(first, second) in page
    assert f"over all {sum(map(sum, TOKENS.values()))} tokens" in page
    (percent,) = re.findall(r"has an error of (\d+)%", page)
    for mean_of_means, ours in run_ranks(errors, 2):
        assert round(100 * mean_of_means) == int(percent)
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
