"""The pages on accumulation agree with the code and the results."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import ROOT
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "accumulation.md").read_text()


def example() -> list[Tensor]:
    """Run the page's example; return the weights that it has trained."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "accumulation.md", "exec"), names)
    return [parameter.detach() for parameter in names["model"].parameters()]


def test_example_runs_on_one_and_two_ranks() -> None:
    (alone,) = run_ranks(example, 1, initialize=False)
    first, second = run_ranks(example, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], alone[0])
