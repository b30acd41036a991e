"""Low-precision matmuls in a step: recomputation, resume, numbers of ranks, statistics."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp import Engine
from distmp.parallel import ParallelConfig
from distmp.quantization.linear import GRAD, INPUT, WEIGHT, WGRAD_GRAD
from tests.marks import nightly
from tests.ranks import ranks, run_ranks

POLICIES = (nightly("fp8"), nightly("fp8-rowwise"), nightly("mxfp8"), "nvfp4,hp=none")
MICROBATCHES = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (module(batch) - batch.roll(1, -1)).square().sum(), len(batch)


def engine(policy: str, **settings: Any) -> Engine:
    torch.manual_seed(3)
    return Engine(
        Net(), loss, lambda named: torch.optim.AdamW(named, lr=1e-2), policy=policy, **settings
    )


def batches(step: int) -> list[Tensor]:
    """Return the microbatches of this rank; the global batch is the same for 1, 2 and 4 ranks."""
    generator = torch.Generator().manual_seed(step)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    count = MICROBATCHES // world_size
    return [*torch.randn(MICROBATCHES, 8, 32, generator=generator)][rank * count :][:count]


def trained(of: Engine, steps: range = range(3)) -> list[Any]:
    """Return losses and all weights."""
    losses = [of.step(batches(step)).numbers.loss for step in steps]
    return [losses, *(weight.detach().clone() for weight in of.weights().values())]


def same(first: list[Any], second: list[Any]) -> bool:
    tensors = zip(first[1:], second[1:], strict=True)
    return first[0] == second[0] and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_blocks_give_the_same_bits(policy: str) -> None:
    recomputed = ParallelConfig(activation_checkpointing="blocks")
    assert same(trained(engine(policy)), trained(engine(policy, parallel=recomputed)))


@functools.cache
def losses(policy: str) -> list[float]:
    return trained(engine(policy), range(30))[0]


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_close_to_fp32_but_not_equal_to_bf16(policy: str) -> None:
    low_precision, wide, exact = losses(policy), losses("bf16"), losses("fp32")
    assert low_precision != wide
    assert exact[-1] < 0.7 * exact[0]
    limit = 0.3 if policy.startswith("nvfp4") else 0.08
    assert abs(low_precision[-1] / exact[-1] - 1) < limit


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_continues_with_the_same_bits(policy: str) -> None:
    whole = engine(policy)
    first = engine(policy)
    trained(first, range(2))
    second = engine(policy)
    second.load_state_dict(first.state_dict())
    expected = trained(whole, range(4))
    assert same(trained(second, range(2, 4)), [expected[0][2:], *expected[1:]])


def test_any_policy_continues_from_any_other() -> None:
    first = engine("nvfp4,hp=none")
    trained(first, range(2))
    for policy in ("bf16", "mxfp8", "fp32"):
        second = engine(policy)
        second.load_state_dict(first.state_dict())
        for name, weight in first.weights().items():
            assert torch.equal(second.weights()[name], weight)


def _reproducible(policy: str) -> list[Any]:
    return trained(engine(policy, reproducible=True))


@pytest.mark.parametrize("policy", ["fp8", nightly("nvfp4,hp=none")])
def test_reproducible_bits_do_not_depend_on_the_number_of_ranks(policy: str) -> None:
    """Random rounding depends on the position of a microbatch, not on its rank."""
    one, two, four = (run_ranks(_reproducible, size, policy)[0] for size in (1, 2, 4))
    assert same(one, two)
    assert same(one, four)


@ranks(2)
def test_statistics_are_summed_over_ranks() -> None:
    of = engine("fp8")
    outcome = of.step(batches(0))
    assert outcome.matmul_statistics is not None
    counts = outcome.matmul_statistics.read()
    assert outcome.matmul_statistics.layers == [
        f"blocks.{block}.{layer}" for block in (0, 1) for layer in (1, 3)
    ]
    samples = MICROBATCHES * 8
    assert counts[:, INPUT, 3].tolist() == [samples * width for width in (32, 64, 32, 64)]
    assert counts[:, GRAD, 3].tolist() == [samples * width for width in (64, 32, 64, 32)]
    assert (counts[:, WEIGHT, 3] == MICROBATCHES * 64 * 32).all()
    assert (counts[:, :, 1] == 0).all()
    broken = batches(1)
    if dist.get_rank() == 1:
        broken[0][0, 0] = torch.inf
    outcome = of.step(broken)
    assert outcome.numbers.skipped
    assert (outcome.matmul_statistics.read()[0, INPUT, 1] > 0).all()
    clean = of.step(batches(2)).matmul_statistics
    assert clean is not None
    assert (clean.read()[..., 1] == 0).all()


def test_random_rounding_differs_between_steps_and_microbatches() -> None:
    """Otherwise its errors would add up."""
    of = engine("nvfp4,hp=none")
    layers = of.low_precision_matmuls.layers
    assert layers is not None
    state = layers.states["blocks.0.1"]
    keys = set()
    for step in range(3):
        for microbatch in range(3):
            layers.begin_microbatch(step, microbatch)
            keys.add(int(state.key))
    assert len(keys) == 9
    other = layers.states["blocks.0.3"]
    assert int(other.key) != int(state.key)


def test_formats_can_be_changed_between_steps() -> None:
    of = engine("fp8")
    layers = of.low_precision_matmuls.layers
    assert layers is not None
    layers.set_formats(dataclasses.replace(layers.formats, grad=None, wgrad=None))
    counts = of.step(batches(0)).matmul_statistics
    assert counts is not None
    elements = counts.read()[:, [INPUT, GRAD, WGRAD_GRAD], 3]
    assert (elements[:, 1:] == 0).all()
    assert (elements[:, 0] > 0).all()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        # A mask of padding lets torch's encoder make nested tensors.
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) >= x.shape[1] - 2
        encoded: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return encoded.masked_fill(padding[..., None], 0.0)


def test_evaluation_of_encoder_has_low_precision_matmuls() -> None:
    torch.manual_seed(3)
    sgd = lambda named: torch.optim.SGD(named, lr=0.0)  # noqa: E731 - no update
    of = Engine(Encoder(), loss, sgd, policy="fp8")
    batch = torch.randn(4, 6, 32)
    assert of.evaluate([batch]) == of.step([batch]).numbers.loss
