from __future__ import annotations

import math

import pytest
import torch

from distmp.scaling.norms import CHUNK, chunk_norms

SIZES = (1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_chunks_make_up_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [(100 * torch.randn(size, generator=generator)).to(dtype) for size in SIZES]
    tensors.append(torch.randn(CHUNK, 2, generator=generator).to(dtype).t())
    norms = chunk_norms(tensors)
    assert norms.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert math.isclose(norms.double().norm(), expected, rel_tol=5e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_what_is_not_finite_shows(place: int, value: float) -> None:
    tensor = torch.zeros(2 * CHUNK + 1)
    tensor[place] = value
    norms = chunk_norms([torch.ones(3), tensor])
    assert norms.isfinite().logical_not().sum() == 1
