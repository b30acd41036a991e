"""Loss scaling across ranks: cases that fail with torch's scalers and pass with ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from distmp import DistributedGradScaler, TrainingError
from tests.ranks import run_ranks

SCALERS: dict[str, type[torch.amp.GradScaler]] = {
    "torch": torch.amp.GradScaler,
    "sharded": ShardedGradScaler,
    "distmp": DistributedGradScaler,
}
INF, NAN = math.inf, math.nan


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def started(name: str, **options: Any) -> torch.amp.GradScaler:
    """Return a scaler that has scaled a loss."""
    scaler = SCALERS[name]("cpu", **{"init_scale": 1024.0, **options})
    scaler.scale(torch.zeros(()))
    return scaler


def with_gradient(value: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value)
    parameter.grad = gradient
    return parameter


def plain(*gradient: float) -> nn.Parameter:
    return with_gradient(torch.zeros(len(gradient)), torch.tensor(gradient))


def sharded(mesh: DeviceMesh, placements: Any, *gradient: float) -> nn.Parameter:
    """Return a zero parameter whose gradient has these local values."""
    zeros, local = torch.zeros(1, len(gradient)), torch.tensor([gradient])
    return with_gradient(
        DTensor.from_local(zeros, mesh, placements), DTensor.from_local(local, mesh, placements)
    )


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moved(*parameters: Tensor) -> bool:
    """Return whether a step changed the parameters, which start at zero."""
    return any(bool(local(parameter.detach()).any()) for parameter in parameters)


def sgd(*parameters: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def fused_adamw(*parameters: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def stepped(name: str, *parameters: nn.Parameter) -> bool | str:
    """Run one step; return whether this rank updated, or its error."""
    scaler = started(name)
    try:
        scaler.step(sgd(*parameters))
        scaler.update()
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return moved(*parameters)


# The cases. Each returns the result of one rank.


class WithLocalBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2, bias=False)
        self.local_bias = nn.Parameter(torch.zeros(2))
        nn.init.ones_(self.shared.weight)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.shared(x) + self.local_bias * factor


def parameter_that_ddp_ignores(name: str) -> Any:
    model = WithLocalBias()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["local_bias"])
    wrapped = DistributedDataParallel(model)
    optimizer, scaler = sgd(*model.parameters()), SCALERS[name]("cpu", init_scale=1024.0)
    for step in range(4):
        factor = INF if rank() == 1 and step < 3 else 1.0
        optimizer.zero_grad()
        loss = wrapped(torch.ones(1, 2), 1.0).sum() + 0 * model.local_bias.sum()
        scaler.scale(loss).backward()
        assert model.local_bias.grad is not None
        model.local_bias.grad *= factor
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), model.shared.weight[0, 0].item()


def rank_without_gradient(name: str) -> Any:
    parameter = plain(1.0)
    if rank() == 1:
        parameter.grad = None
    return stepped(name, parameter)


def two_dimensions(name: str, replicated_first: bool) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    norm = sharded(mesh, (Shard(0), Replicate()), 1.0)
    weight = sharded(mesh, (Shard(0), Shard(1)), INF if rank() == 1 else 1.0)
    return stepped(name, *((norm, weight) if replicated_first else (weight, norm)))


def replicated_first(name: str) -> Any:
    return two_dimensions(name, True)


def sharded_first(name: str) -> Any:
    return two_dimensions(name, False)


def tensor_beside_dtensor(name: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    overflow = plain(INF if rank() == 1 else 1.0, 1.0)
    return stepped(name, sharded(mesh, [Shard(0)], 1.0), overflow)


def two_meshes(name: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    expert = sharded(mesh["ep"], [Shard(0)], 1.0)
    dense = sharded(mesh["dp"], [Shard(0)], INF if rank() == 3 else 1.0)
    return stepped(name, expert, dense)


def one_replica(name: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    return stepped(name, sharded(mesh, [Replicate()], INF if rank() == 1 else 1.0))


def fused_and_implicit(name: str) -> Any:
    parameter = plain(1.0)
    optimizer, scaler = fused_adamw(parameter), started(name)
    for step in range(2):
        parameter.grad = torch.tensor([INF if step == 0 and rank() == 1 else 1.0])
        scaler.step(optimizer)
        scaler.update()
    return optimizer.state[parameter]["step"].item(), scaler.get_scale()


def fused_and_explicit(name: str) -> Any:
    parameter = plain(INF if rank() == 1 else 1.0)
    optimizer, scaler = fused_adamw(parameter), started(name)
    scaler.unscale_(optimizer)
    try:
        scaler.step(optimizer)
    except RuntimeError:
        return "RuntimeError"
    return moved(parameter)


def two_optimizers(name: str) -> Any:
    first, second = plain(1.0), plain(NAN)
    optimizers = [sgd(first), sgd(second)]
    options = {"optimizers": optimizers} if name == "distmp" else {}
    scaler = started(name, **options)
    for optimizer in optimizers:
        scaler.step(optimizer)
    return moved(first), moved(second)


def many_nans(name: str) -> Any:
    parameter = plain(NAN)
    optimizer, scaler = sgd(parameter), started(name, init_scale=2.0**16)
    try:
        for _ in range(166):
            parameter.grad = torch.tensor([NAN])
            scaler.step(optimizer)
            scaler.update()
    except TrainingError:
        return "TrainingError", scaler.get_scale(), parameter.item()
    parameter.grad = torch.ones(1) * scaler.get_scale()
    scaler.step(optimizer)
    return "no error", scaler.get_scale(), "finite" if parameter.isfinite() else "not finite"


def growing_for_ever(name: str) -> Any:
    parameter = plain(0.0)
    optimizer, scaler = sgd(parameter), started(name, growth_interval=1)
    for _ in range(200):
        parameter.grad = torch.zeros(1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


class SummingScaler(torch.amp.GradScaler):
    """Sums the flags of all ranks, the obvious wrong fix."""

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        flags = super()._check_inf_per_device(optimizer)
        for flag in flags.values():
            dist.all_reduce(flag)
        return flags


def flag_of_two(name: str) -> Any:
    scaler = SummingScaler("cpu") if name == "torch" else DistributedGradScaler("cpu")
    scaler.scale(torch.zeros(()))
    parameter = plain(1.0)
    optimizer = fused_adamw(parameter)
    parameter.grad = torch.tensor([INF])
    scaler.step(optimizer)
    return optimizer.state[parameter]["step"].item()


def clipping_an_overflow(name: str) -> Any:
    first, second = plain(1024.0, 2048.0), plain(INF, 1024.0)
    optimizer, scaler = sgd(first, second), started(name)
    if isinstance(scaler, DistributedGradScaler):
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([first, second], 1.0)
    scaler.step(optimizer)
    assert first.grad is not None
    assert second.grad is not None
    return first.grad.tolist(), str(second.grad.tolist())


def clipping_a_mixture(name: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    members = [
        sharded(mesh["tp"], [Shard(0)], 2048.0),  # two shards, twice
        sharded(mesh, (Shard(0), Shard(1)), 2048.0),  # four shards
        plain(1024.0, 0.0),  # the same on every rank
    ]
    optimizer, scaler = sgd(*members), started(name)
    try:
        if isinstance(scaler, DistributedGradScaler):
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(members, 1.0)
    except RuntimeError:
        return "RuntimeError"
    scaler.step(optimizer)
    return norm.item(), [round(local(m.detach()).flatten()[0].item(), 5) for m in members]


Case = Callable[[str], Any]
# case, number of ranks, scaler that fails, its results by rank, our results
CASES: list[tuple[Case, int, str, list[Any], list[Any]]] = [
    (
        parameter_that_ddp_ignores,
        2,
        "torch",
        [(1024.0, -1.9375), (128.0, -3.5)],
        [(128.0, 0.0)] * 2,
    ),
    (rank_without_gradient, 2, "torch", [True, "AssertionError"], [True, False]),
    (replicated_first, 4, "torch", [True, False, True, False], [False] * 4),
    (sharded_first, 4, "distmp", [False] * 4, [False] * 4),
    (tensor_beside_dtensor, 2, "torch", ["RuntimeError"] * 2, [False] * 2),
    (two_meshes, 4, "torch", [True, True, False, False], [False] * 4),
    (one_replica, 2, "torch", [True, False], [False] * 2),
    (fused_and_implicit, 2, "sharded", [(2.0, 1024.0), (1.0, 512.0)], [(1.0, 512.0)] * 2),
    (fused_and_explicit, 2, "sharded", ["RuntimeError"] * 2, [False] * 2),
    (two_optimizers, 1, "torch", [(True, False)], [(False, False)]),
    (many_nans, 1, "torch", [("no error", 0.0, "not finite")], [("TrainingError", 1.0, 0.0)]),
    (growing_for_ever, 1, "sharded", [INF], [2.0**24]),
    (flag_of_two, 2, "torch", [-1.0] * 2, [0.0] * 2),
    (clipping_an_overflow, 1, "torch", [([0, 0], "[nan, 0.0]")], [([1, 2], "[inf, 1.0]")]),
    (clipping_a_mixture, 4, "torch", ["RuntimeError"] * 4, [(5.0, [-0.4, -0.4, -0.2])] * 4),
]


def results(runs: list[tuple[Case, str]]) -> list[Any]:
    return [function(scaler) for function, scaler in runs]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_result_of_each_case(world_size: int) -> None:
    expected = {}
    for function, size, peer, seen_by_peer, seen_by_ours in CASES:
        if size == world_size:
            expected |= {(function, peer): seen_by_peer, (function, "distmp"): seen_by_ours}
    by_rank = run_ranks(results, world_size, [*expected])
    for (function, scaler), *seen in zip(expected, *by_rank, strict=True):
        assert seen == expected[function, scaler], (function.__name__, scaler)
