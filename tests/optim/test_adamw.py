"""AdamW that rounds stochastically, compared with AdamW in float64 and torch's AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim import AdamW, adamw
from distmp.precision.stochastic import indices, parameter_id, random_bits, round_with_bits
from tests.recording import HostReads

SHAPES = {
    "matrix": (24, 96),
    "wide": (3, 512),
    "vector": (70,),
    "odd": (5, 33),
    "conv": (4, 8, 2, 2),
}
RATE, DECAY, BETAS, EPS = 0.02, 0.1, (0.9, 0.97), 1e-6


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (name, torch.randn(shape, generator=generator).to(dtype).requires_grad_())
        for name, shape in SHAPES.items()
    ]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * 0.3 + 0.1 for shape in SHAPES.values()]


def build(named: Any, **options: Any) -> AdamW:
    defaults: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPS}
    return AdamW(named, **defaults | options)


def take_steps(optimizer: torch.optim.Optimizer, tensors: list[Tensor], steps: int) -> None:
    for step in range(steps):
        for tensor, gradient in zip(tensors, gradients(step), strict=True):
            tensor.grad = gradient.to(tensor.dtype)
        optimizer.step()


def in_float64(steps: int) -> list[Tensor]:
    """Return the weights after steps of AdamW in float64."""
    weights = [tensor.detach().double() for _, tensor in parameters()]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    for step in range(steps):
        for index, gradient in enumerate(gradients(step)):
            first, second = moments[index]
            gradient = gradient.double()
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
            bias = [1 - beta ** (step + 1) for beta in BETAS]
            update = first / bias[0] / ((second / bias[1]).sqrt() + EPS)
            weights[index] = weights[index] * (1 - RATE * DECAY) - RATE * update
            moments[index] = first, second
    return weights


def test_updates_agree_with_float64_and_torch() -> None:
    named, theirs = parameters(), [tensor for _, tensor in parameters()]
    take_steps(build(named), [tensor for _, tensor in named], 20)
    reference = torch.optim.AdamW(
        theirs, lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS, fused=True
    )
    take_steps(reference, theirs, 20)
    for (_, ours), their, exact in zip(named, theirs, in_float64(20), strict=True):
        torch.testing.assert_close(ours, their, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)


def test_second_moment_follows_changes_below_rounding_error() -> None:
    """In bfloat16, rounded to nearest, it would stay: each step changes it by 0.1%."""
    weight = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    optimizer = AdamW([("w", weight)], lr=0.0)
    for step in range(600):
        weight.grad = torch.full((64, 64), 1.0 if step < 100 else 0.1, dtype=torch.bfloat16)
        optimizer.step()
    expected = (1 - 0.999**100) * 0.999**500 + 0.01 * (1 - 0.999**500)
    second = optimizer.state[weight]["exp_avg_sq"].double()
    assert abs(second.mean() / expected - 1) < 0.01
    assert second.std() / expected < 0.1


@pytest.mark.parametrize("stochastic", [False, True])
def test_weights_in_bfloat16_are_rounded_from_fp32(stochastic: bool) -> None:
    named = parameters(torch.bfloat16)
    exact = [(name, tensor.detach().float().requires_grad_()) for name, tensor in named]
    optimizer = build(named, stochastic_rounding=stochastic, seed=5)
    take_steps(optimizer, [tensor for _, tensor in named], 1)
    full = build(exact)
    rounded_gradients = [gradient.bfloat16().float() for gradient in gradients(0)]
    for (_, tensor), gradient in zip(exact, rounded_gradients, strict=True):
        tensor.grad = gradient
    full.step()
    for (name, tensor), (_, target) in zip(named, exact, strict=True):
        expected = target.detach().bfloat16()
        if stochastic:
            index = indices(0, target.numel(), target.device).view(target.shape)
            bits = random_bits(index, seed=5, step=1, parameter=parameter_id(name))
            expected = round_with_bits(target.detach(), bits & 0xFFFF)
            assert not torch.equal(expected, target.detach().bfloat16())
        assert torch.equal(tensor, expected)


def test_small_updates_of_weights_survive_on_average() -> None:
    def moved(*, stochastic: bool) -> Tensor:
        weight = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
        optimizer = AdamW(
            [("w", weight)], lr=1e-4, weight_decay=0.0, stochastic_rounding=stochastic
        )
        for _ in range(100):
            weight.grad = torch.ones(64, 64, dtype=torch.bfloat16)
            optimizer.step()
        return 1 - weight.detach().float()

    assert moved(stochastic=False).count_nonzero() == 0
    assert abs(moved(stochastic=True).mean() / (100 * 1e-4) - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_step_is_unscaled_or_skipped(dtype: torch.dtype) -> None:
    """The host reads nothing from the device, and a skipped step changes no bit."""
    scaled, plain = parameters(dtype), parameters(dtype)
    optimizer, reference = build(scaled), build(plain)
    for step, (scale, found) in enumerate([(64.0, 0.0), (64.0, 1.0), (1.0, 0.0), (8.0, 0.0)]):
        # A gradient that must not reach anything.
        for (_, tensor), gradient in zip(scaled, gradients(step), strict=True):
            tensor.grad = (gradient.to(dtype) * (torch.nan if found else scale)).to(dtype)
        before = copy.deepcopy(optimizer.state_dict())["state"]
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor([found])  # type: ignore[attr-defined]
        with HostReads() as reads:
            optimizer.step()
        assert reads.found == []
        if found:
            after = optimizer.state_dict()["state"]
            assert all(
                torch.equal(bits(before[index][key]), bits(after[index][key]))
                for index in before
                for key in before[index]
            )
            continue
        for (_, tensor), gradient in zip(plain, gradients(step), strict=True):
            tensor.grad = gradient.to(dtype)
        reference.step()
    for (_, one), (_, other) in zip(scaled, plain, strict=True):
        assert torch.equal(one, other)


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_bits_are_independent_of_ranges_and_memory_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (6, 32, 4, 4)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def trained(memory_format: torch.memory_format) -> list[Tensor]:
        weight = start.to(torch.bfloat16).to(memory_format=memory_format).requires_grad_()
        optimizer = AdamW([("w", weight)], lr=0.1, stochastic_rounding=True)
        for step in range(3):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            weight.grad = gradient.to(torch.bfloat16).to(memory_format=memory_format)
            optimizer.step()
        assert weight.is_contiguous(memory_format=memory_format)
        return [weight.detach().contiguous(), *optimizer.state[weight].values()]

    whole = trained(torch.contiguous_format)
    monkeypatch.setattr(adamw, "_RANGE", {"cpu": 256})
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for one, other in zip(whole, trained(memory_format), strict=True):
            assert torch.equal(bits(one), bits(other))


def test_state_can_be_loaded() -> None:
    named, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, loaded = build(named), build(others)
    take_steps(optimizer, [tensor for _, tensor in named], 2)
    for (_, tensor), (_, other) in zip(named, others, strict=True):
        other.data.copy_(tensor.data)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, values in ((optimizer, named), (loaded, others)):
        take_steps(one, [tensor for _, tensor in values], 2)
    for (_, tensor), (_, other) in zip(named, others, strict=True):
        assert torch.equal(tensor, other)
        for key, value in optimizer.state[tensor].items():
            assert torch.equal(bits(value), bits(loaded.state[other][key]))


def test_torch_state_can_be_loaded() -> None:
    theirs, ours = parameters(), parameters()
    reference = torch.optim.AdamW(
        theirs, lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS, fused=True
    )
    take_steps(reference, [tensor for _, tensor in theirs], 2)
    optimizer = build(ours)
    for (_, tensor), (_, other) in zip(theirs, ours, strict=True):
        other.data.copy_(tensor.data)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for one, values in ((reference, theirs), (optimizer, ours)):
        take_steps(one, [tensor for _, tensor in values], 2)
    for (_, tensor), (_, other) in zip(theirs, ours, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_torch_state_of_another_memory_format_can_be_loaded(layout: str) -> None:
    start, dims = torch.randn(6, 4), (1, 0)
    if layout == "channels_last":
        start, dims = torch.randn(4, 3, 5, 6), (0, 2, 3, 1)
    inverse = [dims.index(dim) for dim in range(len(dims))]
    options: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPS}
    weight = start.permute(dims).contiguous().permute(inverse).requires_grad_()
    exact = start.double().requires_grad_()
    theirs = torch.optim.AdamW([weight], **options)
    reference = torch.optim.AdamW([exact], **options)

    def step(optimizer: torch.optim.Optimizer, tensor: Tensor) -> None:
        optimizer.zero_grad()
        (tensor**3).sum().backward()
        optimizer.step()

    step(theirs, weight)
    ours = build([weight])
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert not weight.is_contiguous()
    step(reference, exact)
    for _ in range(3):
        step(ours, weight)
        step(reference, exact)
    torch.testing.assert_close(weight.double(), exact, rtol=1e-5, atol=1e-6)
    moment = reference.state[exact]["exp_avg"]
    torch.testing.assert_close(ours.state[weight]["exp_avg"].double(), moment, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16])
def test_dtypes_that_cannot_hold_the_moments_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"is {'complex' if dtype.is_complex else 'float16'}"):
        AdamW([torch.zeros(2, dtype=dtype, requires_grad=True)])


def test_a_frozen_float16_tensor_has_no_moments() -> None:
    frozen, trained = torch.ones(2, dtype=torch.float16), torch.ones(2, requires_grad=True)
    optimizer = AdamW([frozen, trained])
    trained.sum().backward()
    optimizer.step()
    assert frozen.tolist() == [1, 1]
    assert (trained < 1).all()


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_of_torch_that_are_missing_are_refused(option: str) -> None:
    tensor = torch.zeros(2, requires_grad=True)
    tensor.grad = torch.ones(2)
    in_group = AdamW([{"params": [tensor], option: True}])
    loaded = AdamW([tensor])
    theirs = torch.optim.AdamW([tensor], **{option: True})  # type: ignore[arg-type]
    loaded.load_state_dict(theirs.state_dict())
    for optimizer in (in_group, loaded):
        with pytest.raises(ConfigError, match=f"optimizer = '{option}': is an option that this"):
            optimizer.step()
    assert tensor.tolist() == [0, 0]


def test_copy_takes_the_same_steps() -> None:
    original = build(parameters(torch.bfloat16), stochastic_rounding=True, seed=3)
    for _ in range(2):
        copied = copy.deepcopy(original)
        both = [each.param_groups[0]["params"] for each in (original, copied)]
        take_steps(original, both[0], 1)
        take_steps(copied, both[1], 1)
        assert all(torch.equal(own, other) for own, other in zip(*both, strict=True))
