"""Steps on GPUs: streams wait for what they use, and the host waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from distmp.distributed.world import World
from tests.parallel.sharding import sharded
from tests.parallel.test_module_buffers import Normalised, batch
from tests.ranks import ranks
from tests.recording import no_waiting
from tests.reference import (
    ONE_RANK,
    TWO_RANKS,
    Batch,
    error,
    loss,
    make_engine,
    microbatches,
    plain_training,
    train,
    weights,
)

pytestmark = pytest.mark.gpu

REDUCED_IN_BF16 = "fp32,reduce=bf16"
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, reduced in 16 bits": {"strategy": "ddp", "policy": REDUCED_IN_BF16},
    "sharded optimizer": {"strategy": "ddp", "shard_optimizer": True, "policy": "bf16"},
    "fsdp": sharded("fsdp", accumulate="sharded"),
    "fsdp, reduced in 16 bits": {
        **sharded("fsdp", accumulate="unsharded"),
        "policy": REDUCED_IN_BF16,
    },
}


def with_pinned_weight(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    total, weight = loss(model, batch)
    return total, torch.tensor(float(weight)).pin_memory()


def pinned(batch: Batch) -> Batch:
    return batch._replace(inputs=batch.inputs.pin_memory(), labels=batch.labels.pin_memory())


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_step_inputs_need_no_synchronization(policy: str) -> None:
    engine = make_engine(
        model=Normalised(),
        loss=with_pinned_weight,
        policy=policy,
        device="cuda",
        max_norm=1.0,
        schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    )
    steps = [[pinned(batch(step, index)) for index in range(2)] for step in range(5)]
    for step in steps[:2]:
        engine.step(step)
    with no_waiting():
        outcomes = [engine.step(step) for step in steps[2:]]
    applied = [outcome.numbers.applied_total for outcome in outcomes]
    assert applied == [3, 4, 5]


def test_fp8_matmuls_synchronize_streams() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(1)
        engine = make_engine(
            model=nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)),
            loss=lambda model, batch: (model(batch).float().square().sum(), len(batch)),
            policy="fp8",
            device=device,
        )
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).to(device)
        return [engine.step([inputs]).numbers.loss for _ in range(4)]

    on_gpu, on_cpu = losses("cuda"), losses("cpu")
    assert on_gpu[-1] < 0.95 * on_gpu[0]
    assert on_gpu == pytest.approx(on_cpu, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2, timeout=250, cuda=True)
def test_two_ranks_synchronize_streams(kind: str) -> None:
    engine = make_engine(device=World.current("cuda").device, max_norm=1.3, **KINDS[kind])
    engine.clock.active = True
    numbers = train(engine, 3, TWO_RANKS)
    batches = [pinned(batch) for batch in microbatches(3, TWO_RANKS[3], engine.world.rank)]
    with no_waiting():
        outcome = engine.step(batches)
    expected, losses_and_norms = plain_training(4, ONE_RANK, max_norm=1.3)
    exact = kind in ("ddp", "fsdp")
    found = {name: weight.cpu() for name, weight in weights(engine).items()}
    assert error(found, expected) < (1e-4 if exact else 0.1)
    for step, (mean, norm) in zip([*numbers, outcome.numbers], losses_and_norms, strict=True):
        tolerance = 1e-4 if exact else 0.02
        assert (step.loss, step.grad_norm) == pytest.approx((mean, norm), rel=tolerance)
    assert engine.clock.take() is not None


class TwoStreams(nn.Module):
    """Two equal layers, of which one runs on a side stream, with the waits that torch needs.

    Backward ends with the layer that runs first.
    """

    def __init__(self, width: int, first: str) -> None:
        super().__init__()
        self.first = first
        self.a, self.b = (nn.Linear(width, width, bias=False) for _ in "ab")
        self.b.load_state_dict(self.a.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        x.record_stream(side)
        outputs = {}
        for name in "ab" if self.first == "a" else "ba":
            with torch.cuda.stream(main if name == "a" else side):
                outputs[name] = getattr(self, name)(x)
        main.wait_stream(side)
        outputs["b"].record_stream(main)
        return outputs["a"] + outputs["b"]


def step_with_two_streams(width: int, first: str, **options: Any) -> None:
    engine = make_engine(
        model=TwoStreams(width, first),
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        policy="fp32",
        **options,
    )
    before = engine.weights()["a.weight"].clone()
    engine.step([torch.ones(2, width).pin_memory() for _ in range(2)])
    after = engine.weights()
    assert torch.equal(after["a.weight"], after["b.weight"])
    assert not torch.equal(after["a.weight"], before)


@pytest.mark.parametrize("first", ["a", "b"])
def test_gradients_of_two_streams_are_copied_after_both(first: str) -> None:
    step_with_two_streams(2048, first, device="cuda")  # 16 MiB each: copied during backward


@pytest.mark.parametrize("first", ["a", "b"])
@ranks(2, timeout=250, cuda=True)
def test_buckets_of_two_streams_are_reduced_after_both(first: str) -> None:
    step_with_two_streams(8, first, device=World.current("cuda").device, strategy="ddp")
