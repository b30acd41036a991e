"""Stochastic rounding with random bits that depend only on where and when a value is rounded.

A value between two numbers of the target dtype becomes the upper one with a probability
proportional to its distance from the lower one, so the mean of the result is the value. Small
updates of 16-bit numbers then survive on average, where rounding to nearest loses all of them.

The random bits are a hash of seed, step, parameter and element. There is no generator, so the bits
do not depend on the device, on the division of a tensor over ranks, or on what was drawn before.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

# Constants of SplitMix64 (Steele, Lea and Flood 2014) as signed numbers, which int64 tensors need.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)


def parameter_id(name: str) -> int:
    """Return the number of a parameter in `random_bits`, from its name in the model."""
    return zlib.crc32(name.encode())


def random_bits(index: Tensor, *, seed: int, step: Tensor | int, parameter: int) -> Tensor:
    """Return 32 random bits for each element, the same ones on every device.

    The host does not wait for the device.

    Args:
        index: Index of each element in the flattened full parameter, int64, any shape.
        seed: Seed of the run.
        step: Number of the update; a 0-dim tensor may be on the device.
        parameter: `parameter_id` of the parameter.

    Returns:
        Numbers from 0 to 2^32 - 1, int64, in the shape of `index`.
    """
    digest = hashlib.sha256(f"{seed} {parameter}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    number = torch.as_tensor(step, device=index.device).to(torch.int64)
    stream = mixed(number * INCREMENT + key)
    return _bits_of_stream(index, stream)


def uniform(shape: torch.Size, key: Tensor) -> Tensor:
    """Return random numbers for stochastic rounding, a function of the key and the element.

    Args:
        shape: Shape of the result.
        key: Any number, int64, 0-dim.

    Returns:
        FP32 from 0 to below 1, on the device of the key.
    """
    if torch.compiler.is_compiling():
        return _uniform_compiled(key, list(shape))
    return _uniform(key, shape)


def _uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    index = torch.arange(math.prod(shape), dtype=torch.int64, device=key.device)
    bits = _bits_of_stream(index, mixed(key * INCREMENT))
    return ((bits >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


# An operator, because the compiler computes indices without the wrap-around of int64.
@torch.library.custom_op("distmp::uniform", mutates_args=())
def _uniform_compiled(key: Tensor, shape: Sequence[int]) -> Tensor:
    return _uniform(key, shape)


@_uniform_compiled.register_fake
def _(key: Tensor, shape: Sequence[int]) -> Tensor:
    return key.new_empty(shape, dtype=torch.float32)


def _bits_of_stream(index: Tensor, stream: Tensor) -> Tensor:
    return (mixed(index * INCREMENT + stream) >> 32) & 0xFFFFFFFF


def mixed(values: Tensor) -> Tensor:
    """Return the hash of each int64 value; overwrites `values`. Products wrap around."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        # `>>` copies the sign bit; the mask makes it a logical shift.
        values ^= (values >> shift) & (2 ** (64 - shift) - 1)
        if factor is not None:
            values *= factor
    return values


def round_with_bits(values: Tensor, bits: Tensor) -> Tensor:
    """Return values in bfloat16, rounded up or down in magnitude by 16 random bits.

    Args:
        values: FP32.
        bits: Numbers from 0 to 2^16 - 1, of an integer dtype, in the shape of `values`.

    Returns:
        bfloat16. Values that it represents are unchanged, among them infinity and NaN. A value
        beyond its largest finite number (3.39e38) may become infinity.
    """
    # bfloat16 is the upper half of FP32: a carry out of the lower half rounds up.
    rounded = (values.view(torch.int32) + bits.to(torch.int32)) & -(2**16)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values).to(torch.bfloat16)


def indices(start: int, count: int, device: torch.device) -> Tensor:
    """Return the indices of consecutive elements, int64, for `random_bits`."""
    return torch.arange(start, start + count, dtype=torch.int64, device=device)
