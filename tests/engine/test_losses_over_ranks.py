"""A contrastive loss over the samples of all ranks has the gradient of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figures import ROOT
from tests.parallel.sharding import sharded
from tests.ranks import ranks
from tests.reference import make_engine, weights

PAGE = (ROOT / "docs" / "several-engines.md").read_text()
(CODE,) = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    if "info_nce" in block
]
BATCH, MICROBATCHES, TEMPERATURE = 4, 2, 0.1
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "sharded optimizer": {"strategy": "ddp", "shard_optimizer": True},
    "fsdp": sharded("fsdp"),
}


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def views(rank: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    first = torch.randn(BATCH, 6, generator=generator)
    return first, first + 0.3 * torch.randn(BATCH, 6, generator=generator)


def expected(world_size: int) -> dict[str, Tensor]:
    """Return the weights after a step of SGD in float64, on all samples in one process."""
    reference = model().double()
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(MICROBATCHES):
        pairs = [views(rank, microbatch) for rank in range(world_size)]
        first, second = (torch.cat([pair[i] for pair in pairs]).double() for i in range(2))
        first, second = (reference(x) for x in (first, second))
        first, second = (x / x.norm(dim=1, keepdim=True) for x in (first, second))
        logits = first @ second.T / TEMPERATURE
        total = total + (logits.logsumexp(1) - logits.diagonal()).sum()
    total = total / (world_size * BATCH * MICROBATCHES)
    gradients = torch.autograd.grad(total, [*reference.parameters()])
    return {
        name: (parameter - gradient).detach()
        for (name, parameter), gradient in zip(reference.named_parameters(), gradients, strict=True)
    }


def largest_error(loss: Any, options: dict[str, Any]) -> float:
    """Return the largest error of a weight after a step."""
    sgd = lambda named: torch.optim.SGD(named, lr=1.0)  # noqa: E731
    engine = make_engine(model=model(), loss=loss, optimizer=sgd, **options)
    rank = engine.world.rank
    engine.step([views(rank, microbatch) for microbatch in range(MICROBATCHES)])
    found = weights(engine)
    return max(
        float((found[name].double() - value).abs().max())
        for name, value in expected(engine.world.world_size).items()
    )


def page() -> dict[str, Any]:
    """Return the functions of the page, without its training."""
    found: dict[str, Any] = {}
    exec(CODE.partition("engine = ")[0], found)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@ranks(timeout=120)
def test_loss_in_the_documentation_has_the_gradient_of_one_process(world_size: int) -> None:
    loss = page()["info_nce"]
    kinds = KINDS if world_size > 1 else {"single": {"strategy": "single"}}
    for kind, options in kinds.items():
        assert largest_error(loss, options) < 2e-6, kind


@ranks(2)
def test_gradient_is_incomplete_without_other_ranks() -> None:
    found = page()

    def constants(features: Tensor) -> Tensor:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return torch.cat(parts)

    found["of_all_ranks"] = constants
    assert largest_error(found["info_nce"], KINDS["ddp"]) > 1e-2
