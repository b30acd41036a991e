"""Projects measured gradients onto those of single microbatches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distmp.testing.classify import Projection, SplitResult
from distmp.testing.reference import Gradients

# Elements that several microbatches must have before rounding shows anything.
_FEWEST = 16
# Significant bits of bfloat16 and float16.
_BITS = (8, 11)


def measured(
    split: SplitResult,
    gradients: Mapping[str, Tensor | None],
    own: Gradients,
    exact: Gradients,
    sample_means: Mapping[str, Tensor],
) -> SplitResult:
    """Add what was measured to the result of a division.

    Args:
        split: The result, without measurements.
        gradients: The measured gradients of trained parameters, float64.
        own: Gradients of microbatches in the dtypes of the run.
        exact: Gradients of microbatches in float64.
        sample_means: Sums of the mean gradients of each microbatch's samples; may be empty.
    """
    total = split.weights.sum() or 1.0
    for name, gradient in gradients.items():
        wanted, ideal = own.stacked[name].sum(0) / total, exact.stacked[name].sum(0) / total
        norm = float(wanted.norm())
        if gradient is not None and not gradient.isfinite().all():
            split.not_finite.add(name)
        else:
            flat = torch.zeros_like(wanted) if gradient is None else gradient.flatten()
            split.missing.update([name] if norm and not flat.any() else [])
            noise = float((wanted - ideal).norm()) / norm if norm else 0.0
            rounded = _is_rounded(flat, own.stacked[name], ideal, split)
            terms = torch.cat([own.stacked[name], sample_means.get(name, own.stacked[name][:0])])
            inner, gram = (terms @ flat).cpu().numpy(), (terms @ terms.T).cpu().numpy()
            split.parameters[name] = Projection(float(flat @ flat), inner, gram, noise, rounded)
            shards = _shard_factors(flat, wanted, len(split.weights)) if norm else ()
            split.shard_factors = split.shard_factors or shards
    return split


def _is_rounded(gradient: Tensor, terms: Tensor, ideal: Tensor, split: SplitResult) -> bool:
    """Return whether a sum of several microbatches has the few significant bits of a 16-bit dtype.

    The sum may have been multiplied by a number of ranks, microbatches or tokens afterwards.
    """
    several = (terms != 0).sum(0) > 1
    if int(several.sum()) < _FEWEST:
        return False
    ranks, count = split.weights.shape
    scales = {1.0, ranks, count, ranks * count, split.weights.sum(), split.weights.sum() / ranks}
    single = max(_share(terms[:, several].flatten(), bits) for bits in _BITS)
    return any(
        _share(gradient[several] * scale, bits) > 0.99
        for bits in _BITS
        for scale in scales
        # What is short already has a short sum.
        if bits == _BITS[0] or single < 0.5
    ) and all(_share(ideal[several] * scale, _BITS[1]) < 0.5 for scale in scales)


def _share(values: Tensor, bits: int) -> float:
    """Return the share of nonzero values with at most so many significant bits, up to FP32's."""
    values = values[values != 0]
    mantissa = torch.frexp(values).mantissa * 2.0**bits
    short = (mantissa - mantissa.round()).abs() <= 2.0 ** (bits - 22)
    return float(short.double().mean()) if len(values) else 0.0


def _shard_factors(gradient: Tensor, wanted: Tensor, ranks: int) -> tuple[float, ...]:
    """Return the factors between parts of a gradient and the wanted one, if there are several."""
    shown = wanted.abs() > 0.05 * wanted.abs().max()
    ratios = (gradient[shown] / wanted[shown]).sort().values
    apart = ratios.diff() > 5e-4 * ratios.abs().max()
    factors = [*ratios[:1].tolist(), *ratios[1:][apart].tolist()]
    return tuple(factors) if 1 < len(factors) <= ranks and factors[-1] < 1 + 1e-3 else ()
