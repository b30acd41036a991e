"""What the page on migrating calls *after* runs, alone and on two ranks."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.figures import ROOT
from tests.ranks import ranks

PAGE = (ROOT / "docs" / "migrating.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(block: str) -> None:
    torch.manual_seed(0)
    exec(compile(block, "docs/migrating.md", "exec"), {"__name__": "block"})


def test_the_page_has_a_block_for_each_way() -> None:
    assert len(BLOCKS) == 6
    assert PAGE.count("\nBefore:\n") == 5


@pytest.mark.parametrize("block", [b for b in BLOCKS if "accelerate" not in b])
def test_a_block_runs_alone(block: str) -> None:
    run(block)


@ranks(2)
def test_all_blocks_run_on_two_ranks() -> None:
    for block in BLOCKS:
        run(block)
