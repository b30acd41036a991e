from __future__ import annotations

import math

import numpy as np
import pytest

from distmp.telemetry.thinning import smoothed, thinned


def test_thinning_keeps_spikes_gaps_and_order() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=50_000)
    values[12_345], values[30_001] = 99.0, -99.0
    values[40_000:41_000] = math.nan
    steps = np.arange(50_000, dtype=np.float64)
    kept_steps, kept = thinned(steps, values)
    assert len(kept) <= 2100
    assert (np.diff(kept_steps) > 0).all()
    assert kept[kept_steps == 12_345] == 99.0
    assert kept[kept_steps == 30_001] == -99.0
    assert np.isnan(kept[(kept_steps > 40_050) & (kept_steps < 40_950)]).all()
    assert ((kept_steps > 40_050) & (kept_steps < 40_950)).any()


@pytest.mark.parametrize("count", [1, 79, 80, 400, 1001])
def test_smoothing_is_a_centered_mean_of_known_values(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.normal(size=count)
    values[rng.random(count) < 0.3] = math.nan
    centers, means = smoothed(np.arange(count, dtype=np.float64), values)
    half = count // 80
    assert centers[0] == 0
    assert centers[-1] == count - 1
    for center, mean in zip(centers.astype(int), means, strict=True):
        window = [
            values[i]
            for i in range(center - half, center + half + 1)
            if 0 <= i < count and not math.isnan(values[i])
        ]
        expected = math.fsum(window) / len(window) if window else math.nan
        assert mean == pytest.approx(expected, nan_ok=True)
