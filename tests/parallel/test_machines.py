"""Training on several machines sums gradients inside machines first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distmp.precision import PrecisionPolicy
from tests.machines import AllToAllTraffic, pretend
from tests.parallel.sharding import FOUR_BY_TWO, sharded
from tests.parallel.test_reproducible import digests
from tests.ranks import run_ranks
from tests.reference import ONE_RANK, error, make_engine, plain_training, train, weights

REDUCED_IN_BF16 = PrecisionPolicy(
    "16 in communication", compute_dtype=torch.float32, reduce_dtype=torch.bfloat16
)
OPTIONS: list[dict[str, Any]] = [
    {"strategy": "ddp", "policy": REDUCED_IN_BF16},
    {"strategy": "ddp", "policy": "fp32", "shard_optimizer": True},
    *(
        {**sharded(strategy, **settings), "policy": policy}
        for strategy, settings in (
            ("fsdp", {"accumulate": "sharded"}),
            ("hsdp", {"shard_size": 4}),
        )
        for policy in ("fp32", REDUCED_IN_BF16)
    ),
]


def trained_on_machines(local: int) -> list[tuple[dict[str, Tensor], int, int]]:
    """Return weights, and the bytes that were sent inside a machine and to the other one."""
    pretend(local)
    found = []
    for options in OPTIONS:
        engine = make_engine(**options)
        with AllToAllTraffic(2) as traffic:
            train(engine, 3, FOUR_BY_TWO)
        found.append((weights(engine), traffic.inside, traffic.across))
    return found


def test_every_strategy_equals_plain_torch_and_sends_less_between_machines() -> None:
    """The shards of the model are uneven: its dimensions are not multiples of four."""
    (two, *_), (one, *_) = (run_ranks(trained_on_machines, 4, local) for local in (2, 4))
    expected, _ = plain_training(3, ONE_RANK)
    for options, (found, inside, across), flat in zip(OPTIONS, two, one, strict=True):
        exact = options["policy"] == "fp32"
        assert error(found, expected) < (1e-5 if exact else 5e-3), options
        assert error(found, flat[0]) < (1e-5 if exact else 5e-3), options
        assert across > 0
        assert across == pytest.approx(flat[2] / 2)
        assert inside + across == pytest.approx(flat[1] + flat[2])


def reproducible_on_machines(local: int, sharded: bool) -> tuple[dict[str, str], int]:
    pretend(local)
    with AllToAllTraffic(2) as traffic:
        found = digests(["fp32"], {"reproducible": True, "shard_optimizer": sharded}, steps=12)
    return found, traffic.across


@pytest.mark.nightly
@pytest.mark.parametrize("sharded", [False, True])
def test_reproducible_bits_do_not_depend_on_machines(sharded: bool) -> None:
    (two, across), *_ = run_ranks(reproducible_on_machines, 4, 2, sharded)
    (one, flat), *_ = run_ranks(reproducible_on_machines, 4, 4, sharded)
    (alone, _), *_ = run_ranks(reproducible_on_machines, 1, 1, sharded)
    assert two == one == alone
    assert across == pytest.approx(flat / 2)
