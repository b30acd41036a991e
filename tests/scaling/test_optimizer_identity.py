"""Identities of optimizers that ranks compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distmp.scaling.calls import all_identities, identify
from tests.ranks import ranks, same_on_all_ranks


def built(
    shape: tuple[int, ...] = (4, 3), seed: int = 0, lr: float = 0.1, kind: type = torch.optim.SGD
) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    return kind([nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(shape[:1]))], lr=lr)


def adamw(beta2: float = 0.999) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(3))], betas=(0.9, beta2))


def test_replicas_have_the_same_identity() -> None:
    assert identify(built()) == identify(built())
    text = "SGD with 2 parameters, the first of shape (4, 3), checksum "
    assert identify(built()).startswith(text)


@pytest.mark.parametrize(
    "other",
    [
        lambda: built(shape=(3, 4)),
        lambda: built(seed=1),
        lambda: built(lr=0.2),
        lambda: built(kind=torch.optim.AdamW),
    ],
)
def test_other_optimizers_have_another_identity(
    other: Callable[[], torch.optim.Optimizer],
) -> None:
    assert identify(built()) != identify(other())


def test_betas_distinguish_optimizers() -> None:
    assert identify(adamw()) == identify(adamw())
    assert identify(adamw()) != identify(adamw(beta2=0.95))


@pytest.mark.parametrize(
    "parameter",
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
    ],
)
def test_every_kind_of_parameter(parameter: torch.Tensor) -> None:
    optimizers = [torch.optim.SGD([nn.Parameter(parameter.clone())]) for _ in range(2)]
    first, second = map(identify, optimizers)
    assert first == second


def test_group_of_this_process() -> None:
    optimizer = built(seed=12345)
    identity = identify(optimizer)
    assert identity in all_identities()
    del optimizer
    assert identity not in all_identities()


@ranks(2)
def test_shards_are_the_same_on_every_rank() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2, 3), float(dist.get_rank()))
    optimizer = torch.optim.SGD([nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))])
    assert same_on_all_ranks(identify(optimizer))
