"""AdamW with state in 8 and 16 bits, compared with AdamW in float64 and torch's AdamW."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim import AdamW, adamw
from distmp.optim.moments import Place, block_size, dequantize, quantize
from distmp.precision.stochastic import parameter_id, stochastic_round
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


def build(named: Any, state: str | None = None, **options: Any) -> AdamW:
    options = {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPS} | options
    return AdamW(named, state=state, **options)


def take_steps(optimizer: torch.optim.Optimizer, tensors: list[Tensor], steps: int) -> None:
    for step in range(steps):
        for tensor, gradient in zip(tensors, gradients(step), strict=True):
            tensor.grad = gradient.to(tensor.dtype)
        optimizer.step()


def in_float64(steps: int, state: str | None = None) -> list[Tensor]:
    """Return the weights after steps of AdamW in float64; with moments rounded to a format."""
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
            if state == "fp8" and weights[index].dim() > 1 and weights[index].shape[0] != 5:
                first = through_fp8(first, 32)
            elif state is not None:
                first = first.to(torch.bfloat16).double()
            moments[index] = first, second
    return weights


def through_fp8(values: Tensor, block: int) -> Tensor:
    """Round to the nearest of all e4m3 numbers times the scale of each block."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    blocks = values.reshape(-1, block)
    scales = blocks.abs().amax(1, keepdim=True) / 448
    nearest = ((blocks / scales).unsqueeze(-1) - numbers).abs().argmin(-1)
    return (numbers[nearest] * scales).view(values.shape)


def test_with_fp32_state_updates_are_those_of_float64_and_of_torch() -> None:
    named, theirs = parameters(), [tensor for _, tensor in parameters()]
    take_steps(build(named, "fp32"), [tensor for _, tensor in named], 20)
    reference = torch.optim.AdamW(
        theirs, lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS, fused=True
    )
    take_steps(reference, theirs, 20)
    for (_, ours), their, exact in zip(named, theirs, in_float64(20), strict=True):
        torch.testing.assert_close(ours, their, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("state", ["bf16", "fp8"])
def test_updates_differ_from_float64_by_the_rounding_of_moments(state: str) -> None:
    named = parameters()
    optimizer = build(named, state)
    take_steps(optimizer, [tensor for _, tensor in named], 20)
    start = [tensor.detach().double() for _, tensor in parameters()]
    for (_, ours), exact, rounded, first in zip(
        named, in_float64(20), in_float64(20, state), start, strict=True
    ):
        moved = (exact - first).norm()
        # The second moment in bfloat16 has an error of 2^-9 in each step.
        assert (ours.double() - rounded).norm() < 0.01 * moved
        assert (ours.double() - exact).norm() < (0.1 if state == "fp8" else 0.01) * moved


def test_the_format_of_fp8_state() -> None:
    named = parameters()
    optimizer = build(named, "fp8")
    take_steps(optimizer, [tensor for _, tensor in named], 2)
    found = {
        name: {key: (value.dtype, tuple(value.shape)) for key, value in state.items()}
        for (name, _), state in zip(named, optimizer.state.values(), strict=True)
    }
    e4m3, bf16, fp32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    scales = {"matrix": (24, 3), "wide": (3, 16), "conv": (4, 1)}
    for name, shape in SHAPES.items():
        expected: dict[str, Any] = {"step": (fp32, ()), "exp_avg_sq": (bf16, shape)}
        expected["exp_avg"] = (e4m3 if name in scales else bf16, shape)
        if name in scales:
            expected["exp_avg_scale"] = (fp32, scales[name])
        assert found[name] == expected


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((10, 1024), 32),
        ((10, 96), 32),
        ((10, 48), None),
        ((10, 257), None),
        ((64, 3, 4, 8), 32),
        ((4096,), None),
        ((), None),
        ((0, 64), 32),
    ],
)
def test_blocks_divide_rows(shape: tuple[int, ...], block: int | None) -> None:
    assert block_size(torch.Size(shape)) == block


@pytest.mark.parametrize("magnitude", [1e-15, 1e-6, 1.0, 1e30])
def test_quantized_values_are_the_nearest(magnitude: float) -> None:
    values = torch.randn(6 * 64, generator=torch.Generator().manual_seed(4)) * magnitude
    values[64:128] = 0
    codes, scales = quantize(values, 64)
    assert (codes.shape, scales.shape) == (values.shape, (6,))
    exact = values.double().view(-1, 64)
    found = dequantize(codes, scales, 64).double().view(-1, 64)
    assert torch.equal(found[1], torch.zeros(64, dtype=torch.float64))
    if magnitude < 1e-12:  # smaller than the smallest scale
        return
    kept = [0, 2, 3, 4, 5]
    expected = through_fp8(exact[kept], 64)
    step = exact[kept].abs() * 2**-4 + exact[kept].abs().amax(1, keepdim=True) / 448 * 2**-10
    assert ((found[kept] - exact[kept]).abs() <= step * (1 + 1e-5)).all()
    # Halves between two numbers may round differently, and scales are FP32 here.
    assert torch.isclose(found[kept], expected, rtol=1e-5, atol=0).double().mean() > 0.99


def test_a_second_moment_that_changes_by_less_than_its_rounding_error_follows_the_gradient() -> (
    None
):
    """In bfloat16, rounded to nearest, it would stay: each step changes it by 0.1%."""
    weight = torch.zeros(64, 64, requires_grad=True)
    optimizer = AdamW([("w", weight)], lr=0.0, state="bf16")
    for step in range(600):
        weight.grad = torch.full((64, 64), 1.0 if step < 100 else 0.1)
        optimizer.step()
    expected = (1 - 0.999**100) * 0.999**500 + 0.01 * (1 - 0.999**500)
    second = optimizer.state[weight]["exp_avg_sq"].double()
    assert abs(second.mean() / expected - 1) < 0.01
    assert second.std() / expected < 0.1


@pytest.mark.parametrize("stochastic", [False, True])
def test_weights_in_bfloat16_are_rounded_from_fp32(stochastic: bool) -> None:
    named, state = parameters(torch.bfloat16), "fp32"
    exact = [(name, tensor.detach().float().requires_grad_()) for name, tensor in named]
    optimizer = build(named, state, stochastic_rounding=stochastic, seed=5)
    take_steps(optimizer, [tensor for _, tensor in named], 1)
    full = build(exact, state)
    rounded_gradients = [gradient.bfloat16().float() for gradient in gradients(0)]
    for (_, tensor), gradient in zip(exact, rounded_gradients, strict=True):
        tensor.grad = gradient
    full.step()
    for (name, tensor), (_, target) in zip(named, exact, strict=True):
        expected = target.detach().bfloat16()
        if stochastic:
            key = parameter_id(name)
            expected = stochastic_round(target.detach(), seed=5, step=1, parameter=key)
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


@pytest.mark.parametrize("state", ["fp32", "bf16", "fp8"])
def test_a_step_on_the_device_is_unscaled_or_skipped(state: str) -> None:
    """The host reads nothing from the device, and a skipped step changes no bit."""
    scaled, plain = parameters(), parameters()
    optimizer, reference = build(scaled, state), build(plain, state)
    for step, (scale, found) in enumerate([(64.0, 0.0), (64.0, 1.0), (1.0, 0.0), (8.0, 0.0)]):
        # A gradient that must not reach anything.
        for (_, tensor), gradient in zip(scaled, gradients(step), strict=True):
            tensor.grad = gradient * (torch.nan if found else scale)
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
            tensor.grad = gradient
        reference.step()
    for (_, one), (_, other) in zip(scaled, plain, strict=True):
        assert torch.equal(one, other)


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_ranges_and_memory_formats_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (6, 32, 4, 4)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def trained(memory_format: torch.memory_format) -> list[Tensor]:
        weight = start.to(torch.bfloat16).to(memory_format=memory_format).requires_grad_()
        optimizer = AdamW([("w", weight)], lr=0.1, state="fp8", stochastic_rounding=True)
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


def test_groups_may_have_their_own_state() -> None:
    named = parameters()
    optimizer = AdamW(
        [{"params": named[:1], "state": "fp8"}, {"params": named[1:], "lr": torch.tensor(0.1)}]
    )
    take_steps(optimizer, [tensor for _, tensor in named], 1)
    kinds = [state["exp_avg"].dtype for state in optimizer.state.values()]
    assert kinds == [torch.float8_e4m3fn, *[torch.float32] * 4]


def test_a_loaded_state_keeps_its_dtypes() -> None:
    """torch converts state to the dtype of the weights."""
    named, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, loaded = build(named, "fp8"), build(others, "fp8")
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


def test_a_state_of_torch_can_be_loaded() -> None:
    theirs, ours = parameters(), parameters()
    reference = torch.optim.AdamW(
        theirs, lr=RATE, weight_decay=DECAY, betas=BETAS, eps=EPS, fused=True
    )
    take_steps(reference, [tensor for _, tensor in theirs], 2)
    optimizer = build(ours)
    for (_, tensor), (_, other) in zip(theirs, ours, strict=True):
        other.data.copy_(tensor.data)
    optimizer.load_state_dict(reference.state_dict())
    for one, values in ((reference, theirs), (optimizer, ours)):
        take_steps(one, [tensor for _, tensor in values], 2)
    for (_, tensor), (_, other) in zip(theirs, ours, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-6)


def test_a_copy_takes_the_same_steps() -> None:
    named = parameters()
    optimizer = build(named, "fp8", seed=3)
    take_steps(optimizer, [tensor for _, tensor in named], 2)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    restored = torch.load(buffer, weights_only=False)
    copied = [tensor for group in restored.param_groups for tensor in group["params"]]
    for one in (optimizer, restored):
        tensors = [tensor for group in one.param_groups for tensor in group["params"]]
        take_steps(one, tensors, 2)
    for (_, tensor), other in zip(named, copied, strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "fp4"}, r"optim\.state = 'fp4': did you mean 'fp8'|choose one of"),
        ({"betas": (0.9, 1.0)}, r"optim\.options\.betas = .*less than 1"),
        ({"betas": (0.9,)}, r"optim\.options\.betas"),
        ({"eps": -1.0}, r"optim\.options\.eps = -1\.0: use a finite number of 0 or more"),
        ({"eps": float("nan")}, r"optim\.options\.eps = nan"),
        ({"eps": "1e-8"}, r"optim\.options\.eps = '1e-8'"),
        ({"betas": 0.9}, r"optim\.options\.betas = 0\.9: use two numbers"),
        ({"betas": ("0.9", "0.95")}, r"optim\.options\.betas"),
        ({"lr": -1e-3}, r"optim\.lr = -0\.001: use a finite number of 0 or more"),
        ({"lr": float("nan")}, r"optim\.lr = nan"),
        ({"lr": torch.ones(2)}, r"optim\.lr = \(2,\): use a tensor with one element"),
        ({"weight_decay": -0.1}, r"optim\.weight_decay = -0\.1"),
        ({"weight_decay": None}, r"optim\.weight_decay = None"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW(parameters(), **options)


@pytest.mark.parametrize("setting", [{"lr": -1.0}, {"betas": (2, 3)}, {"weight_decay": -0.1}])
def test_groups_that_cannot_be_used(setting: dict[str, Any]) -> None:
    optimizer = AdamW(parameters())
    tensor = torch.zeros(2, requires_grad=True)
    with pytest.raises(ConfigError, match=r"optim\."):
        optimizer.add_param_group({"params": [("more", tensor)], **setting})
    with pytest.raises(ConfigError, match=r"is complex"):
        AdamW([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])


def test_shards_that_divide_a_block_are_refused() -> None:
    shard = torch.zeros(96 + 16, requires_grad=True)
    optimizer = AdamW([("w", shard)], state="fp8")
    with pytest.raises(
        ConfigError, match=r"optim\.state = 'fp8': needs shards of whole blocks of 32"
    ):
        optimizer.shard({shard: Place(torch.Size((24, 96)), 96)})
    AdamW([("w", shard)], state="bf16").shard({shard: Place(torch.Size((24, 96)), 96)})
