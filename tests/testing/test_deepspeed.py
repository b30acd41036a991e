"""Gradients that DeepSpeed's ZeRO keeps elsewhere than in `.grad`."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import distmp
from distmp.testing import AuditReport, GradientError, check_gradient
from tests.ranks import ranks
from tests.testing import scripts
from tests.testing.test_audit import Labelled, kinds, microbatches, total

absent = find_spec("deepspeed") is None
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(absent, reason="needs deepspeed")]
STAGES = range(4)
NAMES = {*dict(scripts.make_model().named_parameters())}


def engine(model: torch.nn.Module, stage: int, **options: Any) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **options,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step_of_sums(
    divisor: Callable[[scripts.Microbatches], Tensor | float],
) -> Callable[[Any, scripts.Microbatches], None]:
    def train_step(engine: Any, batches: scripts.Microbatches) -> None:
        by = divisor(batches)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            engine.set_gradient_accumulation_boundary(last)
            loss = scripts.cross_entropy(engine, batch, "sum") / by
            engine.backward(loss, scale_wrt_gas=False)
            if not last:
                engine.step()

    return train_step


def right(batches: scripts.Microbatches) -> Tensor:
    return scripts.tokens_of(batches) / dist.get_world_size()


@ranks(2, timeout=120)
def test_gradients_of_zero_are_checked() -> None:
    for stage in STAGES:
        model = engine(scripts.make_model(), stage)
        check_gradient(step_of_sums(right), model, scripts.samples())
        wrong = {
            "ranks_twice": scripts.tokens_of,
            "rank_means": lambda batches: scripts.tokens_of(batches, everywhere=False).clamp(min=1),
            "microbatches_twice": lambda batches: right(batches) * len(batches),
        }
        for kind, divisor in wrong.items():
            with pytest.raises(GradientError) as failure:
                check_gradient(step_of_sums(divisor), model, scripts.samples())
            (mismatch,) = failure.value.mismatches
            assert (mismatch.kind, {*mismatch.parameters}) == (kind, NAMES)


def audited(stage: int, backward: Callable[..., None], **options: Any) -> AuditReport:
    model = engine(Labelled(), stage, **options)
    with distmp.audit(model, model.optimizer) as audit:
        for step in range(2):
            backward(model, microbatches(step))
    return audit.report


def token_mean(engine: Any, batches: list[dict[str, Tensor]]) -> None:
    factor = len(batches) * scripts.ranks() / total(batches)
    for batch in batches:
        tokens = (batch["labels"] != -100).sum()
        engine.backward(engine(**batch)["loss"] * tokens * factor)
        engine.step()


def microbatch_means(engine: Any, batches: list[dict[str, Tensor]]) -> None:
    for batch in batches:
        engine.backward(engine(**batch)["loss"])
        engine.step()


def divided_again(engine: Any, batches: list[dict[str, Tensor]]) -> None:
    """DeepSpeed divides by the number of microbatches, too."""
    for batch in batches:
        engine.backward(engine(**batch)["loss"] / len(batches))
        engine.step()


@ranks(2, timeout=120)
def test_steps_of_zero_are_audited() -> None:
    for stage in STAGES:
        for options in ({}, {"gradient_clipping": 0.05}):
            report = audited(stage, token_mean, **options)
            assert (report.exit_code, report.steps, report.undecided) == (0, 2, ()), str(report)
            report = audited(stage, microbatch_means, **options)
            assert kinds(report) == ["microbatch_means"]
            assert "embedding.weight" in report.mismatches[0][1]
        report = audited(stage, divided_again, gradient_clipping=0.0)
        assert kinds(report) == ["microbatch_means"]
        causes = ("number of ranks twice", "divided by the microbatches once too often")
        assert f"times 0.5: divided by the {', or '.join(causes)}" in str(report)


@ranks(2, timeout=120)
def test_16_bits_of_zero_are_named() -> None:
    for stage in STAGES:
        options: dict[str, Any] = {"bf16": {"enabled": True}}
        assert kinds(audited(stage, token_mean, **options)) == ["summed_in_16_bits"]
        if stage >= 2:
            options["data_types"] = {"grad_accum_dtype": "fp32"}
            assert kinds(audited(stage, token_mean, **options)) == ["reduced_in_16_bits"]
