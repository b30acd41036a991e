"""The engine on GPUs: one rank over NCCL, where no step makes the host wait, and two ranks.

NCCL refuses two ranks on one GPU; gloo carries their tensors through host memory, and waits.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import lr_scheduler

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.settings import CheckpointConfig
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import World, join
from distmp.training.components import restore
from tests.engine.launches import POLICIES
from tests.parallel.sharding import sharded
from tests.ranks import ranks
from tests.recording import no_waiting
from tests.reference import (
    ONE_RANK,
    TWO_RANKS,
    Batch,
    assert_same_bits,
    error,
    make_engine,
    microbatches,
    plain_training,
    samples,
    snapshot,
    train,
    trained,
    weights,
)

pytestmark = pytest.mark.gpu

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp, reduced once": sharded("fsdp", accumulate="unsharded"),
    "fsdp, reduced every microbatch": sharded("fsdp", accumulate="sharded"),
    "hsdp": sharded("hsdp", shard_size=1, accumulate="hybrid"),
}
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "ddp, sharded optimizer": {"strategy": "ddp", "shard_optimizer": True},
}
TWO_MICROBATCHES = (((3, 5),),)


def with_policies(strategies: dict[str, Any]) -> Iterable[tuple[tuple[str, Any], str]]:
    """Pair strategies with policies; fake devices, which replay each operation, take each once."""
    if "FAKE_CUDA_DEVICES" in os.environ:
        return zip(strategies.items(), itertools.cycle(POLICIES), strict=False)
    return itertools.product(strategies.items(), POLICIES)


def alone_over_nccl() -> World:
    """Join as the only rank of a run, like torchrun."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    world = join(RankEnvironment(), timeout_seconds=60)
    assert "cuda:nccl" in dist.get_backend_config(world.group)
    return world


def beside_another_rank() -> World:
    return World.current("cuda")


def on_the_gpu(batches: Sequence[Batch]) -> list[Batch]:
    return [
        batch._replace(inputs=batch.inputs.cuda(), labels=batch.labels.cuda()) for batch in batches
    ]


def on_the_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in state.items()}


@ranks(1, timeout=250, initialize=False)
def test_no_host_wait_in_a_steady_step_over_nccl() -> None:
    world = alone_over_nccl()
    for (name, options), policy in with_policies(STRATEGIES):
        engine = make_engine(
            device=world.device,
            policy=policy,
            max_norm=1.0,
            schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
            **options,
        )
        train(engine, 2, TWO_MICROBATCHES)
        batches = on_the_gpu(microbatches(2, TWO_MICROBATCHES[0]))
        with no_waiting():
            outcomes = [engine.step(batches) for _ in range(2)]
        applied = [outcome.numbers.applied_total for outcome in outcomes]
        assert applied == [3, 4], (name, policy)


def test_synchronization_over_nccl_is_detected() -> None:
    value = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        value.item()


@ranks(1, timeout=250, initialize=False)
def test_one_rank_over_nccl_equals_plain_torch() -> None:
    world = alone_over_nccl()
    check_against_plain_torch(world, ONE_RANK, STRATEGIES)


@ranks(2, timeout=250, cuda=True)
def test_two_ranks_equal_plain_torch() -> None:
    check_against_plain_torch(beside_another_rank(), TWO_RANKS, ON_TWO_RANKS)


def check_against_plain_torch(world: World, sizes: Any, strategies: dict[str, Any]) -> None:
    expected, losses_and_norms = plain_training(4, ONE_RANK, max_norm=1.3)
    for name, options in strategies.items():
        engine = make_engine(device=world.device, max_norm=1.3, **options)
        numbers = train(engine, 4, sizes)
        assert error(on_the_host(weights(engine)), expected) < 1e-4, name
        for step, (loss, norm) in zip(numbers, losses_and_norms, strict=True):
            assert (step.loss, step.grad_norm) == pytest.approx((loss, norm), rel=1e-4), name


@ranks(2, timeout=250, cuda=True)
def test_sixteen_bits_on_two_ranks_stay_close() -> None:
    world = beside_another_rank()
    expected = [mean for mean, _ in plain_training(2, ONE_RANK)[1]]
    for (name, options), policy in with_policies(ON_TWO_RANKS):
        engine = make_engine(device=world.device, policy=policy, **options)
        found = [step.loss for step in train(engine, 2, TWO_RANKS)]
        assert found == pytest.approx(expected, rel=0.02), (name, policy)


@ranks(2, timeout=250, cuda=True)
def test_an_overflow_on_one_rank_skips_both() -> None:
    world = beside_another_rank()
    for name, options in ON_TWO_RANKS.items():
        engine = make_engine(device=world.device, policy="fp16", **options)
        train(engine, 1, TWO_RANKS)
        before = trained(snapshot(engine))
        batches = microbatches(2, TWO_RANKS[2], world.rank)
        if world.rank == 1:
            batches[0] = batches[0]._replace(factor=float("inf"))
        numbers = engine.step(batches).numbers
        assert (numbers.overflow, numbers.skipped) == (True, True), name
        assert_same_bits(trained(snapshot(engine)), before)
        assert not train(engine, 1, TWO_RANKS, first=3)[0].skipped, name


@ranks(1, timeout=250, initialize=False)
def test_a_checkpoint_over_nccl_continues_bit_by_bit(tmp_path: Path) -> None:
    world = alone_over_nccl()
    for name, options in STRATEGIES.items():
        check_resuming(world, ONE_RANK, options, tmp_path / name)


@ranks(2, timeout=250, cuda=True)
def test_a_checkpoint_of_two_ranks_continues_bit_by_bit(tmp_path: Path) -> None:
    world = beside_another_rank()
    for name, options in ON_TWO_RANKS.items():
        check_resuming(world, TWO_RANKS, options, tmp_path / name)


def check_resuming(world: World, sizes: Any, options: dict[str, Any], directory: Path) -> None:
    engine, resumed = (
        make_engine(device=world.device, policy="fp16", max_norm=1.0, **options) for _ in range(2)
    )
    writer = CheckpointWriter(
        CheckpointConfig(), directory, world, timeout_seconds=60, log=pytest.fail
    )
    with writer as saving:
        saving.guard(engine.optimizer)
        train(engine, 2, sizes)
        progress = {"step": 2, "samples": 32}
        saving.save(2, engine.state_dict(), progress, engine.updated_by_optimizer())
        train(engine, 2, sizes, first=2)
    restored = restore(resumed, StoredCheckpoint(directory / "step-000002"))
    assert dataclasses.asdict(restored).items() >= progress.items()
    train(resumed, 2, sizes, first=2)
    assert_same_bits(snapshot(resumed), snapshot(engine))


def test_a_loss_on_the_cpu_is_evaluated_as_it_is_trained() -> None:
    def on_cpu(module: torch.nn.Module, batch: Batch) -> tuple[Tensor, int]:
        outputs = module(batch.inputs)
        return outputs.float().square().sum().cpu(), len(batch.labels)

    engine = make_engine(device="cuda", loss=on_cpu)
    batch = samples(0, 8)
    evaluated = engine.evaluate([batch])
    assert engine.step([batch]).numbers.loss == pytest.approx(evaluated)
