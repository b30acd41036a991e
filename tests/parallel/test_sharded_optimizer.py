from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint import saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.engine import rank_consistency
from distmp.errors import ConfigError
from tests.checkpoint import listing
from tests.marks import nightly
from tests.ranks import run_ranks
from tests.reference import (
    FOUR_RANKS,
    ONE_RANK,
    TWO_RANKS,
    assert_same_bits,
    error,
    foreach_adamw,
    fused_adagrad,
    fused_adamw,
    fused_sgd,
    make_engine,
    snapshot,
    train,
    weights,
)

SIZES = {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}
OPTIMIZERS = (fused_adamw, foreach_adamw, fused_sgd, fused_adagrad)
SHARDED = {"strategy": "ddp", "shard_optimizer": True, "max_norm": 1.3}


def by_dimension(parameters: Any) -> torch.optim.Optimizer:
    """Decay matrices only, as most recipes do."""
    groups = [
        {"params": [entry for entry in parameters if entry[1].dim() >= 2], "weight_decay": 0.3},
        {"params": [entry for entry in parameters if entry[1].dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def compare_with_replicated() -> None:
    """Train with a sharded and a full optimizer; all ranks end with the same weights."""
    world_size = dist.get_world_size()
    sizes = SIZES[world_size]
    for policy in ("fp32", "bf16"):
        for optimizer in (*OPTIMIZERS, by_dimension):
            options: dict[str, Any] = {"policy": policy, "optimizer": optimizer}
            sharded = make_engine(**SHARDED, **options)
            plain = make_engine(strategy="ddp", max_norm=1.3, **options)
            losses = [[step.loss for step in train(one, 6, sizes)] for one in (sharded, plain)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
            assert error(weights(sharded), weights(plain)) < 1e-5
            parameters = dict(plain.module.named_parameters())
            for name, parameter in sharded.module.named_parameters():
                assert parameter.dtype == parameters[name].dtype
                torch.testing.assert_close(parameter, parameters[name], rtol=1e-2, atol=1e-5)
            # The parameters of the module are the same on all ranks.
            rank_consistency.check(sharded)
            check_shards(sharded, world_size)


def check_shards(engine: Any, world_size: int) -> None:
    """Each rank steps about 1/ranks of all elements, and has optimizer state for these only."""
    total = sum(parameter.numel() for parameter in engine.module.parameters())
    held = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    counted = torch.tensor(held)
    dist.all_reduce(counted)
    assert int(counted) == total
    for state in engine.optimizer.state.values():
        for value in state.values():
            assert value.dim() <= 1
    assert held < total / world_size + 200


@pytest.mark.parametrize("world_size", [2, nightly(4)])
def test_sharded_optimizer_equals_unsharded_one(world_size: int) -> None:
    run_ranks(compare_with_replicated, world_size)


# Checkpoints


def save_after(steps: int, directory: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train and save, train as many steps again; return the final state."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    engine = make_engine(**options)
    train(engine, steps, SIZES[world_size])
    saving.save(directory, steps, engine.state_dict(), {}, keep=1)
    train(engine, steps, SIZES[world_size], first=steps)
    return snapshot(engine)


def load_and_train(steps: int, checkpoint: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    engine = make_engine(**options)
    engine.prepare_to_load(StoredCheckpoint(checkpoint).tensors)
    state = engine.state_dict()
    StoredCheckpoint(checkpoint).load(state)
    engine.load_state_dict(state)
    train(engine, steps, SIZES[world_size], first=steps)
    return snapshot(engine)


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    if world_size == 1:
        return function(*args)
    return run_ranks(function, world_size, *args)[0]


@pytest.mark.parametrize("policy", [nightly("fp32"), nightly("bf16")])
def test_checkpoints_load_on_other_ranks(policy: str, tmp_path: Path) -> None:
    sharded = {**SHARDED, "policy": policy}
    whole = {"policy": policy, "max_norm": 1.3}
    ways = [(2, sharded), (4, sharded), (2, whole), (1, whole)]
    for number, (world_size, options) in enumerate(ways[:3]):
        directory = tmp_path / str(number)
        expected = on_ranks(world_size, save_after, 4, directory, options)
        checkpoint = listing.latest(directory)
        for other_size, other in ways:
            found = on_ranks(other_size, load_and_train, 4, checkpoint, other)
            if (other_size, other) == (world_size, options):
                assert_same_bits(found, expected)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                # In 16 bits gradients depend on the order of additions, and so do the weights.
                tolerance = 1e-4 if policy == "fp32" else 2e-2
                torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def test_one_rank_has_nothing_to_shard() -> None:
    engine = make_engine(shard_optimizer=True)
    reference = make_engine()
    for one in (engine, reference):
        train(one, 3, ONE_RANK)
    assert_same_bits(snapshot(engine), snapshot(reference))


def refuse_with_fsdp() -> None:
    for options, setting in (
        ({"shard_optimizer": True}, "shard_optimizer"),
        ({"reproducible": True}, "reproducible"),
        ({"on_nonfinite": "drop_microbatch"}, "precision.on_nonfinite"),
    ):
        with pytest.raises(ConfigError, match=rf"{setting}.*needs strategy single or ddp"):
            make_engine(strategy="fsdp", **options)
    torch.use_deterministic_algorithms(False)


def test_fsdp_refuses_what_only_buckets_do() -> None:
    run_ranks(refuse_with_fsdp, 2)
