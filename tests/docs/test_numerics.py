"""The page on the arithmetic agrees with the code; test_blocks.py runs its Python blocks."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.figures import ROOT
from distmp.scaling.settings import LossScaleConfig
from distmp.scaling.step_decision import CLIP_EPSILON, local_stats

PAGE = (ROOT / "docs" / "numerics.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats_table_agrees_with_torch(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    name = str(dtype).removeprefix("torch.")
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    bits = round(-torch.tensor(limits.eps, dtype=torch.float64).log2().item())
    # Rounding is off by half of the last bit at most.
    numbers = (limits.tiny, limits.max, limits.eps / 2)
    assert row == f"| {name} | {bits} | " + " | ".join(f"{x:.1e}" for x in numbers) + " |"


def test_every_code_block_asserts() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert all("assert " in block for block in blocks)


def test_step_decision_and_scale_numbers_agree() -> None:
    rules = LossScaleConfig()
    assert f"starts at 2^{int(rules.init).bit_length() - 1}," in PAGE
    assert f"doubles after {rules.growth_interval:,} clean steps" in PAGE
    assert (rules.growth_factor, rules.backoff_factor) == (2, 0.5)
    assert f"max_norm / (|g| + {CLIP_EPSILON:.0e}))".replace("e-06", "e-6") in PAGE
    numbers = local_stats(
        [], [torch.zeros(())], [torch.zeros(())], stop=False, device=torch.device("cpu")
    )
    words = {5: "five", 6: "six", 7: "seven"}
    assert f"One all-reduce of {words[numbers.numel()]} FP64 numbers" in PAGE
