"""Settings that have to be the same on every rank, and the error if they are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distmp.distributed.comparison import (
    Fingerprint,
    check_same,
    describe_model,
    describe_param_groups,
    hyperparameters,
    raise_difference,
)
from distmp.errors import ConfigError, TrainingError
from tests.ranks import ranks

CPU = torch.device("cpu")


@ranks(3)
def test_modules_of_different_classes_are_named() -> None:
    norm = nn.GroupNorm(2, 8) if dist.get_rank() == 1 else nn.LayerNorm(8)
    model = nn.Sequential(nn.Linear(8, 8), norm)
    message = r"model\.1 = LayerNorm on ranks 0, 2; GroupNorm on rank 1: differs between ranks"
    with pytest.raises(ConfigError, match=message):
        check_same(dist.group.WORLD, CPU, describe_model(model))


@ranks(2)
def test_first_difference_between_ranks_is_named() -> None:
    described = {"a": "1", "b": "2", "c": str(dist.get_rank())}
    check_same(dist.group.WORLD, CPU, {**described, "c": "0"})
    with pytest.raises(ConfigError, match="c = 0 on rank 0; 1 on rank 1"):
        check_same(dist.group.WORLD, CPU, described)
    if dist.get_rank() == 1:
        del described["b"]
    with pytest.raises(ConfigError, match="b = 2 on rank 0; nothing on rank 1"):
        raise_difference(dist.group.WORLD, described)
    with pytest.raises(TrainingError, match="ranks have called the engine differently"):
        raise_difference(dist.group.WORLD, {"a": "1"})


def test_lists_of_numbers_are_compared() -> None:
    optimizer = torch.optim.AdamW([("weight", torch.zeros(2))])
    found = []
    for beta in (0.99, 0.99, 0.98):
        optimizer.param_groups[0]["betas"] = [0.9, beta]
        found.append(hyperparameters(optimizer))
    assert found[0] == found[1] != found[2]
    assert "'weight'" not in repr(found)


@pytest.mark.parametrize("container", [list, tuple])
def test_containers_of_tensors_are_left_out(container: type) -> None:
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.5)
    optimizer.param_groups[0]["betas"] = container([torch.tensor(0.9)])
    assert not any("betas" in name for name in describe_param_groups(optimizer))
    assert "betas" not in repr(hyperparameters(optimizer))


@pytest.mark.parametrize("lr", [torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.bfloat16)])
def test_tensors_of_one_number_are_compared(lr: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=lr)
    assert ("lr", 0.5) in hyperparameters(optimizer)[1]


def test_tuples_with_tensors_are_not_compared() -> None:
    first, second = (torch.optim.SGD([torch.zeros(2)]) for _ in range(2))
    first.param_groups[0]["betas"] = (torch.tensor(0.9), 0.99)
    second.param_groups[0]["betas"] = (torch.tensor(0.9, device="meta"), 0.99)
    assert hyperparameters(first) == hyperparameters(second)
    assert describe_param_groups(first) == describe_param_groups(second)


@pytest.mark.parametrize("others", [[], [2], [3, 3], [2, 2, 4]])
def test_fingerprint_detects_any_difference(others: list[int]) -> None:
    own = Fingerprint.of((1, "two"), 1 + len(others))
    fingerprints = [own, *(Fingerprint.of((other, "two"), 1 + len(others)) for other in others)]
    sums = torch.tensor([one.terms for one in fingerprints], dtype=torch.float64).sum(0)
    assert bool(own.differs(sums)) is bool(others)
    same = torch.tensor([own.terms] * len(fingerprints), dtype=torch.float64).sum(0)
    assert not own.differs(same)
