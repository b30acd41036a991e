"""The range of gradients and the loss scale that `distmp calibrate` prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distmp.commands.calibrate import loss_scale, policies
from distmp.commands.calibrate.loss_scale import Calibration, as_json, report
from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.diagnosis.histogram import ExponentHistogram, count_exponents
from distmp.diagnosis.replay import Probe
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.scaling.settings import LossScaleConfig
from distmp.telemetry.console import Console
from distmp.training.trainer import Trainer
from tests.marks import nightly
from tests.ranks import ranks
from tests.reference import (
    ONE_RANK,
    TWO_RANKS,
    Classifier,
    assert_same_bits,
    loss,
    make_engine,
    make_model,
    microbatches,
    snapshot,
    train,
)
from tests.torchrun import SIZES, TINY, corpus, python, run

WORLD = World.current("cpu")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    # A tied head is not a separate module.
    untied = f"--model.options={{{SIZES}, tied_head: false}}"
    return [*TINY, untied, f"--data.path={corpus(tmp_path / 'corpus')}", "--calibrate-steps=4"]


def measure(config: CalibrationConfig, world: World) -> Calibration:
    return loss_scale.measure(config, world, config.calibrate_steps)


def exponents(found: Calibration) -> dict[int, int]:
    return dict(found.gradients.exponents)


def test_json_contains_counts(arguments: list[str]) -> None:
    measured = measure(CalibrationConfig.load(arguments), WORLD)
    found = json.loads(json.dumps(as_json(measured)))
    assert {int(e): count for e, count in found["gradients"].items()} == exponents(measured)
    assert found["recommended_scale"] == measured.gradients.recommended_scale()


@pytest.mark.nightly
def test_ranks_sum_counts_and_print_once(arguments: list[str]) -> None:
    launcher = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = [*arguments, "--policies=fp16", "--json"]
    done = run([*launcher, "-m", "distmp.commands.calibrate.command", *options], Path.cwd())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["gradients"]
    assert found["world_size"] == 2
    alone = json.loads(json.dumps(as_json(measure(CalibrationConfig.load(arguments), WORLD))))
    # The same samples in the same microbatches, distributed over ranks. The later steps start from
    # weights that may differ in their last bits.
    ours, theirs = (content["gradients"] for content in (found, alone))
    moved = sum(abs(ours.get(e, 0) - theirs.get(e, 0)) for e in ours.keys() | theirs.keys())
    assert moved < 1e-3 * sum(ours.values())


@ranks(2)
def test_chosen_strategy_supports_sharding_settings(tmp_path: Path) -> None:
    world = World.current("cpu")
    data = f"--data.path={corpus(tmp_path / str(world.rank))}"
    options = [*TINY, data, "--sharding.accumulate=sharded"]
    found = loss_scale.measure(CalibrationConfig.load(options), world, 1)
    assert found.gradients.exponents


@pytest.mark.parametrize(
    ("policy", "measured"),
    [("fp16", "fp32"), nightly("fp16-autocast", "fp32"), nightly("bf16-autocast", "bf16-autocast")],
)
def test_float16_policies_are_measured_in_fp32(
    arguments: list[str], policy: str, measured: str
) -> None:
    found = measure(CalibrationConfig.load([*arguments, f"--precision.policy={policy}"]), WORLD)
    assert found.policy.startswith(f"{measured} (")
    if measured == "fp32":
        assert f"in place of {policy}" in found.policy
        as_configured = measure(CalibrationConfig.load(arguments), WORLD)
        assert exponents(found) == exponents(as_configured)


def test_calibration_continues_from_checkpoint(arguments: list[str]) -> None:
    common = [*arguments[:-1], "--run-dir=run", "--steps=3"]
    config = CalibrationConfig.load([*common, "--checkpoint.every=2"])
    trainer = Trainer(config, WORLD, Console(config.log, quiet=True))
    step, counted = trainer.engine.step, recorder(trainer.engine.module)
    outcomes: list[Any] = []

    def stepped(*args: Any, **options: Any) -> Any:
        if trainer.progress.step < 2:
            return step(*args, **options)
        with counted:
            outcomes.append(step(*args, **options))
        return outcomes[-1]

    trainer.engine.step = stepped  # type: ignore[method-assign]
    with trainer.active(StopSignals()):
        trainer.train()
    resumed = CalibrationConfig.load([*common, "--resume=run/checkpoints/step-000002"])
    found = loss_scale.measure(resumed, WORLD, 1)
    assert exponents(found) == dict(loss_scale.histogram(counted, WORLD).exponents)
    fresh = loss_scale.measure(CalibrationConfig.load(common), WORLD, 1)
    assert exponents(found) != exponents(fresh)
    # The comparison of policies, too.
    result = policies.measure(resumed, WORLD, "fp32", steps=1)
    assert isinstance(result, policies.PolicyResult)
    assert result.losses == (outcomes[0].numbers.loss,)
    missing = CalibrationConfig.load([*common, "--resume=missing"])
    with pytest.raises(ConfigError, match="resume = 'missing'"):
        policies.measure(missing, WORLD, "fp32", steps=1)


def test_calibration_accepts_training_configuration() -> None:
    for path in (Path(__file__).parents[2] / "configs").glob("*.yaml"):
        assert CalibrationConfig.load(["--config", str(path)]) != CalibrationConfig()


# The report


def calibration(*gradients: float) -> Calibration:
    histogram = ExponentHistogram(count_exponents(torch.tensor(gradients)))
    return Calibration(3, 2, "fp32 (why)", histogram)


def lines_of(found: Calibration, **rules: float) -> list[str]:
    return list(report(found, LossScaleConfig(**rules)))


def test_table_agrees_with_counts() -> None:
    lines = lines_of(calibration(1.0, 2.0**-15, 2.0**-30, 0.0, 2.0**-26, 2.0**-10, 2.0**3, 2.0))
    table = {line.split()[0]: line.split()[1:] for line in lines if line[:1].isdigit()}
    assert table["1"] == ["28.571%", "14.286%", "0"]
    # 8 * 2^9 * 8 = 2^15: the recommended scale.
    assert table["2^9"] == ["0", "28.571%", "0", "recommended"]
    assert table["2^24"] == ["0", "0", "42.857%"]
    assert "recommended: precision.loss_scale.init = 512 (2^9), or loss_scale=512 in" in lines[-1]


def test_limits_that_exclude_recommendation_are_named() -> None:
    small = calibration(2.0**-30, 2.0**-50)
    assert "precision.loss_scale.max_scale = 1.67772e+07 does not allow this" in lines_of(small)[-1]
    assert "does not allow" not in lines_of(small, max_scale=2.0**42)[-1]
    large = calibration(2.0**20)
    assert "precision.loss_scale.min_scale = 1 does not allow this" in lines_of(large)[-1]


def test_range_too_wide_for_float16_is_reported() -> None:
    assert "use a bf16 policy" in lines_of(calibration(1.0, 2.0**-60))[-1]
    assert not any("bf16" in line for line in lines_of(calibration(1.0, 2.0**-20)))


def test_non_finite_gradients_are_reported() -> None:
    lines = lines_of(calibration(1.0, math.inf, math.nan, math.nan))
    assert any("3 gradients are infinite or NaN already" in line for line in lines)
    assert "nothing to recommend" in lines_of(calibration(0.0))[-1]


CPU = torch.device("cpu")


def exponents_of(gradients: list[Tensor]) -> dict[int, int]:
    """Count exponents with numpy."""
    values = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
    exponents, counts = np.unique(np.frexp(values[values != 0])[1] - 1, return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def recorder(module: nn.Module) -> Probe:
    return Probe(module, [*module.named_modules()], activations=True)


def recorded(engine: Engine, sizes: object = TWO_RANKS, steps: int = 2) -> ExponentHistogram:
    with recorder(engine.module) as counted:
        train(engine, steps, sizes)  # type: ignore[arg-type]
    return loss_scale.histogram(counted, engine.world)


def outputs_of(model: Classifier, x: Tensor) -> list[Tensor]:
    """Run the model and return the outputs of its modules."""
    kept = [model.first(x)]
    x = kept[0]
    for block in model.blocks:
        norm = block.norm(x)
        linear = block.linear(norm)
        x = x + torch.tanh(linear)
        kept += [norm, linear, x]
    return [*kept, model.head(x)]


def test_counts_agree_with_autograd_for_each_microbatch() -> None:
    engine = make_engine()
    histogram = recorded(engine, ONE_RANK, steps=1)
    assert engine.nominal_weight is not None
    model = make_model()
    found: list[Tensor] = []
    for batch in microbatches(0, ONE_RANK[0]):
        outputs = outputs_of(model, batch.inputs)
        total = nn.functional.cross_entropy(outputs[-1], batch.labels, reduction="sum")
        wanted = [*outputs, *model.parameters()]
        found += torch.autograd.grad(total / engine.nominal_weight, wanted)
    assert dict(histogram.exponents) == exponents_of(found)


class Containers(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * 2, {"half": x / 2}


def test_outputs_in_containers_are_counted_once() -> None:
    module = nn.Sequential(nn.Sequential(Containers()))
    with recorder(module) as counted:
        first, second = module(torch.ones(3, requires_grad=True))
        (first + second["half"]).sum().backward()
    assert dict(ExponentHistogram(counted.exponents).exponents) == {0: 6}


@ranks(2, timeout=110)
def test_ddp_and_fsdp_counts_agree() -> None:
    of_ddp, of_fsdp = (recorded(make_engine(strategy=strategy)) for strategy in ("ddp", "fsdp"))
    assert of_ddp.exponents == of_fsdp.exponents


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_recording_changes_no_state_and_removes_hooks(policy: str) -> None:
    watched, other = make_engine(policy=policy), make_engine(policy=policy)
    hooks = _hooks(watched.module)
    recorded(watched, ONE_RANK)
    assert _hooks(watched.module) == hooks
    train(other, 2, ONE_RANK)
    assert_same_bits(snapshot(watched), snapshot(other))


def _hooks(module: nn.Module) -> list[int]:
    holders = [*module.modules(), *module.parameters()]
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    return [len(getattr(holder, name, None) or ()) for holder in holders for name in names]


class _Awkward(nn.Module):
    """Has a shared weight, a module called twice, recomputation, tuples, a detached output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.twice = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.twice.weight
        self.pair = _Pair()
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.twice, x * self.scale, use_reentrant=False)
        x = self.tied(self.twice(x))
        first, number = self.pair(x)
        return first + number


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu_().exp(), torch.arange(3.0)


def test_each_gradient_counts_once() -> None:
    model = _Awkward()
    with recorder(model) as counted:
        model(torch.randn(5, 3)).sum().backward()
    # One gradient of the weight that is used three times, and of each output.
    assert counted.exponents.sum() == 3 + 9 + 15 * (1 + 2 + 1 + 1)


def test_larger_loss_changes_recommendation() -> None:
    scales = []
    for factor in (1.0, 2.0**10):
        engine = make_engine()
        with recorder(engine.module) as counted:
            batches = [batch._replace(factor=factor) for batch in microbatches(0, ONE_RANK[0])]
            engine.step(batches)
        scales.append(2.0 ** (12 - max(loss_scale.histogram(counted, WORLD).exponents)))
    assert scales[0] == scales[1] * 2.0**10
    assert loss(make_model(), batches[0])[0] > 1000
