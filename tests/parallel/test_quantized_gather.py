"""Gathering in 8 bits under FSDP2: the same bits as with 16, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp import Engine
from distmp.parallel import fsdp
from distmp.parallel.settings import ShardingConfig
from tests.marks import nightly
from tests.parallel.sharding import sharded
from tests.ranks import ranks, run_ranks

POLICIES = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4,hp=none", "fp8,hp=blocks.1")
STEPS = 3
MICROBATCHES = 4


class Net(nn.Module):
    """Blocks whose rows do not divide evenly over ranks, nor over blocks of 32 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(24, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
            for _ in range(2)
        )
        self.outputs = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outputs(x)


def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (module(batch) - batch[:, :10]).square().sum(), len(batch)


def engine(policy: str, quantized: bool, strategy: str = "fsdp", **options: Any) -> Engine:
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardingConfig, "quantized_gather", quantized)
        return Engine(
            Net(),
            loss,
            lambda named: torch.optim.AdamW(named, lr=1e-2),
            policy=policy,
            **sharded(strategy, **options),
        )


def batches(step: int) -> list[Tensor]:
    """Return the microbatches of this rank; the global batch is the same for 1, 2 and 4 ranks."""
    generator = torch.Generator().manual_seed(step)
    count = MICROBATCHES // dist.get_world_size()
    first = dist.get_rank() * count
    return [*torch.randn(MICROBATCHES, 8, 24, generator=generator)][first : first + count]


def trained(of: Engine, steps: range = range(STEPS)) -> list[Any]:
    """Return losses, norms, all weights, and the outputs of the trained model."""
    numbers = [of.step(batches(step)).numbers for step in steps]
    with torch.no_grad():
        outputs = of.module(torch.ones(3, 24))
    weights = [getattr(w, "full_tensor", lambda w=w: w)() for w in of.weights().values()]
    return [[(n.loss, n.grad_norm) for n in numbers], *weights, outputs]


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert first[0] == second[0]
    for one, other in zip(first[1:], second[1:], strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("world_size", [nightly(1), 2, nightly(4)])
@ranks(timeout=120)
def test_bits_do_not_depend_on_the_gather(world_size: int) -> None:
    for policy in POLICIES:
        assert_same(trained(engine(policy, True)), trained(engine(policy, False)))


@ranks(3, timeout=120)
def test_uneven_shards_overflow_and_resume() -> None:
    global MICROBATCHES
    MICROBATCHES = 3
    of, reference = engine("mxfp8", True), engine("mxfp8", False)
    assert_same(trained(of), trained(reference))
    broken = [batch.clone() for batch in batches(0)]
    if dist.get_rank() == 1:
        broken[0][0, 0] = torch.inf
    for each in (of, reference):
        assert each.step(broken).numbers.skipped
    assert_same(trained(of, range(3, 5)), trained(reference, range(3, 5)))
    resumed = engine("mxfp8", True)
    resumed.load_state_dict(reference.state_dict())
    assert_same(trained(resumed, range(5, 7)), trained(reference, range(5, 7)))


@ranks(2)
def test_hsdp_and_an_unsharded_step_outside() -> None:
    of, reference = (engine("fp8", quantized, "hsdp", shard_size=1) for quantized in (True, False))
    reference.load_state_dict(of.state_dict())
    assert_same(trained(of), trained(reference))


def _gathered_bytes(policy: str, quantized: bool) -> int:
    sent = 0

    def recorded(output: Tensor, shard: Tensor, group: Any) -> Any:
        nonlocal sent
        sent += shard.numel() * shard.element_size()
        return original(output, shard, group)

    from distmp.parallel import quantized_gather

    original = fsdp.all_gather
    of = engine(policy, quantized)
    fsdp.all_gather = quantized_gather.all_gather = recorded  # type: ignore[attr-defined]
    try:
        of.step(batches(0))
    finally:
        fsdp.all_gather = quantized_gather.all_gather = original  # type: ignore[attr-defined]
    return sent


def test_the_gathered_bytes() -> None:
    """The layers outside of the blocks and the norms stay in 16 bits."""
    counts = [
        run_ranks(_gathered_bytes, 2, "fp8,hp=none", quantized)[0] for quantized in (True, False)
    ]
    assert counts[0] <= 0.58 * counts[1]


@ranks(2)
def test_wide_products_gather_16_bits_of_the_unrounded_weight() -> None:
    """The gradient of the input has the unrounded weight, so nothing rounded may be gathered."""
    assert_same(trained(engine("fp8,grad=bf16", True)), trained(engine("fp8,grad=bf16", False)))
