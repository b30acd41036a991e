from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distmp.errors import CheckpointError, ConfigError
from distmp.optim import Muon
from distmp.optim.state import (
    check_complete,
    create_state,
    named_state,
    prepare_for_device_skip,
)
from tests.ranks import in_turn, ranks

Build = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"a.weight": (3, 4), "a.bias": (3,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def take_steps(
    named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, *seeds: int
) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def names_of(named: dict[str, nn.Parameter]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in named.items()}


def kinds(state: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stored_state_continues_in_new_optimizer(name: str) -> None:
    first = parameters()
    optimizer = OPTIMIZERS[name](first.values())
    take_steps(first, optimizer, 1, 2)
    stored = {key: value.clone() for key, value in named_state(optimizer, names_of(first)).items()}
    weights = {key: value.detach().clone() for key, value in first.items()}
    take_steps(first, optimizer, 3, 4)

    second = parameters()
    fresh = OPTIMIZERS[name](second.values())
    create_state(fresh, names_of(second), kinds(stored))
    live = named_state(fresh, names_of(second))
    assert kinds(live) == kinds(stored)
    with torch.no_grad():
        for key, value in stored.items():
            live[key].copy_(value)
        for key, value in weights.items():
            second[key].copy_(value)
    take_steps(second, fresh, 3, 4)
    for key in first:
        assert torch.equal(first[key], second[key]), key


def test_state_names_agree_with_parameters() -> None:
    named = parameters()
    optimizer = OPTIMIZERS["adamw"](named.values())
    take_steps(named, optimizer, 1)
    state = named_state(optimizer, names_of(named))
    assert set(state) == {
        f"{name}/{key}" for name in named for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert state["a.weight/exp_avg"] is optimizer.state[named["a.weight"]]["exp_avg"]


def test_only_counts_are_created_on_the_host() -> None:
    named = {"w": parameters()["a.weight"]}
    optimizer = OPTIMIZERS["adafactor"](named.values())
    take_steps(named, optimizer, 1)
    stored = kinds(named_state(optimizer, names_of(named)))
    elsewhere = nn.Parameter(torch.empty(3, 4, device="meta"))
    fresh = OPTIMIZERS["adafactor"]([elsewhere])
    create_state(fresh, {id(elsewhere): "w"}, stored)
    devices = {key: value.device.type for key, value in fresh.state[elsewhere].items()}
    assert devices == {"step": "cpu", "row_var": "meta", "col_var": "meta"}


def test_existing_state_is_kept() -> None:
    named = parameters()
    optimizer = OPTIMIZERS["adamw"](named.values())
    take_steps(named, optimizer, 1)
    before = named_state(optimizer, names_of(named))
    create_state(optimizer, names_of(named), kinds(before))
    after = named_state(optimizer, names_of(named))
    assert all(after[key] is before[key] for key in before)


def test_state_that_is_no_number_is_refused_by_name() -> None:
    named = parameters()
    optimizer = torch.optim.LBFGS([named["a.weight"]])
    optimizer.state[named["a.weight"]]["old_dirs"] = [3]
    with pytest.raises(CheckpointError, match=r"LBFGS keeps 'old_dirs' of 'a\.weight' as list"):
        named_state(optimizer, names_of(named))


def test_state_of_no_parameter_is_refused() -> None:
    named = parameters()
    optimizer = OPTIMIZERS["sgd"](named.values())
    optimizer.state["k"] = torch.tensor([0])  # type: ignore[index, assignment]
    with pytest.raises(CheckpointError, match="SGD has a state of 'k', not a parameter; use a"):
        named_state(optimizer, names_of(named))


def test_state_that_only_state_dict_returns_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": 3}

    named = parameters()
    with pytest.raises(CheckpointError, match=r"Counting\.state_dict\(\) has count, which is not"):
        named_state(Counting(named.values(), lr=0.1), names_of(named))


class Adam(torch.optim.AdamW):
    """Keeps the full weights, too."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter, state in self.state.items():
            state["full"] = parameter.detach().float()
        return result


KERNELS: dict[str, Build] = {
    "adamw": lambda named: torch.optim.AdamW(named, fused=True),
    "subclass": lambda named: Adam(named, fused=True),
    "muon": lambda named: Muon(named),
    "adamw without fused": lambda named: torch.optim.AdamW(named),
}


@pytest.mark.parametrize("name", KERNELS)
def test_stored_fp32_state_continues_with_16_bit_parameters(name: str) -> None:
    first, second = parameters(), parameters()
    optimizer = KERNELS[name](first.items())
    take_steps(first, optimizer, 1)
    stored = {key: value.clone() for key, value in named_state(optimizer, names_of(first)).items()}
    for parameter in second.values():
        parameter.data = parameter.data.bfloat16()
        parameter.grad = None
    fresh = KERNELS[name](second.items())
    create_state(fresh, names_of(second), kinds(stored))
    for key, live in named_state(fresh, names_of(second)).items():
        live.copy_(stored[key])
    for parameter in second.values():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()
    for parameter in second.values():
        dtypes = {key: value.dtype for key, value in fresh.state[parameter].items()}
        assert dtypes.pop("full", torch.float32) == torch.float32
        assert dtypes.pop("step", torch.float32) == torch.float32
        assert {*dtypes.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("option", "build"),
    [
        ("amsgrad", lambda p, **options: torch.optim.AdamW(p, lr=0.1, **options)),
        ("centered", lambda p, **options: torch.optim.RMSprop(p, lr=0.1, **options)),
        ("momentum", lambda p, **options: torch.optim.RMSprop(p, lr=0.1, **options)),
    ],
)
def test_state_without_what_an_option_needs_is_refused(option: str, build: Any) -> None:
    named = parameters()
    optimizer = build(named.values())
    take_steps(named, optimizer, 1)
    stored = kinds(named_state(optimizer, names_of(named)))
    with pytest.raises(CheckpointError, match=rf"of a\.weight, which {option} = True needs"):
        check_complete(build(named.values(), **{option: True}), names_of(named), stored)


def test_state_of_untrained_parameters_is_omitted() -> None:
    named = parameters()
    optimizer = OPTIMIZERS["adamw"](named.values())
    stored = {f"gone/{key}": (torch.Size([2]), torch.float32) for key in ("exp_avg", "exp_avg_sq")}
    assert create_state(optimizer, names_of(named), stored) == ["gone"]
    assert named_state(optimizer, names_of(named)) == {}


@ranks(2)
def test_state_is_sharded_like_its_parameter() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([parameter])
    stored = {
        "p/exp_avg": (torch.Size([5, 3]), torch.float32),
        "p/step": (torch.Size([]), torch.float32),
    }
    create_state(optimizer, {id(parameter): "p"}, stored)
    found = optimizer.state[parameter]
    assert isinstance(found["exp_avg"], DTensor)
    assert found["exp_avg"].placements == parameter.placements
    assert found["exp_avg"].to_local().shape == parameter.to_local().shape
    assert not isinstance(found["step"], DTensor)


# Skipping on the device


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_fused_optimizers_skip_on_device(name: str) -> None:
    optimizer = OPTIMIZERS[name](parameters().values())
    fused = name.endswith("-fused")
    if name == "adagrad-fused":  # not in torch 2.11
        fused = hasattr(optimizer, "_step_supports_amp_scaling")
    assert prepare_for_device_skip(optimizer) == fused


@pytest.mark.parametrize("nesterov", [True, False])
def test_fused_momentum_from_zero_agrees_with_plain(nesterov: bool) -> None:
    def build(named: dict[str, nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            named.values(), lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1, fused=fused
        )

    first, second = parameters(), parameters()
    take_steps(first, build(first, fused=False), 1, 2, 3)
    optimizer = build(second, fused=True)
    assert prepare_for_device_skip(optimizer)
    take_steps(second, optimizer, 1, 2, 3)
    for key in first:
        torch.testing.assert_close(first[key], second[key])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_cpu_updates_agree_with_plain_sgd(dtype: torch.dtype, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(144, generator=generator)
    parameter = nn.Parameter(start.to(dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum, fused=True)
    assert not prepare_for_device_skip(optimizer)
    expected, buffer = start.double(), torch.zeros(144, dtype=torch.float64)
    for _ in range(4):
        gradient = torch.randn(144, generator=generator).to(dtype)
        parameter.grad = gradient.clone()
        optimizer.step()
        buffer = momentum * buffer + gradient
        expected -= 0.1 * buffer
    torch.testing.assert_close(parameter.double(), expected, rtol=0, atol=0.05)


def test_fused_momentum_with_dampening_is_refused() -> None:
    optimizer = torch.optim.SGD(
        parameters().values(), lr=0.1, momentum=0.9, dampening=0.5, fused=True
    )
    with pytest.raises(ConfigError, match=r"dampening = 0\.5: .* set fused to false"):
        prepare_for_device_skip(optimizer)


@ranks(2)
@in_turn("name", ["adamw-fused", "sgd-fused", "adagrad-fused"])
def test_sharded_parameters_use_fused_kernel_if_supported(name: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = parameters()["a.weight"]
    sharded = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    optimizer = OPTIMIZERS[name]([sharded])
    assert prepare_for_device_skip(optimizer) == (name == "adamw-fused")
    reference = OPTIMIZERS[name.removesuffix("-fused").replace("sgd", "sgd-momentum")]([whole])
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        whole.grad = torch.randn(whole.shape, generator=generator)
        sharded.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        reference.step()
        optimizer.step()
    torch.testing.assert_close(sharded.full_tensor(), whole)


def test_state_that_lacks_a_part_of_one_parameter_is_refused() -> None:
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.AdamW([first, second])
    whole = (torch.Size([3]), torch.float32)
    stored = {f"{name}/{key}": whole for name in "ab" for key in ("exp_avg", "exp_avg_sq")}
    del stored["b/exp_avg"]
    with pytest.raises(CheckpointError, match="the state has exp_avg_sq of b, but of others in"):
        check_complete(optimizer, {id(first): "a", id(second): "b"}, stored)
