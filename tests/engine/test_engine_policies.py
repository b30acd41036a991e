"""Engines apply their policy: in the module, in communication and in the optimizer's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distmp.engine.rank_consistency import check
from distmp.errors import ConfigError
from distmp.precision import PRESETS, policy
from distmp.precision.keep import storage_dtypes
from distmp.scaling.settings import LossScaleConfig
from tests.ranks import ranks, run_ranks
from tests.recording import Collectives
from tests.reference import (
    ONE_RANK,
    TWO_RANKS,
    assert_same_bits,
    error,
    foreach_adamw,
    make_engine,
    make_model,
    microbatches,
    plain_training,
    snapshot,
    train,
    weights,
)

FP32, BF16 = torch.float32, torch.bfloat16
STEPS = 8
# Distance of the weights from a training in FP64, relative to how far they have moved: about three
# times the measured values.
LIMITS = {
    "fp32": 1e-4,
    "tf32": 1e-4,
    "bf16": 0.1,
    "bf16-autocast": 0.1,
    "bf16-pure": 0.2,
    "fp16": 3e-3,
    "fp16-autocast": 3e-3,
    "fp16-static": 3e-3,
    "bf16,keep_fp32=norm|head": 0.02,
    "bf16-autocast,keep_fp32=norm|head": 0.02,
    "bf16-pure,keep_fp32=norm": 0.15,
    "bf16,reduce=bf16": 0.1,
    "fp32,reduce=bf16": 0.02,
}


def test_every_preset_is_tested() -> None:
    # The layers of this model are too small for low-precision matmuls; see tests/quantization.
    assert {name for name, preset in PRESETS.items() if not preset.has_low_precision_matmuls} < set(
        LIMITS
    )


def trained_as_said(text: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    chosen = policy(text)
    engine = make_engine(policy=text, strategy="ddp")
    expected = storage_dtypes(make_model(), chosen)
    sizes = TWO_RANKS
    with Collectives() as collectives:
        train(engine, 1, sizes)
    train(engine, STEPS - 1, sizes, first=1)
    check(engine)  # every rank holds the same
    assert {name: p.dtype for name, p in engine.module.named_parameters()} == expected
    updated = {name: FP32 if chosen.has_masters else dtype for name, dtype in expected.items()}
    assert {name: weight.dtype for name, weight in weights(engine).items()} == updated
    # The decision and the collectives of the first step are smaller.
    assert {dtype for dtype, count in collectives.sent if count > 32} == {chosen.reduce_dtype}
    assert all(buffer.dtype == FP32 for buffer in engine._setup.strategy.gradients()[0].tensors)
    state = snapshot(engine)
    engine.load_state_dict(state)
    assert_same_bits(snapshot(engine), state)
    return weights(engine), state


def all_policies() -> dict[str, dict[str, Tensor]]:
    return {text: trained_as_said(text)[0] for text in LIMITS}


def test_two_ranks() -> None:
    expected, _ = plain_training(STEPS, TWO_RANKS)
    found = run_ranks(all_policies, 2)
    for text, limit in LIMITS.items():
        assert_same_bits(found[0][text], found[1][text])
        assert error(found[0][text], expected) < limit, text


@pytest.mark.parametrize("text", ["bf16-pure", "bf16-pure,keep_fp32=norm"])
def test_pure_weights_without_a_fused_optimizer(text: str) -> None:
    expected, _ = plain_training(STEPS, ONE_RANK)
    engine = make_engine(policy=text, optimizer=foreach_adamw)
    train(engine, STEPS, ONE_RANK)
    assert error(weights(engine), expected) < 0.25


def test_pure_weights_keep_no_rounded_gradients() -> None:
    engine = make_engine(policy="bf16-pure")
    train(engine, 1, ONE_RANK)
    assert all(weight.grad is None for _, weight in engine._setup.strategy.optimizer_parameters())
    before = weights(engine)
    bad = [batch._replace(factor=float("inf")) for batch in microbatches(1, ONE_RANK[1])]
    assert engine.step(bad).numbers.skipped
    assert_same_bits(weights(engine), before)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("bf16-pure,accumulate=bf16", {}, "all strategies sum microbatches in FP32; use fp32"),
        ("bf16-pure", {"shard_optimizer": True}, "a sharded optimizer updates FP32 weights"),
        ("bf16,keep_fp32=hea", {}, "did you mean 'head'"),
    ],
)
def test_unsupported_options_of_a_strategy_are_refused(
    text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(policy=text, **options)


def test_static_loss_scale_does_not_change() -> None:
    engine = make_engine(policy="fp16-static")
    assert [numbers.loss_scale for numbers in train(engine, 2, ONE_RANK)] == [1024.0] * 2
    bad = [batch._replace(factor=float("inf")) for batch in microbatches(1, ONE_RANK[1])]
    assert engine.step(bad).numbers.skipped
    assert train(engine, 1, ONE_RANK)[0].loss_scale == 1024.0
    with pytest.raises(ConfigError, match="the policy fixes the loss scale at 1024"):
        make_engine(policy="fp16-static", loss_scale=LossScaleConfig(init=2.0))


def test_rules_of_a_disabled_loss_scale_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    rules = LossScaleConfig(init=4096.0, growth_interval=100)
    make_engine(policy="fp16", loss_scale=rules)
    assert caplog.messages == []
    make_engine(policy="bf16", loss_scale=rules)
    assert caplog.messages == [
        "precision bf16: precision.loss_scale.init = 4096.0, growth_interval = 100: has no effect, "
        "there is no loss scale"
    ]


def test_matmul_switches_are_restored_after_the_step() -> None:
    seen = []
    model = make_model()
    matmul: Any = torch.backends.cuda.matmul

    def note(*_: Any) -> None:
        seen.append(matmul.fp32_precision)

    model.head.register_forward_hook(note)
    model.head.register_full_backward_hook(note)
    before = matmul.fp32_precision
    engine = make_engine(model=model, policy="tf32", first_step_checks=False)
    engine.step(microbatches(0, ((3,),)))
    assert seen == ["tf32", "tf32"]
    engine.evaluate(microbatches(0, ((3,),)))
    assert seen == ["tf32"] * 3
    assert matmul.fp32_precision == before


@ranks(2)
def test_kept_modules_with_a_sharded_optimizer() -> None:
    engine = make_engine(policy="bf16,keep_fp32=norm|head", strategy="ddp", shard_optimizer=True)
    train(engine, 2, TWO_RANKS)
    assert engine.module.head.weight.dtype == FP32
    assert engine.module.first.weight.dtype == BF16
    gathered = [torch.empty_like(engine.module.head.weight) for _ in range(2)]
    dist.all_gather(gathered, engine.module.head.weight.detach())
    assert torch.equal(*gathered)
