"""Several engines in one process, whose losses run each other's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distmp.engine.engine import Engine
from distmp.errors import ConfigError, TrainingError
from tests.parallel.sharding import sharded
from tests.ranks import ranks, run_ranks
from tests.reference import gathered, make_engine, snapshot

NOISE, INPUTS, WIDTH, BATCH = 3, 2, 8, 4
# Engines of either kind, and the largest error of a weight after five steps.
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "ddp": ({"strategy": "ddp", "policy": "fp32"}, 1e-6),
    "sharded optimizer": ({"strategy": "ddp", "policy": "fp32", "shard_optimizer": True}, 1e-6),
    "fsdp": ({**sharded("fsdp"), "policy": "fp32"}, 1e-6),
    "bf16": ({"strategy": "ddp", "policy": "bf16"}, 1e-2),
    "fp16-autocast": ({"strategy": "ddp", "policy": "fp16-autocast"}, 2e-3),
    "reproducible": ({"strategy": "ddp", "policy": "fp32", "reproducible": True}, 1e-6),
}

Batch = tuple[Tensor, Tensor]


def networks() -> tuple[nn.Module, nn.Module]:
    """Return a generator and a discriminator with the same values in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return (
            nn.Sequential(nn.Linear(NOISE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, INPUTS)),
            nn.Sequential(
                nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
            ),
        )


def batches(step: int, rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        (
            torch.randn(BATCH, INPUTS, generator=generator),
            torch.randn(BATCH, NOISE, generator=generator),
        )
        for _ in range(2)
    ]


def against(logits: Tensor, label: float) -> Tensor:
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="sum")


def losses(
    generator: Callable[[Tensor], Tensor], discriminator: Callable[[Tensor], Tensor]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the losses of both; each runs the other's module."""

    def of_discriminator(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        real, noise = batch
        with torch.no_grad():
            fake = generator(noise).to(real.dtype)
        return against(module(real), 1.0) + against(module(fake), 0.0), len(real)

    def of_generator(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        _, noise = batch
        return against(discriminator(module(noise)), 1.0), len(noise)

    return of_generator, of_discriminator


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, fused=True)


def build(**options: Any) -> tuple[Engine, Engine]:
    """Return the engines of generator and discriminator."""
    engines: list[Engine] = []
    generator, discriminator = networks()
    of_generator, of_discriminator = losses(
        lambda noise: engines[0].module(noise), lambda x: engines[1].module(x)
    )
    engines.append(Engine(generator, of_generator, sgd, device="cpu", **options))
    engines.append(Engine(discriminator, of_discriminator, sgd, device="cpu", **options))
    return engines[0], engines[1]


def reference(world_size: int, steps: int) -> list[dict[str, Tensor]]:
    """Train in float64 with plain torch; the normalization is that of each microbatch."""
    models = [network.double() for network in networks()]
    of_generator, of_discriminator = losses(*models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        data = [
            (real.double(), noise.double())
            for rank in range(world_size)
            for real, noise in batches(step, rank)
        ]
        for index, loss in ((1, of_discriminator), (0, of_generator)):
            parts = [loss(models[index], batch) for batch in data]
            gradients = torch.autograd.grad(
                sum(part for part, _ in parts) / sum(weight for _, weight in parts),
                [*models[index].parameters()],
            )
            for parameter, gradient in zip(models[index].parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizers[index].step()
    return [{n: p.detach() for n, p in model.named_parameters()} for model in models]


@pytest.mark.filterwarnings("error:.*:RuntimeWarning")  # first-step checks
@ranks(2, timeout=200)
def test_each_engine_takes_the_steps_of_plain_torch() -> None:
    expected = reference(2, 5)
    for kind, (options, tolerance) in KINDS.items():
        engines = build(**options)
        for step in range(5):
            for engine in reversed(engines):
                outcome = engine.step(batches(step, dist.get_rank()))
                assert not outcome.numbers.skipped
        for engine, weights in zip(engines, expected, strict=True):
            found = gathered(engine.state_dict())
            for name, value in weights.items():
                error = (found[f"model/{name}"].double() - value).abs().max()
                assert error < tolerance, (kind, name, error)


@ranks(2)
def test_overflow_of_one_engine_does_not_change_the_other() -> None:
    generator, discriminator = build(strategy="ddp", policy="fp16-autocast")
    rank = dist.get_rank()
    for step in range(2):
        discriminator.step(batches(step, rank))
        generator.step(batches(step, rank))
    before, scale = snapshot(discriminator), discriminator.loss_scale.value.clone()
    bad = batches(2, rank)
    if rank == 1:
        bad[1][1][0, 0] = torch.inf  # the discriminator sees NaN, and so do its statistics
    assert generator.step(bad).numbers.overflow
    after = snapshot(discriminator)
    assert all(torch.equal(after[name], before[name]) for name in before), "buffers included"
    assert generator.loss_scale.value < discriminator.loss_scale.value == scale
    assert not discriminator.step(batches(3, rank)).numbers.skipped
    report = generator.explain(generator.step(bad))
    assert report is not None
    assert "rank 1" in str(report)
    assert not torch.isnan(discriminator.model[1].running_mean).any()


def test_dropped_microbatch_does_not_change_buffers_of_the_other_engine() -> None:
    generator, discriminator = build(policy="fp32", on_nonfinite="drop_microbatch")
    good, bad = batches(0, 0)
    expected = networks()[1]
    expected(networks()[0](good[1]))
    bad[1][0, 0] = torch.nan
    assert generator.step([good, bad]).numbers.dropped == 1
    for name, value in expected.named_buffers():
        torch.testing.assert_close(discriminator.model.get_buffer(name), value)


def test_failed_step_does_not_change_buffers_of_the_other_engine() -> None:
    generator, discriminator = build(policy="fp32")
    good, bad = batches(0, 0)
    bad[1][0, 0] = torch.nan
    before = {name: value.clone() for name, value in discriminator.model.named_buffers()}
    with pytest.raises(TypeError):
        generator.step([bad, (good[0], None)])
    for name, value in before.items():
        assert torch.equal(discriminator.model.get_buffer(name), value), name


@ranks(2)
def test_the_probes_of_the_first_step_change_no_other_model() -> None:
    generator, discriminator = build(strategy="ddp", policy="fp32")
    data = batches(0, dist.get_rank())
    generator.step(data)
    assert discriminator.model[1].num_batches_tracked == len(data)


@ranks(2)
def test_checkpoints_of_both_continue_with_the_same_bits(tmp_path: Path) -> None:
    rank = dist.get_rank()

    def train(engines: tuple[Engine, Engine], steps: range) -> None:
        for step in steps:
            for engine in reversed(engines):
                engine.step(batches(step, rank))

    engines = build(strategy="ddp", policy="fp16-autocast")
    train(engines, range(2))
    for name, engine in zip(("generator", "discriminator"), engines, strict=True):
        engine.save(tmp_path / name, wait=False)
    train(engines, range(2, 4))
    for engine in engines:
        engine.wait_for_save()
    again = build(strategy="ddp", policy="fp16-autocast")
    for name, engine in zip(("generator", "discriminator"), again, strict=True):
        assert engine.load(tmp_path / name) == {"step": 2}
    train(again, range(2, 4))
    for found, expected in zip(again, engines, strict=True):
        left, right = snapshot(found), snapshot(expected)
        assert all(torch.equal(left[name], right[name]) for name in right)


def _mixed_up(call: str, directory: Path) -> str:
    """Call one of two engines of the same kind on rank 0, and the other on rank 1."""
    linear = [nn.Linear(2, 1) for _ in range(2)]
    engines = [
        Engine(model, lambda m, b: (m(b).square().sum(), len(b)), sgd, policy="fp32", device="cpu")
        for model in linear
    ]
    engine = engines[dist.get_rank()]
    data = [torch.ones(3, 2) * (1 + dist.get_rank())]
    with pytest.raises((ConfigError, TrainingError)) as error:
        {"step": lambda: engine.step(data), "save": lambda: engine.save(directory)}[call]()
    return str(error.value)


@ranks(2)
def test_engines_do_not_replace_the_checkpoints_of_each_other(tmp_path: Path) -> None:
    first, second = make_engine(strategy="ddp"), make_engine(strategy="ddp")
    path = first.save(tmp_path)
    link = tmp_path / f"link{dist.get_rank()}"
    link.symlink_to(tmp_path)
    for directory in (tmp_path, link, tmp_path / "part" / ".."):
        with pytest.raises(ConfigError, match="another engine of this process saves its check"):
            second.save(directory)
    second.load(path)  # another engine may read
    first.save(tmp_path)
    del first
    second.save(tmp_path)


def test_calls_of_different_engines_are_an_error(tmp_path: Path) -> None:
    for message in run_ranks(_mixed_up, 2, "step", tmp_path):
        assert message.startswith("engine = 1 on rank 0; 2 on rank 1: differs between ranks")
    first, second = run_ranks(_mixed_up, 2, "save", tmp_path)
    assert "rank 0 waits in engine.save(), which every rank has to call" in first
    assert "engine.save() of engine 2" in first
    assert "rank 1 waits in engine.save() of engine 2, which every rank has to" in second


def test_refused_engine_does_not_affect_others() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, 2), nn.BatchNorm1d(2))
    error = ConfigError("optimizer", "SGD", "is refused late")
    with (
        mock.patch("distmp.engine.engine.EngineState", side_effect=error),
        pytest.raises(ConfigError, match="is refused late") as refused,
    ):
        make_engine(model=model)
    model[1].running_mean = torch.zeros(2).to_sparse()  # a copy of it would fail
    other = Engine(
        nn.Linear(INPUTS, 1),
        lambda module, batch: (module(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="fp32",
    )
    assert other.step([torch.ones(2, INPUTS)]).numbers.applied_total == 1
    assert refused.value is error  # its traceback holds the parts of the engine until here


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_model_of_another_engine_is_refused(is_refused: bool, copied: bool) -> None:
    """It holds rounded weights, and hooks that cast its inputs."""
    model = nn.Linear(2, 1)

    def squared(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return module(batch).square().sum(), len(batch)

    if is_refused:
        with pytest.raises(ConfigError, match="optimizer"):
            Engine(model, squared, lambda named: sgd([("other", torch.zeros(1))]), policy="bf16")
    else:
        Engine(model, squared, sgd, policy="bf16")
    with pytest.raises(ConfigError, match="has the dtypes and hooks of another engine"):
        Engine(copy.deepcopy(model) if copied else model, squared, sgd, policy="fp32")
