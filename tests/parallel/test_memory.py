"""The arithmetic of the predicted memory."""

from __future__ import annotations

from typing import Any

import pytest

from distmp.parallel.memory import UNIT_BYTES, ModelMemory
from distmp.parallel.settings import AccumulationSettings, ShardingConfig

MEMORY = ModelMemory(
    parameters=2_000,
    stepped=4_000,
    masters=4_000,
    optimizer_state=8_000,
    average=0,
    gradients=4_000,
    root=200,
    root_elements=100,
    block_elements=50,
    largest_parameter=30,
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2_000 + 12_000 + 4_000),
        # A second set: the microbatch that may be dropped.
        ({"on_nonfinite": "drop_microbatch"}, 2_000 + 12_000 + 8_000),
        # Partial sums of a binary tree over 8 microbatches.
        ({"reproducible": True}, 2_000 + 12_000 + 4 * 4_000),
        # A bucket, sent and received.
        ({"shard_optimizer": True}, 2_000 + 3_000 + 4_000 + 2 * 4_000),
    ],
)
def test_a_replica(settings: dict[str, Any], expected: int) -> None:
    assert MEMORY.replicated(AccumulationSettings(**settings), 4, 8) == expected


END = UNIT_BYTES * 100


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3_000 + 200 + 1_000 + END),
        ({"reshard_after_forward": False}, 3_000 + 2_000 + 1_000 + END),
        ({"accumulate": "unsharded"}, 3_000 + 200 + 5_000 + END),
        ({"offload": True}, 200 + END),
    ],
)
def test_a_shard(settings: dict[str, Any], expected: int) -> None:
    assert MEMORY.sharded(ShardingConfig(**settings), 4, 8) == expected


def test_an_average_is_sharded_as_the_weights() -> None:
    averaged = MEMORY._replace(average=4_000)

    def replica(**settings: bool) -> int:
        options = AccumulationSettings(**settings)
        return averaged.replicated(options, 4, 8) - MEMORY.replicated(options, 4, 8)

    def shard(**settings: bool) -> int:
        options = ShardingConfig(**settings)
        return averaged.sharded(options, 4, 8) - MEMORY.sharded(options, 4, 8)

    assert (replica(), replica(shard_optimizer=True)) == (4_000, 1_000)
    assert (shard(), shard(offload=True)) == (1_000, 0)


def test_one_microbatch_needs_no_gradients_at_the_start_of_backward() -> None:
    large = MEMORY._replace(block_elements=1_000)
    start = 4 * 100 + UNIT_BYTES * 1_000
    assert large.sharded(ShardingConfig(), 4, 8) == 3_000 + 200 + 1_000 + start
    tiny = large._replace(gradients=0)
    assert tiny.sharded(ShardingConfig(), 4, 1) == 3_000 + 200 + start
