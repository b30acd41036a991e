"""Parameters that are used sometimes or never: one rule for every strategy.

A parameter that no rank has ever used is not updated. From its first gradient on, a step in which
no rank uses it counts as a zero gradient. The reference applies this rule to torch's optimizers, in
float64, on all samples at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.scaling.settings import LossScaleConfig
from tests.marks import nightly
from tests.parallel.sharding import sharded
from tests.ranks import ranks
from tests.reference import assert_same_bits, snapshot, weights

WIDTH = 4
STEPS = 6
INF = float("inf")

WAYS: tuple[dict[str, Any], ...] = (
    {"strategy": "ddp"},
    {"strategy": "ddp", "shard_optimizer": True},
    {"strategy": "ddp", "on_nonfinite": "drop_microbatch"},
    {"strategy": "ddp", "reproducible": True},
    sharded("fsdp", accumulate="sharded"),
    sharded("fsdp", accumulate="unsharded"),
    sharded("hsdp", shard_size=2, accumulate="sharded"),
    sharded("hsdp", shard_size=1, accumulate="hybrid"),
    sharded("hsdp", shard_size=1, accumulate="unsharded"),
)


@dataclass
class Sample:
    """A microbatch: its step and rank, and a factor that may make it non-finite."""

    step: int
    rank: int
    index: int
    factor: float = 1.0

    def inputs(self) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.step + 10 * self.rank + self.index)
        return torch.randn(3, WIDTH, generator=generator)


# The steps in which each parameter is used.
USES: dict[str, Callable[[Sample], bool]] = {
    "always": lambda at: True,
    "never": lambda at: False,
    "first_step": lambda at: at.step == 0,
    "third_step": lambda at: at.step == 2,
    "rank_1": lambda at: at.rank == 1,
    "last_microbatch": lambda at: at.index == 1,
    "third_step_of_rank_1": lambda at: (at.step, at.rank, at.index) == (2, 1, 1),
}


class Block(nn.Module):
    """Has a parameter for each usage pattern, and one whose gradient is always zero."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in (*USES, "zero"):
            value = torch.randn(WIDTH, generator=generator) + 2
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor, at: Sample) -> Tensor:
        for name, used in USES.items():
            if used(at):
                x = x * (1 + 0.05 * getattr(self, name))
        return x + 0 * self.zero


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seed) for seed in range(2))
        self.idle = nn.ModuleList([Block(7)])
        self.own = Block(8)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, at: Sample) -> Tensor:
        for block in (*self.blocks, self.own):
            x = block(x, at)
        return x


def loss(model: nn.Module, at: Sample) -> tuple[Tensor, int]:
    x = at.inputs()
    dtype = next(model.parameters()).dtype
    output = model(x.double() if dtype == torch.float64 else x, at)
    return output.float().square().sum() * at.factor, len(x)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.5, fused=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.5)


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.5, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.5)


def stateless_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, weight_decay=0.5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Creates all of its state in the first step, with nonzero values."""
    return torch.optim.Adagrad(parameters, lr=0.02, weight_decay=0.5, initial_accumulator_value=0.1)


def samples(step: int, rank: int) -> list[Sample]:
    return [Sample(step, rank, index) for index in range(2)]


def make_engine(optimizer: Any, options: dict[str, Any]) -> Engine:
    return Engine(Model(), loss, optimizer, **{"policy": "fp32", "device": "cpu", **options})


def reference(
    optimizer: Any, leave_out: Callable[[Sample], bool] = lambda at: False
) -> dict[str, Tensor]:
    """Train in float64 without the parts in `leave_out`; a step without samples is skipped."""
    model = Model().double()
    # torch's fused SGD fails if only some momenta exist (torch 2.13).
    stepper = {fused_adamw: adamw, fused_sgd: sgd}.get(optimizer, optimizer)(model.parameters())
    used: set[nn.Parameter] = set()
    for step in range(STEPS):
        kept = [at for rank in range(2) for at in samples(step, rank) if not leave_out(at)]
        if not kept:
            continue
        stepper.zero_grad()
        sums = [reference_loss(model, at) for at in kept]
        torch.stack(sums).sum().div(3 * len(kept)).backward()
        used |= {parameter for parameter in model.parameters() if parameter.grad is not None}
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stepper.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def reference_loss(model: nn.Module, at: Sample) -> Tensor:
    return model(at.inputs().double(), at).square().sum()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: Any) -> None:
    assert found.keys() == expected.keys()
    start = dict(Model().named_parameters())
    for name, value in expected.items():
        if name.rpartition(".")[2] in ("never", "bias") or name.startswith("idle."):
            assert torch.equal(found[name], start[name]), (name, what)
        # Far above FP32 rounding, and far below the effect of one extra weight decay.
        apart = (found[name] - value).abs().max()
        assert apart < 5e-4, (name, what, float(apart))


@pytest.fixture(autouse=True)
def _leave_algorithms_as_they_were() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "optimizer", [fused_adamw, nightly(adamw), nightly(fused_sgd), nightly(sgd)]
)
@ranks(2, timeout=300)
def test_unused_parameters_are_not_updated_under_every_strategy(optimizer: Any) -> None:
    expected = reference(optimizer)
    for options in WAYS:
        engine = make_engine(optimizer, options)
        for step in range(STEPS):
            assert not engine.step(samples(step, dist.get_rank())).numbers.skipped
        assert_close(weights(engine), expected, options)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optimizer", [fused_adamw, sgd])
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "drop_microbatch"}])
def test_unused_parameters_are_not_updated_on_a_single_rank(
    optimizer: Any, options: dict[str, Any]
) -> None:
    engine = make_engine(optimizer, options)
    for step in range(STEPS):
        engine.step([at for rank in range(2) for at in samples(step, rank)])
    assert_close(weights(engine), reference(optimizer), options)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", [fused_adamw, nightly(adamw), nightly(fused_sgd)])
@ranks(2, timeout=300)
def test_skipped_step_marks_no_parameter_as_used(optimizer: Any) -> None:
    expected = reference(optimizer, lambda at: at.step == 2)
    for options in WAYS:
        engine = make_engine(optimizer, options)
        for step in range(STEPS):
            factor = INF if step == 2 else 1.0
            batches = [Sample(step, dist.get_rank(), index, factor) for index in range(2)]
            assert engine.step(batches).numbers.skipped == (step == 2)
        assert_close(weights(engine), expected, options)
        assert "blocks.0.third_step" in engine._setup.strategy.used.unused
    torch.use_deterministic_algorithms(False)


@ranks(2)
def test_dropped_microbatch_marks_no_parameter_as_used() -> None:
    def spoilt(at: Sample) -> bool:
        return (at.step, at.rank, at.index) == (2, 1, 1)

    for more in ({}, {"reproducible": True}, {"shard_optimizer": True}):
        engine = make_engine(fused_adamw, {"on_nonfinite": "drop_microbatch", **more})
        for step in range(STEPS):
            batches = samples(step, dist.get_rank())
            for at in batches:
                at.factor = INF if spoilt(at) else 1.0
            assert engine.step(batches).numbers.dropped == (step == 2)
        assert_close(weights(engine), reference(fused_adamw, spoilt), more)
        assert "blocks.0.third_step_of_rank_1" in engine._setup.strategy.used.unused
        assert "blocks.0.third_step" not in engine._setup.strategy.used.unused
    torch.use_deterministic_algorithms(False)


# Saved and loaded


@pytest.mark.parametrize(
    "optimizer",
    [fused_adamw, nightly(fused_sgd), nightly(sgd), nightly(stateless_sgd), nightly(adagrad)],
)
@pytest.mark.parametrize("saved_after", [1, nightly(3)])
@ranks(2, timeout=300)
def test_used_parameters_are_restored(optimizer: Any, saved_after: int) -> None:
    ways = (WAYS[0], WAYS[2], WAYS[5], WAYS[8])
    expected = reference(optimizer)
    for index, options in enumerate(ways):
        engine = make_engine(optimizer, options)
        for step in range(saved_after):
            engine.step(samples(step, dist.get_rank()))
        saved = snapshot(engine)
        resumed = make_engine(optimizer, ways[index - 1])
        load(resumed, saved)
        # Load an earlier state, as a rollback does.
        for step in range(saved_after, STEPS):
            engine.step(samples(step, dist.get_rank()))
        load(engine, saved)
        for one in (resumed, engine):
            loaded = snapshot(one)
            # Some optimizers have state for unused parameters, others do not.
            known = {name: value for name, value in saved.items() if name in loaded}
            assert_same_bits({name: loaded[name] for name in known}, known)
            for name in loaded.keys() ^ saved.keys():
                assert f"unused/{name.split('/')[1]}" in saved
            for step in range(saved_after, STEPS):
                one.step(samples(step, dist.get_rank()))
            assert_close(weights(one), expected, (options, ways[index - 1]))


def load(engine: Engine, saved: dict[str, Tensor]) -> None:
    """Load a full state into the shards of the engine, like a checkpoint."""
    live = engine.prepare_to_load({name: (t.shape, t.dtype) for name, t in saved.items()})
    assert live.keys() <= saved.keys()
    with torch.no_grad():
        for name, tensor in live.items():
            fill(tensor, saved[name])
    engine.load_state_dict(live)


def fill(tensor: Tensor, whole: Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    from distmp.utils.flat_shard import FlatShard

    if isinstance(tensor, DTensor):
        tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
    elif isinstance(tensor, FlatShard):
        flat = whole.reshape(-1)[tensor.start : tensor.start + tensor.numel()]
        tensor.copy_(flat.view(tensor.shape))
    else:
        tensor.copy_(whole)


def test_state_without_record_follows_the_optimizer() -> None:
    engine, resumed = (make_engine(adamw, {}) for _ in range(2))
    batches = [[at for rank in range(2) for at in samples(step, rank)] for step in range(STEPS)]
    for step in range(3):
        engine.step(batches[step])
    saved = {k: v for k, v in snapshot(engine).items() if not k.startswith("unused/")}
    resumed.load_state_dict(saved)
    assert resumed._setup.strategy.used.unused == engine._setup.strategy.used.unused
    for step in range(3, STEPS):
        resumed.step(batches[step])
    assert_close(weights(resumed), reference(adamw), "older")


def test_parameter_used_only_in_a_failed_step_stays_unused() -> None:
    engine = make_engine(adamw, {"policy": "bf16"})
    bias = engine.model.blocks[0].get_parameter("third_step")
    engine.step(samples(0, 0))

    def write(gradient: Tensor) -> None:  # is refused
        bias.data.add_(1)

    hook = bias.register_hook(write)
    with pytest.raises(ConfigError, match="was written to"):
        engine.step(samples(2, 0))
    hook.remove()
    engine.publish_weights()
    unused = [name for name in engine.state_dict() if name == "unused/blocks.0.third_step"]
    assert unused
    engine.step(samples(1, 0))
    assert "optimizer/blocks.0.third_step/step" not in engine.state_dict()


# Sixteen bits


SIXTEEN = (
    sharded("fsdp", accumulate="sharded"),
    sharded("fsdp", accumulate="unsharded"),
    sharded("hsdp", shard_size=2, accumulate="sharded"),
    sharded("hsdp", shard_size=2, accumulate="unsharded"),
    sharded("hsdp", shard_size=1, accumulate="hybrid"),
)


@pytest.mark.parametrize(
    "precision", ["bf16", nightly("fp16"), nightly("bf16-autocast"), nightly("fp16-autocast")]
)
@ranks(2, timeout=300)
def test_a_parameter_without_a_gradient_in_sixteen_bits(precision: str) -> None:
    rules = LossScaleConfig(init=16.0) if precision.startswith("fp16") else None
    common = {"policy": precision, "loss_scale": rules}
    replicated = make_engine(sgd, {**common, "strategy": "ddp"})
    engines = [make_engine(sgd, {**common, **options}) for options in SIXTEEN]
    for step in range(STEPS):
        for engine in (replicated, *engines):
            assert not engine.step(samples(step, dist.get_rank())).numbers.skipped
    for engine, options in zip(engines, SIXTEEN, strict=True):
        for name, expected in weights(replicated).items():
            found = weights(engine)[name]
            torch.testing.assert_close(
                found, expected, rtol=2e-3, atol=2e-3, msg=f"{name} {options}"
            )
