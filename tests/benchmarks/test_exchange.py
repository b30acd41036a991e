"""The costs of an exchange of gradients, on one of many simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.exchange import RANKS_PER_MACHINE, count
from tests.commands.explain.runs import policy, run

IN_16_BITS = {"precision": policy("bf16,reduce=bf16")}


def at(ranks: int, settings: dict[str, Any]) -> Any:
    return run(**settings, batch={"global_batch_size": ranks, "microbatch_size": 1})


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sums_cost_the_same_at_any_number_of_ranks(strategy: str) -> None:
    settings = {**IN_16_BITS, "strategy": strategy}
    few, many = (count(at(ranks, settings), ranks) for ranks in (64, 512))
    assert many["launches_of_sums"] == few["launches_of_sums"]
    assert many["launches"] <= 1.01 * few["launches"]
    # Reads 2 bytes, and 2 from each machine; writes the sums in FP32.
    assert many["memory"] <= few["memory"] < 2.9
    for ranks, found in ((64, few), (512, many)):
        ring = 4 * (ranks - 1) / ranks / RANKS_PER_MACHINE
        assert found["network"] < ring / 2


@pytest.fixture
def _flags() -> Iterator[None]:
    """Restore what `reproducible` sets for the rest of a process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.nightly
@pytest.mark.usefixtures("_flags")
def test_reproducible_sums_take_a_launch_for_each_level_of_the_tree() -> None:
    settings = {"strategy": "ddp", "reproducible": True}
    few, many = (count(at(ranks, settings), ranks) for ranks in (64, 512))
    assert many["launches_of_sums"] / few["launches_of_sums"] == 9 / 6
    assert many["network"] == pytest.approx(4 * 63 / 64 / 8)
