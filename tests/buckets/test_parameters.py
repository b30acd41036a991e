from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.buckets import FlatParameters, Fp32GradBuckets, PureParameters
from distmp.errors import ConfigError, TrainingError
from tests.ranks import ranks

DTYPES = [torch.bfloat16, torch.float16]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def flatten(
    model: nn.Module, dtype: torch.dtype, bucket_bytes: int = 10**6
) -> tuple[Fp32GradBuckets, FlatParameters]:
    """Hold the parameters in `dtype`, with FP32 masters."""
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    buckets = Fp32GradBuckets(model.named_parameters(), None, bucket_bytes)
    return buckets, FlatParameters(buckets, values)


def step(buckets: Fp32GradBuckets, loss: Callable[[], Tensor]) -> None:
    buckets.begin_step()
    buckets.begin_microbatch(last=True)
    loss().backward()
    buckets.end_microbatch()
    buckets.finish()


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_start_exact_and_parameters_are_their_rounding(
    dtype: torch.dtype, bucket_bytes: int
) -> None:
    model, original = make_model(), dict(make_model().named_parameters())
    identities = [id(parameter) for parameter in model.parameters()]
    _, masters = flatten(model, dtype, bucket_bytes)
    assert masters.named.keys() == original.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(masters.named[name], original[name])
        assert masters.named[name].dtype == torch.float32
        assert torch.equal(parameter, original[name].to(dtype))
        assert parameter.dtype == dtype
    assert [id(parameter) for parameter in model.parameters()] == identities


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_optimizer_moves_masters_and_publishing_rounds_them(dtype: torch.dtype) -> None:
    model = make_model()
    buckets, masters = flatten(model, dtype)
    # One update is too small to change a 16-bit parameter; a hundred updates are not.
    optimizer = torch.optim.SGD(masters.named.values(), lr=1e-5)
    start = {name: master.detach().clone() for name, master in masters.named.items()}
    for _ in range(100):
        step(buckets, lambda: model(torch.ones(2, 5, dtype=dtype)).sum())
        optimizer.step()
        masters.publish_weights()
    for name, parameter in model.named_parameters():
        master = masters.named[name]
        assert master.grad is not None
        assert torch.equal(parameter, master.to(dtype))
        # The gradient hardly changes, so this is 100 times the same step.
        moved = (master - start[name]).detach()
        assert torch.allclose(moved, -1e-3 * master.grad, rtol=0.05, atol=1e-5)
    assert torch.equal(masters.named["2.bias"].detach(), start["2.bias"] - _steps(2e-5, 100, start))


def _steps(size: float, count: int, start: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the distance that FP32 moves in `count` steps of `size`; the bias has gradient 2."""
    position = start["2.bias"].clone()
    for _ in range(count):
        position -= torch.tensor(size)
    return start["2.bias"] - position


def test_weights_that_are_loaded_between_steps_are_not_overwritten() -> None:
    model = make_model()
    _, masters = flatten(model, torch.bfloat16)
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"was written to .*model\.load_state_dict"):
            masters.publish_weights()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for name, master in masters.named.items():
            master.copy_(2 * loaded[name])
    masters.publish_weights(overwrite=True)
    masters.publish_weights()
    assert all(torch.equal(value, 2 * loaded[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_parameters_and_masters_are_the_bucket(dtype: torch.dtype) -> None:
    model = make_model()
    buckets, masters = flatten(model, dtype)
    step(buckets, lambda: model(torch.ones(2, 5, dtype=dtype)).sum())
    first, last = buckets.buffers[0].data_ptr(), buckets.buffers[0][-1:].data_ptr()
    for name, parameter in model.named_parameters():
        gradient = masters.named[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        assert gradient.data_ptr() == parameter.grad.data_ptr()
        assert first <= gradient.data_ptr() <= last
        assert gradient.dtype == torch.float32
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_buckets_are_not_copied(copied: Callable[[object], object]) -> None:
    for part in flatten(make_model(), torch.bfloat16):
        with pytest.raises(TrainingError, match="cannot be copied or pickled"):
            copied(part)


def test_memory_order_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = model[0].weight.detach().clone()
    _, masters = flatten(model, torch.bfloat16)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(masters.named["0.weight"], weight)
    assert torch.equal(model[0].weight, weight.bfloat16())


@ranks(2)
def test_shards_keep_memory_order() -> None:
    for shape, order in (((3, 4, 2, 2), (0, 2, 3, 1)), ((6, 5), (1, 0))):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        back = sorted(range(len(order)), key=order.__getitem__)
        value = values.permute(order).contiguous().permute(back)
        parameter = nn.Parameter(value.bfloat16())
        buckets = Fp32GradBuckets([("w", parameter)], dist.group.WORLD, shard=True)
        flat = FlatParameters(buckets, {"w": value})
        assert parameter.stride() == value.stride() != values.stride()
        assert torch.equal(parameter, values.bfloat16())
        expected = values.permute(order).flatten()[flat.shard_ranges["w"]]
        assert torch.equal(flat.named["w"], expected)


def test_pure_weights_are_the_parameters_and_get_sums_that_are_rounded_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.LayerNorm(3), nn.Linear(3, 2).bfloat16())
    parameters = dict(model.named_parameters())
    parameters["2.bias"].requires_grad_(False)
    buckets = Fp32GradBuckets(
        [(name, p) for name, p in parameters.items() if p.requires_grad], None
    )
    pure = PureParameters(buckets)
    assert set(pure.named) == parameters.keys() - {"2.bias"}
    buckets.begin_step()
    for index in range(3):
        buckets.begin_microbatch(last=index == 2)
        x = model[0](torch.full((1, 3), 1.0 + index / 128, dtype=torch.bfloat16))
        model[2](model[1](x.float()).bfloat16()).float().square().sum().backward()
        buckets.end_microbatch()
    buckets.finish()
    pure.round_gradients()
    for name, weight in pure.named.items():
        parameter = parameters[name]
        assert weight.data_ptr() == parameter.data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert weight.grad is not None
        assert torch.equal(weight.grad, parameter.grad.to(parameter.dtype))
        assert (weight is parameter) == name.startswith("1.")
    pure.publish_weights()
    rounded = [weight for name, weight in pure.named.items() if not name.startswith("1.")]
    assert all(weight.grad is None for weight in rounded)
