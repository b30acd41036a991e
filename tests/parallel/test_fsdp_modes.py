from __future__ import annotations

from typing import Any

import pytest

from distmp.parallel import ParallelConfig
from distmp.parallel.settings import ShardingConfig
from tests.parallel.test_replicated import SIZES, train_rank
from tests.ranks import run_ranks
from tests.training import ONE_RANK, TWO_RANKS, error, plain_training


def several(steps: int, sizes: Any, options: list[dict[str, Any]]) -> list[Any]:
    return [train_rank(steps, sizes, each) for each in options]


def sharding(**settings: Any) -> dict[str, Any]:
    return {"parallel": ParallelConfig(sharding=ShardingConfig(**settings))}


# Two microbatches on each of four ranks.
FOUR_BY_TWO = (
    ((2, 1), (3, 2), (1, 0), (4, 3)),
    ((5, 3), (1, 0), (0, 0), (0, 0)),
    ((1, 1), (1, 1), (3, 3), (2, 2)),
    ((0, 0), (5, 4), (1, 2), (0, 1)),
)


def test_every_way_to_accumulate_equals_plain_torch() -> None:
    options = [
        {"strategy": "hsdp", "max_norm": 1.3, **sharding(shard_size=2, accumulate=place)}
        for place in ("sharded", "unsharded", "hybrid", "auto")
    ] + [
        {"strategy": "fsdp", "max_norm": 1.3, **sharding(accumulate=place)}
        for place in ("sharded", "unsharded")
    ]
    options.append({"strategy": "fsdp1", "max_norm": 1.3})
    expected, losses_and_norms = plain_training(8, ONE_RANK, max_norm=1.3)
    results = run_ranks(several, 4, 8, FOUR_BY_TWO, options)
    for rank in results:
        for numbers, found, state in rank:
            print(error(found, expected))
            assert error(found, expected) < 1e-5
            assert [(step.loss, step.grad_norm) for step in numbers] == [
                (pytest.approx(loss, rel=3e-6), pytest.approx(norm, rel=3e-6))
                for loss, norm in losses_and_norms
            ]
