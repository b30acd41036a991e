"""The scaler with FSDP2 x tensor parallelism: parameters on different meshes, and plain ones."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distmp import ConfigError, DistributedGradScaler
from tests.ranks import from_all_ranks, ranks, same_on_all_ranks

RANKS = 4
INIT_SCALE = 1024.0


class Model(nn.Module):
    """`first` and `second` are tensor-parallel, `norm` is not, `gain` is not sharded at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)  # 5 elements: the shards of 2 ranks differ in size
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 5)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x)).tanh()) * self.gain.sum()


def parallelized() -> Model:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model()
    plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"], ignored_params={model.gain})
    return model


def inputs(step: int, data_rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + data_rank))


def backward(scaler: DistributedGradScaler, model: Model, step: int = 0) -> None:
    data_rank = dist.get_rank() // 2
    scaler.scale(model(inputs(step, data_rank)).square().mean()).backward()
    assert model.gain.grad is not None
    dist.all_reduce(model.gain.grad)
    model.gain.grad /= RANKS


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [local(tensor.detach()).clone() for tensor in tensors]


def spoil(parameter: nn.Parameter, rank: int) -> bool:
    """Set an element of the gradient to inf on one rank, if it has any of this parameter."""
    values = local(parameter.grad)
    if dist.get_rank() == rank and values.numel() > 0:
        values.view(-1)[-1] = math.inf
        return True
    return False


@ranks(RANKS)
def test_one_decision_whichever_parameter_is_first_and_wherever_the_inf_is() -> None:
    model = parallelized()
    parameters = [*model.parameters()]
    expected, clean = 2.0**30, 0
    scaler = DistributedGradScaler("cpu", expected, growth_interval=3, min_scale=2.0**-30)
    orders = itertools.cycle(range(len(parameters)))
    for step, (spoiled, rank) in enumerate(itertools.product([*parameters, None], range(RANKS))):
        first = next(orders)
        optimizer = torch.optim.SGD(parameters[first:] + parameters[:first], lr=1e-3)
        backward(scaler, model, step)
        overflow = spoiled is not None and spoil(spoiled, rank)
        flags = from_all_ranks(overflow)
        before = copies(parameters)
        if step % 2:
            scaler.clip_grad_norm_(optimizer, 1e-2)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not a.equal(b) for a, b in zip(before, copies(parameters), strict=True))
        assert moved == (not any(flags)), f"step {step}"
        clean = 0 if any(flags) else clean + 1
        expected *= 0.5 if any(flags) else 2.0 if clean == 3 else 1.0
        clean %= 3
        assert scaler.get_scale() == expected, f"step {step}"
        model.zero_grad()
    assert same_on_all_ranks(scaler.state_dict())


@ranks(RANKS)
def test_the_norm_over_mixed_meshes_counts_each_value_once() -> None:
    model = parallelized()
    parameters = [*model.parameters()]
    meshes = {p.device_mesh for p in parameters if isinstance(p, DTensor)}
    assert len(meshes) == 2
    assert any(not isinstance(p, DTensor) for p in parameters)
    for order in (parameters, parameters[::-1]):
        scaler = DistributedGradScaler("cpu", init_scale=INIT_SCALE)
        optimizer = torch.optim.SGD(order, lr=1.0)
        backward(scaler, model)
        whole = [full(p.grad).double() / INIT_SCALE for p in parameters]
        expected = torch.cat([gradient.flatten() for gradient in whole]).norm()
        before = [full(p.detach()).clone() for p in parameters]
        max_norm = 0.25 * float(expected)
        norm = scaler.clip_grad_norm_(optimizer, max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        assert same_on_all_ranks(norm.item())
        scaler.step(optimizer)
        scaler.update()
        for parameter, old, gradient in zip(parameters, before, whole, strict=True):
            step = (old - full(parameter.detach())).double()
            torch.testing.assert_close(step, gradient * 0.25, rtol=1e-3, atol=1e-7)
        model.zero_grad()


@ranks(2)
def test_norm_of_partial_tensors_is_refused() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 8)
    plain = nn.Linear(8, 4, bias=False)
    plain(inputs).square().sum().backward()
    expected = plain.weight.grad.norm().item()
    for use_orig_params in (True, False):
        model = FullyShardedDataParallel(
            copy.deepcopy(plain), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = DistributedGradScaler("cpu", init_scale=INIT_SCALE)
        scaler.scale(model(inputs).square().sum()).backward()
        with pytest.raises(ValueError, match="gradients that FSDP1 shards; call"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.unscale_(optimizer)
        assert model.clip_grad_norm_(1.0).item() == pytest.approx(expected, rel=1e-5)
        scaler.step(optimizer)
        scaler.update()

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    scaler = DistributedGradScaler("cpu", enabled=False)
    with pytest.raises(ValueError, match="Partial DTensor gradient; redistribute it first"):
        scaler.clip_grad_norm_(torch.optim.SGD([weight]), 1.0)


@ranks(2)
def test_a_group_without_all_ranks_that_hold_shards_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
    weight.grad = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
    optimizer = torch.optim.SGD([weight])
    for enabled in (True, False):
        scaler = DistributedGradScaler("cpu", enabled=enabled, group=mesh["dp"])
        scaler.scale(torch.ones(()))
        for call in (lambda s: s.clip_grad_norm_(optimizer, 1.0), lambda s: s.step(optimizer)):
            message = f"lacks the ranks \\[{1 - dist.get_rank()}\\], which hold shards"
            with pytest.raises(ConfigError, match=message):
                call(scaler)
            if not enabled:
                break
    # Copies on other ranks are equal, so they need not take part.
    whole = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    whole.grad = distribute_tensor(torch.arange(4.0), mesh["tp"], [Replicate()])
    norm = scaler.clip_grad_norm_(torch.optim.SGD([whole]), 1.0)
    assert norm.item() == pytest.approx(math.sqrt(14))


@ranks(2)
def test_a_mesh_without_process_groups_has_ranks() -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    sharded = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    sharded.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    groups = [dist.new_group([rank]) for rank in range(2)]
    optimizer = torch.optim.SGD([weight, sharded])
    norms = DistributedGradScaler("cpu", enabled=False, group=dist.group.WORLD)
    assert norms.clip_grad_norm_(optimizer, 100.0).item() == pytest.approx(math.sqrt(8))
    alone = DistributedGradScaler("cpu", enabled=False, group=groups[dist.get_rank()])
    with pytest.raises(ConfigError, match="which hold shards"):
        alone.clip_grad_norm_(optimizer, 1.0)


def adamw(parameters: Iterable[Tensor], *, fused: bool) -> torch.optim.Optimizer:
    # A large epsilon, so that rounding of tiny gradients does not change the update much.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=fused)


def trained_on_one_rank() -> list[Tensor]:
    """Return the weights after two steps in float64; the step between them is skipped."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = adamw(model.parameters(), fused=False)
    for step in (0, 2):
        optimizer.zero_grad()
        for data_rank in range(2):
            (model(inputs(step, data_rank).double()).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@ranks(RANKS)
def test_fused_optimizers_of_mixed_meshes_step_together() -> None:
    model = parallelized()
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    optimizers = [adamw(group, fused=True) for group in (sharded, [model.gain])]
    scaler = DistributedGradScaler("cpu", INIT_SCALE, optimizers=optimizers)
    for step in range(3):
        backward(scaler, model, step)
        if step == 1:
            spoil(model.first.weight, rank=3)
        scaler.clip_grad_norm_(optimizers, 1e-2)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    assert scaler.get_scale() == INIT_SCALE / 2
    for found, expected in zip(model.parameters(), trained_on_one_rank(), strict=True):
        torch.testing.assert_close(full(found.detach()).double(), expected, rtol=1e-4, atol=1e-6)
    backward(scaler, model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        adamw(model.parameters(), fused=True).step()
