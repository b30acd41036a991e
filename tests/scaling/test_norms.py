from __future__ import annotations

import math

import pytest
import torch

from distmp.scaling.norms import CHUNK, chunk_norms

SIZES = (1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


# Squares of 1e-25 and 1e20 are beyond FP32, as is the norm of values up to 3e38.
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        *((dtype, 300.0) for dtype in FLOATS),
        *((dtype, value) for dtype in FLOATS[1:] for value in (0.0, 1e-43, 1e-25, 1e20, 3e38)),
    ],
)
def test_chunks_cover_the_tensor(dtype: torch.dtype, largest: float, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in SIZES]
    tensors.append(torch.randn(CHUNK, 2, generator=generator).t())
    unit = max(float(tensor.abs().max()) for tensor in tensors)
    tensors = [(tensor / unit * largest).to(device, dtype) for tensor in tensors]
    norms = chunk_norms(tensors)
    assert norms.dtype is torch.float64
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert math.isclose(norms.norm(), expected, rel_tol=5e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_nonfinite_elements_are_detected(place: int, value: float) -> None:
    tensor = torch.zeros(2 * CHUNK + 1)
    tensor[place] = value
    norms = chunk_norms([torch.ones(3), tensor])
    assert norms.isfinite().logical_not().sum() == 1
