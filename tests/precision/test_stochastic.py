from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from distmp.precision.stochastic import indices, parameter_id, random_bits, round_with_bits

COUNT = 2**16
CPU = torch.device("cpu")


def rounded(values: Tensor, *, step: int | Tensor = 1, start: int | Tensor = 0) -> Tensor:
    if isinstance(start, int):
        start = indices(start, values.numel(), values.device).view(values.shape)
    bits = random_bits(start, seed=3, step=step, parameter=parameter_id("w"))
    return round_with_bits(values, bits & 0xFFFF)


@pytest.mark.parametrize("magnitude", [1e-39, 1e-20, 0.3, 1e30])
def test_mean_of_rounded_values_is_unbiased(magnitude: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(8).uniform_(-magnitude, magnitude, generator=generator)
    repeated = values.repeat(COUNT)
    result = rounded(repeated).view(COUNT, 8)
    distance = result.double() - values.double()
    # Both neighbours occur; the error of the mean is that of random draws.
    step = distance.amax(0) - distance.amin(0)
    assert (step > 0).all()
    assert (distance.mean(0).abs() < 5 * step / 2 / COUNT**0.5).all()
    nearest = values.bfloat16().double() - values.double()
    assert (nearest.abs() > 5 * step / 2 / COUNT**0.5).any()


def test_result_is_one_of_two_neighbors() -> None:
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    result = rounded(values).double()
    down = (values.view(torch.int32) & -(2**16)).view(torch.float32).double()  # towards zero
    up = (down.float().view(torch.int32) + 2**16).view(torch.float32).double()
    assert ((result == down) | (result == up)).all()


def test_numbers_of_the_target_dtype_are_unchanged() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = patterns.view(torch.bfloat16)  # all of them: subnormals, zeros, infinities, NaN
    result = rounded(numbers.float())
    assert torch.equal(result.isnan(), numbers.isnan())
    kept = ~numbers.isnan()
    assert torch.equal(result.view(torch.int16)[kept], patterns[kept])


def test_nan_is_kept_and_overflow_becomes_infinity() -> None:
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    assert rounded(nans.view(torch.float32).repeat(1000)).isnan().all()
    largest = torch.finfo(torch.float32).max
    result = rounded(torch.full((10_000,), -largest))
    assert set(result.tolist()) <= {-torch.inf, torch.finfo(torch.bfloat16).min}
    assert result.isinf().float().mean() > 0.99  # FP32's largest number is nearly infinity


def test_bits_are_independent_of_tensor_partition() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    whole = rounded(values)
    parts = [rounded(values[a:b], start=a) for a, b in [(0, 1), (1, 257), (257, 257), (257, 1000)]]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(1000)
    assert torch.equal(rounded(values[order], start=order), whole[order])
    assert torch.equal(rounded(values.view(10, 100)), whole.view(10, 100))
    far = rounded(values, start=2**40)
    assert not torch.equal(far, whole)


def test_bits_depend_on_seed_step_parameter_and_element() -> None:
    index = indices(0, COUNT, CPU)

    def bits(seed: int = 0, step: int | Tensor = 0, name: str = "w") -> Tensor:
        return random_bits(index, seed=seed, step=step, parameter=parameter_id(name))

    base = bits()
    assert torch.equal(base, bits(step=torch.tensor(0.0)))  # as optimizers count
    for other in (bits(seed=1), bits(step=1), bits(name="v"), base.roll(1), bits(step=-1)):
        assert (base == other).float().mean() < 1e-3
        correlation = torch.corrcoef(torch.stack([base, other]).double())[0, 1]
        assert abs(correlation) < 5 / COUNT**0.5


def test_random_bits_are_uniform() -> None:
    bits = random_bits(indices(2**33, COUNT, CPU), seed=0, step=7, parameter=5)
    assert bits.min() >= 0
    assert bits.max() < 2**32
    for position in range(32):
        share = ((bits >> position) & 1).double().mean()
        assert abs(share - 0.5) < 5 * 0.5 / COUNT**0.5
    counts = torch.bincount(bits >> 24, minlength=256).double()
    expected = COUNT / 256
    assert ((counts - expected).square() / expected).sum() < 256 + 5 * (2 * 256) ** 0.5


def test_bits_agree_with_splitmix64() -> None:
    """Compare with Python's integers, which do not wrap around."""
    mask = 2**64 - 1

    def mixed(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    key = int.from_bytes(hashlib.sha256(b"4 9").digest()[:8], "little")
    stream = mixed(6 * 0x9E3779B97F4A7C15 + key & mask)
    expected = [mixed(index * 0x9E3779B97F4A7C15 + stream & mask) >> 32 for index in range(50)]
    assert random_bits(indices(0, 50, CPU), seed=4, step=6, parameter=9).tolist() == expected
