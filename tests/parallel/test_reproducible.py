from __future__ import annotations

import contextlib
import hashlib
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.commands.calibrate import command as calibrate
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.config import RunConfig
from distmp.distributed import world
from distmp.distributed.rank_environment import RankEnvironment
from distmp.engine import setup
from distmp.engine.engine import Engine
from distmp.errors import ConfigError, TrainingError
from distmp.parallel.reproducible import CUBLAS_VARIABLE, make_deterministic, prepare_cublas
from distmp.scaling.settings import LossScaleConfig
from distmp.training import train_as_rank
from distmp.training.restarts import Restarts
from tests.ranks import ranks, run_ranks
from tests.reference import (
    INPUTS,
    Batch,
    assert_same_bits,
    fused_adamw,
    loss,
    make_model,
    samples,
    sgd,
    snapshot,
)

LEAVES = (3, 5, 1, 7, 8, 0, 2, 2)
"""Number of samples of each microbatch of the global batch; neighbors differ."""

# The loss scale grows nine steps after the overflow.
STEPS = 13
OVERFLOW_AT = 2

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"policy": "fp32"},
    "bf16": {"policy": "bf16"},
    "fp16": {"policy": "fp16", "loss_scale": LossScaleConfig(init=2.0**12, growth_interval=9)},
    "unfused": {"policy": "fp32", "optimizer": sgd},
}


class Dropping(nn.Module):
    """A classifier with random numbers and a buffer, which must not depend on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = make_model()
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("average", torch.zeros(INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().sum(0))
        noise = 0.1 * np.random.rand() + 0.1 * random.random()
        return self.classifier(self.dropout(x) + noise + 0.1 * self.average.to(x.dtype))


def generators() -> list[Any]:
    """Return the states of the default generators."""
    _, keys, *position = np.random.get_state()
    return [torch.get_rng_state().tolist(), keys.tolist(), position, random.getstate()]


def step_batches(step: int, rank: int, world_size: int) -> list[Batch]:
    """Return the microbatches of a step on this rank."""
    whole = samples(step, sum(LEAVES))
    batches = [
        Batch(*part, float("inf") if step == OVERFLOW_AT and leaf == 3 else 1.0)
        for leaf, part in enumerate(
            zip(whole.inputs.split(LEAVES), whole.labels.split(LEAVES), strict=True)
        )
    ]
    each = len(LEAVES) // world_size
    return batches[rank * each : (rank + 1) * each]


def digests(
    kinds: list[str], options: dict[str, Any], steps: int = STEPS, device: str = "cpu"
) -> dict[str, str]:
    """Train each variant; return SHA-256 of weights, masters, moments, counts and losses."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    found = {}
    for kind in kinds:
        torch.manual_seed(3)
        engine = Engine(
            Dropping(),
            loss,
            **{"optimizer": fused_adamw, **KINDS[kind], **options},
            max_norm=0.7,
            device=device,
        )
        digest = hashlib.sha256()
        skipped = 0
        before = generators()
        for step in range(steps):
            numbers = engine.step(step_batches(step, rank, world_size)).numbers
            digest.update(repr((numbers.loss, numbers.grad_norm, numbers.weight)).encode())
            skipped = numbers.skipped_total
        assert skipped >= (steps > OVERFLOW_AT)
        assert generators() == before
        state = {**snapshot(engine), **dict(engine.module.named_parameters())}
        for name, tensor in sorted(state.items()):
            digest.update(name.encode() + tensor.detach().cpu().double().numpy().tobytes())
        found[kind] = digest.hexdigest()
    torch.use_deterministic_algorithms(False)
    return found


def on_ranks(world_size: int, *args: Any) -> dict[str, str]:
    cuda = "cuda" in args
    if world_size == 1 and not cuda:
        return digests(*args)
    # On CUDA one rank needs a new process too: an environment variable makes cuBLAS deterministic.
    results = run_ranks(digests, world_size, *args, timeout=180, cuda=cuda)
    assert all(result == results[0] for result in results)
    return results[0]


def test_the_same_bits_at_every_number_of_ranks() -> None:
    kinds = list(KINDS)
    expected = on_ranks(1, kinds, {"reproducible": True})
    assert len(set(expected.values())) == len(kinds)
    for world_size in (2, 4):
        for found in run_ranks(plain_and_sharded, world_size, kinds, timeout=110):
            assert found == [expected, expected]


@pytest.mark.nightly
def test_the_same_bits_on_eight_ranks() -> None:
    few = 5
    assert on_ranks(8, ["fp32"], {"reproducible": True}, few) == on_ranks(
        1, ["fp32"], {"reproducible": True}, few
    )


def continue_to(step: int, seed: int, directory: Path) -> dict[str, Tensor]:
    """Continue from the checkpoint in a directory, if any, in a process with any seed."""
    torch.manual_seed(seed)
    engine = Engine(Dropping(), loss, fused_adamw, policy="fp32", reproducible=True, device="cpu")
    for done in range(engine.load(directory, missing_ok=True)["step"], step):
        engine.step(step_batches(done, engine.world.rank, engine.world.world_size))
    engine.save(directory)
    return snapshot(engine)


@pytest.mark.nightly
def test_the_same_bits_after_continuing_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    (expected,) = run_ranks(continue_to, 1, 20, 0, tmp_path / "stayed")
    for seed, (world_size, step) in enumerate(((2, 7), (4, 14), (1, 20))):
        found = run_ranks(continue_to, world_size, step, seed, tmp_path / "moved")
    assert_same_bits(found[0], expected)


def test_default_mode_is_not_reproducible() -> None:
    found = {world_size: on_ranks(world_size, ["fp32"], {}, 5)["fp32"] for world_size in (1, 2, 4)}
    assert len(set(found.values())) == 3


def plain_and_sharded(kinds: list[str]) -> list[dict[str, str]]:
    return [
        digests(kinds, {"reproducible": True, "shard_optimizer": sharded})
        for sharded in (False, True)
    ]


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu() -> None:
    kinds = ["fp32", "bf16", "fp16"]
    options = {"reproducible": True}
    steps = OVERFLOW_AT + 2
    expected = on_ranks(1, kinds, options, steps, "cuda")
    assert on_ranks(2, kinds, options, steps, "cuda") == expected
    assert on_ranks(2, kinds, {**options, "shard_optimizer": True}, steps, "cuda") == expected


# The workspace of cuBLAS


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Report a GPU that this process has not used, and remove the variable of cuBLAS."""
    monkeypatch.setenv(CUBLAS_VARIABLE, "")
    monkeypatch.delenv(CUBLAS_VARIABLE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return monkeypatch


class JoinedError(Exception):
    """Raised instead of joining the other ranks, which initializes CUDA."""


def variable_at_join(cublas: pytest.MonkeyPatch, **options: Any) -> str | None:
    """Return the variable's value when an engine starts to use the GPU."""
    found = []

    def joining(_: Any) -> None:
        found.append(os.environ.get(CUBLAS_VARIABLE))
        raise JoinedError

    cublas.setattr(setup, "world_of_process", joining)
    with pytest.raises(JoinedError):
        Engine(make_model(), loss, fused_adamw, **options)
    return found[0]


def test_an_engine_prepares_cublas_before_it_uses_the_gpu(cublas: pytest.MonkeyPatch) -> None:
    assert variable_at_join(cublas) is None
    assert variable_at_join(cublas, reproducible=True, device="cpu") is None
    assert variable_at_join(cublas, reproducible=True) == ":4096:8"
    cublas.setenv(CUBLAS_VARIABLE, ":16:8")
    assert variable_at_join(cublas, reproducible=True, device="cuda") == ":16:8"


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_run_prepares_cublas_before_it_uses_the_gpu(
    reproducible: bool, cublas: pytest.MonkeyPatch
) -> None:
    found = []

    def joining(*_: Any, **__: Any) -> None:
        found.append(os.environ.pop(CUBLAS_VARIABLE, None))
        raise JoinedError

    environment = RankEnvironment()
    cublas.setattr(world, "join", joining)
    with pytest.raises(JoinedError):
        calibrate._calibrate(CalibrationConfig(reproducible=reproducible), environment)
    # A restart uses the configuration of the first attempt.
    read, stored = RunConfig(reproducible=not reproducible), RunConfig(reproducible=reproducible)
    cublas.setattr(Restarts, "configuration", lambda *_: stored)
    cublas.setattr(train_as_rank, "_join", joining)
    with contextlib.ExitStack() as stack, pytest.raises(JoinedError):
        train_as_rank.train_as_rank(mock.Mock(), (), stack, read, environment)
    assert found == 2 * [":4096:8" if reproducible else None]


@pytest.mark.parametrize("initialized", [True, False])
def test_a_fixed_workspace_of_the_user_is_accepted(
    initialized: bool, cublas: pytest.MonkeyPatch
) -> None:
    cublas.setattr(torch.cuda, "is_initialized", lambda: initialized)
    cublas.setenv(CUBLAS_VARIABLE, ":16:8")
    prepare_cublas()
    make_deterministic(torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


def test_a_cpu_needs_no_cublas(cublas: pytest.MonkeyPatch) -> None:
    prepare_cublas(torch.device("cpu"))
    make_deterministic(torch.device("cpu"))
    assert CUBLAS_VARIABLE not in os.environ
    torch.use_deterministic_algorithms(False)


# Refusals


def refuse() -> None:
    with pytest.raises(ConfigError, match=r"reproducible.* 3 ranks do not make; use 1, 2, 4, 8"):
        Engine(make_model(), loss, fused_adamw, reproducible=True, device="cpu")


def test_three_ranks_are_refused() -> None:
    run_ranks(refuse, 3)


def test_a_buffer_in_the_memory_of_a_parameter_shows_its_updates() -> None:
    weights = []
    for shares in (True, False):
        model = make_model()
        if shares:
            model.register_buffer("table", model.head.weight.detach())
            model.transposed = model.head.weight.detach().t()
        engine = Engine(model, loss, fused_adamw, policy="fp32", reproducible=True, device="cpu")
        torch.use_deterministic_algorithms(False)
        engine.step([samples(0, 2), samples(1, 2)])
        weights.append(model.head.weight.detach().clone())
        assert not shares or torch.equal(model.table, weights[0])
    assert torch.equal(*weights)


def test_three_microbatches_are_refused() -> None:
    engine = Engine(make_model(), loss, fused_adamw, reproducible=True, device="cpu")
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match=r"power of two, not 3; .* a rank has 2 or 4"):
        engine.step([samples(0, 2)] * 3)


@ranks(2)
def test_different_numbers_of_microbatches_are_one_error() -> None:
    engine = Engine(make_model(), loss, fused_adamw, policy="fp32", reproducible=True, device="cpu")
    batch = Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))
    engine.step([batch, batch])
    with pytest.raises(
        TrainingError, match=r"a step of 1 .*a step of 4 .*same number of microbatches"
    ):
        engine.step([batch] * (4 if dist.get_rank() else 1))
    torch.use_deterministic_algorithms(False)
