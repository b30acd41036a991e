"""The classes of wrong gradients, and which of them explains what was measured.

A measured gradient is compared with weighted sums of the gradients of single microbatches. Each
class predicts the weights, up to a factor that depends on the number of ranks or microbatches.
Several divisions of the same samples decide between classes that predict the same for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from distmp.errors import DistmpError, listed, rank_names

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Relative error of FP32 arithmetic, beyond what the float64 reference shows of it.
_TOLERANCE = 2e-5
# A gradient whose rounding error is above this share shows nothing but rounding.
_NOISE = 0.1
# Relative error of 16-bit sums of few terms.
_ROUNDED = 2.0**-6

# What is wrong, by class; docs/testing.md has the line that mends each.
CLASSES = {
    "right": "agrees",
    "ranks_twice": "divided by the number of ranks twice",
    "ranks_never": "multiplied by the number of ranks: summed over ranks, never divided",
    "microbatches_twice": "divided by the number of microbatches once too often",
    "microbatches_never": "multiplied by the number of microbatches: never divided by it",
    "short_update": "divided by the microbatches of a full update, although it has fewer",
    "accumulated_twice": "accumulated twice",
    "halved": "half of what it should be",
    "token_mean": "agrees with the mean over tokens",
    "sample_mean": "agrees with the mean over samples",
    "sum": "agrees with the sum",
    "microbatch_means": "agrees with the mean of microbatch means",
    "rank_means": "agrees with the mean of rank means",
    "pass_means": "agrees with the mean of the means of each microbatch over ranks",
    "reduced_again": "microbatches reduced once more with each later one",
    "last_microbatch": "only the last microbatch counts",
    "own_rank": "only this rank's microbatches count: never reduced",
    "summed_in_16_bits": "microbatches summed in 16 bits",
    "reduced_in_16_bits": "ranks reduced in 16 bits",
    "same_data": "only the microbatches of another rank count: ranks train on the same data",
    "different_weights": "the weights differ between ranks",
    "missing": "no gradient, or zero",
    "in_no_optimizer": "in no parameter group of the optimizer",
    "skipped": "the optimizer was not called equally often on all ranks",
    "scheduler": "the learning rate changed after a skipped step",
    "loss_scale": "multiplied by a loss scale, or divided by it twice",
    "miscounted": "divided by another number",
    "clipped": "clipped before it was read",
    "shard_clipped": "clipped by the norm of each rank's shard",
    "not_finite": "NaN or infinite",
    "weighted": "microbatches count with wrong weights",
    "unexplained": "in no class",
}


class Projection(NamedTuple):
    """A measured gradient of a parameter beside those of single microbatches.

    Attributes:
        square: Squared norm of the measured gradient.
        inner: Inner product with the gradient of each microbatch, of shape (terms,).
        gram: Inner products between these, of shape (terms, terms).
        noise: Error that the dtypes of the run cause, relative to the gradient wanted.
        in_16_bits: Whether the gradient is a sum of several terms that was rounded to 16 bits.
    """

    square: float
    inner: Array
    gram: Array
    noise: float = 0.0
    in_16_bits: bool = False


@dataclass
class SplitResult:
    """What was measured with one division of the samples.

    Attributes:
        name: What is special about the division.
        rank: This rank.
        weights: Weight of each microbatch, of shape (ranks, microbatches).
        max_norm: What the gradient is clipped to on purpose.
        parameters: By name, of parameters with a finite gradient. Terms after those of microbatches
            are their parts of the mean over samples.
        missing: Names of parameters without a gradient that they should have.
        not_finite: Names of parameters whose gradient is NaN or infinite.
        shard_factors: Factors below 1 between parts of the measured and the wanted gradient, at
            most one per rank; none if there is one factor, or more.
    """

    name: str
    rank: int
    weights: Array
    max_norm: float | None = None
    parameters: dict[str, Projection] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    not_finite: set[str] = field(default_factory=set)
    shard_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class GradientMismatch:
    """A way in which gradients are wrong.

    Attributes:
        kind: A key of `CLASSES`.
        parameters: Names of the parameters.
        text: What was measured.
        size: Norm of the error relative to the gradient wanted, the largest of all splits; NaN if
            it was not measured.
    """

    kind: str
    parameters: tuple[str, ...]
    text: str
    size: float = float("nan")

    def __str__(self) -> str:
        size = f" ({self.size:.2g} off, relative)" if self.size == self.size else ""
        return f"{listed(list(self.parameters))}: {self.text}{size}"


class GradientError(DistmpError, AssertionError):
    """The gradient is not the one wanted.

    Attributes:
        mismatches: What is wrong, by class.
    """

    def __init__(self, message: str, mismatches: Sequence[GradientMismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


# Predictions


class _Label(NamedTuple):
    row: int  # index of `_Predictions.kinds`
    factor: int = 0  # index of `_factors`


def _factors(ranks: int, microbatches: int, most: int) -> list[tuple[str, str, float]]:
    """Return class, words and value of each factor; the simplest first."""
    r, m = ranks, microbatches
    return [
        ("right", "", 1.0),
        ("ranks_twice", "1 / ranks", 1 / r),
        ("ranks_never", "ranks", r),
        ("microbatches_twice", "1 / microbatches", 1 / m),
        ("microbatches_never", "microbatches", m),
        ("short_update", "microbatches / those of a full update", m / most),
        ("accumulated_twice", "2", 2.0),
        ("halved", "1 / 2", 0.5),
        ("ranks_twice", "1 / (ranks * microbatches)", 1 / (r * m)),
        ("ranks_never", "ranks * microbatches", r * m),
        ("ranks_twice", "1 / ranks ** 2", 1 / r**2),
        ("ranks_never", "ranks ** 2", r**2),
        ("microbatches_twice", "1 / microbatches ** 2", 1 / m**2),
    ]


def inverse(values: Array) -> Array:
    """Return 1 / values, and 0 for 0."""
    return np.where(values > 0, 1 / np.where(values > 0, values, 1), 0)


def _coefficients(split: SplitResult, *, sample_means: bool) -> list[tuple[str, Array]]:
    """Return class and weights of the terms of each prediction; the simplest first."""
    w, (ranks, count) = split.weights, split.weights.shape
    total, position, rows = inverse(w.sum()), np.arange(count), np.arange(ranks)[:, None]
    by_rank, means = inverse(w.sum(1, keepdims=True)), inverse(w)
    last, own = position == count - 1, rows == split.rank
    found = [
        ("token_mean", total),
        ("sum", 1.0),
        ("rank_means", by_rank / ranks),
        ("microbatch_means", means / (ranks * count)),
        ("microbatch_means", means / max(1, int((w > 0).sum()))),
        ("pass_means", inverse(w.sum(0)) / count),
        ("reduced_again", total * float(ranks) ** (count - 1 - position)),
        ("last_microbatch", last * total),
        ("last_microbatch", last * inverse(w[:, -1].sum())),
        ("last_microbatch", last * means / ranks),
        *(("own_rank", own * each) for each in (total, by_rank, means / count, 1.0)),
        *(("same_data", (rows == row) * by_rank) for row in range(ranks)),
    ]
    flat: list[tuple[str, Array]]
    flat = [(kind, np.broadcast_to(each, w.shape).ravel()) for kind, each in found]
    if not sample_means:
        return flat
    mean = np.repeat([0.0, 1.0], w.size)
    return [*((k, np.append(row, 0 * row)) for k, row in flat), ("sample_mean", mean)]


class _Predictions:
    """All predictions for one division of the samples."""

    def __init__(self, split: SplitResult, wanted: str, most: int) -> None:
        self.split = split
        terms = max((len(each.inner) for each in split.parameters.values()), default=0)
        found = _coefficients(split, sample_means=terms > split.weights.size)
        named = dict(reversed(found))
        # Without terms of samples, all samples have the same weight.
        right = named.get(wanted, named["token_mean"])
        self.kinds = ["right", *(kind for kind, _ in found)]
        self._rows = np.stack([right, *(row for _, row in found)])
        ranks, count = split.weights.shape
        self.factors = _factors(ranks, count, most)
        self._square = sum(each.square for each in split.parameters.values())
        # Whatever the gradient is, it has been clipped by its own norm.
        scales = np.tile([value for *_, value in self.factors], (len(self._rows), 1))
        if split.max_norm is not None:
            squares = [self._squares(each) for each in split.parameters.values()]
            norms = np.sqrt(np.sum(squares, 0))[:, None] * scales
            scales = scales * np.minimum(1, split.max_norm / (norms + 1e-6))
        self._scales, self._wanted = scales, right * scales[0, 0]

    def _squares(self, p: Projection) -> Array:
        return np.maximum(np.einsum("hk,kl,hl->h", self._rows, p.gram, self._rows), 0)

    def summed(self, names: Iterable[str]) -> Projection:
        """Return the projection of several parameters together, those that were measured."""
        parameters = self.split.parameters
        found = [parameters[name] for name in names if name in parameters]
        empty = 0 * self._wanted
        inner = sum((p.inner for p in found), start=empty)
        gram = sum((p.gram for p in found), start=np.outer(empty, empty))
        noise = max((p.noise for p in found), default=0.0)
        return Projection(sum(p.square for p in found), inner, gram, noise)

    def against_wanted(self, p: Projection) -> tuple[float, float, float]:
        """Return the squared norm of the gradient wanted, its product with it, and the error."""
        norm, inner = float(self._wanted @ p.gram @ self._wanted), float(self._wanted @ p.inner)
        return max(0.0, norm), inner, max(0.0, p.square - 2 * inner + norm)

    def shows(self, name: str) -> bool:
        """Return whether there is a gradient that shows more than rounding errors."""
        p = self.split.parameters.get(name)
        return p is not None and (p.noise <= _NOISE or p.square > 1e-4 * self._square)

    def allowed(self, p: Projection) -> float:
        """Return the relative error that arithmetic explains."""
        return min(_NOISE, _TOLERANCE + 2 * p.noise + _ROUNDED * p.in_16_bits)

    def fits(self, name: str) -> set[_Label]:
        """Return the predictions that a parameter's gradient agrees with."""
        p = self.split.parameters[name]
        squares = self._squares(p)[:, None] * self._scales**2
        errors = p.square - 2 * (self._rows @ p.inner)[:, None] * self._scales + squares
        agree = np.sqrt(np.maximum(errors, 0)) <= self.allowed(p) * np.sqrt(squares)
        return {_Label(int(row), int(column)) for row, column in np.argwhere(agree)}


# The diagnosis of one rank


def diagnose(splits: Sequence[SplitResult], wanted: str) -> list[GradientMismatch]:
    """Return what is wrong with gradients, in the order of `CLASSES`.

    Args:
        splits: What this rank has measured with each division of the samples.
        wanted: The class that is right: `token_mean`, `sample_mean` or `sum`.
    """
    most = max((split.weights.shape[1] for split in splits), default=1)
    predictions = [_Predictions(split, wanted, most) for split in splits]
    broken = sorted({name for split in splits for name in split.not_finite})
    found = [*_absent("not_finite", splits, broken), *_compared(predictions, wanted)]
    found += _rounded(predictions)
    order = list(CLASSES)
    return sorted(found, key=lambda mismatch: order.index(mismatch.kind))


def _absent(
    kind: str, splits: Sequence[SplitResult], names: Iterable[str]
) -> Iterator[GradientMismatch]:
    """Report parameters whose gradient is `missing` or `not_finite` in some of the splits."""
    absent = [name for name in names if any(name in getattr(split, kind) for split in splits)]
    where = [split.name for split in splits if getattr(split, kind) & {*absent}]
    if absent:
        text = CLASSES[kind] + ("" if len(where) == len(splits) else f", with {where[0]}")
        yield GradientMismatch(kind, tuple(absent), text)


def _compared(predictions: Sequence[_Predictions], wanted: str) -> Iterator[GradientMismatch]:
    """Explain all parameters with as few classes as possible."""
    names = dict.fromkeys(n for each in predictions for n in each.split.parameters)
    labels = {
        name: set.intersection(*(each.fits(name) for each in predictions if each.shows(name)))
        for name in names
        if any(each.shows(name) for each in predictions)
    }
    left = [name for name, fits in labels.items() if _Label(0) not in fits]
    order, kinds = list(CLASSES), predictions[0].kinds
    while counts := [label for name in left for label in labels[name]]:
        simplest = sorted(set(counts), key=lambda each: (order.index(kinds[each.row]), each))
        best = max(simplest, key=counts.count)
        explained = [name for name in left if best in labels[name]]
        left = [name for name in left if name not in explained]
        yield _mismatch(predictions, best, explained, wanted)
    yield from _unexplained(predictions, left)


def _mismatch(
    predictions: Sequence[_Predictions], label: _Label, names: list[str], wanted: str
) -> GradientMismatch:
    worst = max(predictions, key=lambda each: _size([each], names))
    values = np.array([[value for *_, value in each.factors] for each in predictions])
    # Factors that are equal in every split.
    same = np.flatnonzero((values == values[:, [label.factor]]).all(0))
    kinds, words, (value, *_) = zip(*(worst.factors[column] for column in same), strict=True)
    kind, mean, shape = kinds[0], CLASSES[wanted].removeprefix("agrees with "), _shape(worst.split)
    if label.row == 0:
        causes = ", or ".join(CLASSES[each] for each in dict.fromkeys(kinds))
        text = f"gradient is {value:.3g} of {mean} at {shape}: {causes}"
    else:
        kind, times = worst.kinds[label.row], f", times {' or '.join(words)}" if words[0] else ""
        text = f"{CLASSES[kind]}{times}, not with {mean}, at {shape}"
    return GradientMismatch(kind, tuple(names), text, _size(predictions, names))


def _shape(split: SplitResult) -> str:
    ranks, count = split.weights.shape
    return f"{ranks} rank{'s' * (ranks > 1)} x {count} microbatch{'es' * (count > 1)}"


def _size(predictions: Sequence[_Predictions], names: Iterable[str]) -> float:
    sizes = [0.0]
    for each in predictions:
        norm, _, error = each.against_wanted(each.summed(names))
        sizes.append((error / norm) ** 0.5 if norm else float(error > 0))
    return max(sizes)


def _rounded(predictions: Sequence[_Predictions]) -> Iterator[GradientMismatch]:
    """Report gradients that were rounded to 16 bits after several terms had been added."""
    # What one microbatch per rank shows is the reduction.
    single = [each.split for each in predictions if each.split.weights.shape[1] == 1]
    reduced = {n for split in single for n, p in split.parameters.items() if p.in_16_bits}
    every = [n for each in predictions for n, p in each.split.parameters.items() if p.in_16_bits]
    for kind in ("summed_in_16_bits", "reduced_in_16_bits"):
        names = [n for n in dict.fromkeys(every) if (n in reduced) == kind.startswith("reduced")]
        if names:
            yield GradientMismatch(kind, tuple(names), CLASSES[kind], _size(predictions, names))


# What no prediction explains


def _unexplained(
    predictions: Sequence[_Predictions], names: list[str]
) -> Iterator[GradientMismatch]:
    splits = [each.split for each in predictions]
    yield from _absent("missing", splits, names)
    names = [name for name in names if not any(name in split.missing for split in splits)]
    by_shard = next((split.shard_factors for split in splits if split.shard_factors), None)
    if not names:
        return
    found = _common_factor(predictions, names)
    if found is None and by_shard:
        factors = ", ".join(f"{factor:.3g}" for factor in by_shard)
        found = "shard_clipped", f"{CLASSES['shard_clipped']}: factors {factors}"
    found = found or _counted(predictions, names) or ("unexplained", CLASSES["unexplained"])
    yield GradientMismatch(found[0], tuple(names), found[1], _size(predictions, names))


def _common_factor(predictions: Sequence[_Predictions], names: list[str]) -> tuple[str, str] | None:
    """Explain gradients that are parallel to the wanted ones."""
    factors, norms = [], []
    for each in predictions:
        p = each.summed(name for name in names if each.shows(name))
        norm, inner, _ = each.against_wanted(p)
        if norm * p.square == 0 or 1 - inner**2 / (norm * p.square) > each.allowed(p) ** 2:
            return None
        factors.append(inner / norm)
        norms.append(p.square**0.5)
    exponent, values = np.log2(np.abs(factors)), ", ".join(f"{each:.5g}" for each in factors)
    if round(abs(exponent[0])) >= 3 and np.ptp([*exponent, round(exponent[0])]) < 1e-3:
        return "loss_scale", f"{CLASSES['loss_scale']}: 2 ** {exponent[0]:.0f}"
    reduced = [norm for norm, factor in zip(norms, factors, strict=True) if factor < 1 - 1e-3]
    if reduced and max(factors) <= 1 + 1e-3 and max(norms) <= 1.001 * min(reduced):
        power = np.log2((predictions[0].split.max_norm or 0.0) / reduced[0] or 1.0)
        if round(power) >= 3 and abs(power - round(power)) < 1e-3:
            return "loss_scale", f"clipped before it was unscaled: to max_norm / 2 ** {power:.0f}"
        return "clipped", f"{CLASSES['clipped']}, to the norm {reduced[0]:.4g}"
    return "miscounted", f"{CLASSES['miscounted']}: gradient is {values} of the one wanted"


def _counted(predictions: Sequence[_Predictions], names: list[str]) -> tuple[str, str] | None:
    """Explain gradients by the weights with which microbatches count, from a least-squares fit."""
    for each in predictions:
        p, split = each.summed(names), each.split
        terms, weights = slice(split.weights.size), split.weights.ravel()
        counts = np.linalg.lstsq(p.gram[terms, terms], p.inner[terms], rcond=1e-9)[0]
        residual = max(0.0, 1 - float(counts @ p.inner[terms]) / p.square) ** 0.5
        if residual > 1e-3 + 2 * p.noise:
            return None
        shares = counts * weights.sum()
        if np.abs(shares - 1)[weights > 0].max() > 1e-2:
            places = [(n, *divmod(n, split.weights.shape[1])) for n in np.flatnonzero(weights)]
            texts = [f"microbatch {m} of rank {r} counts {shares[n]:.3g}" for n, r, m in places]
            text = f"{CLASSES['weighted']}, with {split.name}: {'; '.join(texts)} instead of 1"
            return "weighted", text
    return None


def over_ranks(by_rank: Sequence[Sequence[GradientMismatch]]) -> list[GradientMismatch]:
    """Combine the diagnoses of all ranks; every rank gets the same."""
    # On the rank whose data the others have, it looks as if gradients were never reduced.
    shared = any(each.kind == "same_data" for mismatches in by_rank for each in mismatches)
    found: dict[tuple[str, tuple[str, ...]], list[tuple[int, GradientMismatch]]] = {}
    for rank, mismatches in enumerate(by_rank):
        for each in mismatches:
            if shared and each.kind == "own_rank":
                each = replace(each, kind="same_data", text=CLASSES["same_data"])
            found.setdefault((each.kind, each.parameters), []).append((rank, each))
    combined = []
    for same in found.values():
        where = "" if len(same) == len(by_rank) else f", on {rank_names([r for r, _ in same])}"
        combined.append(replace(same[0][1], text=f"{same[0][1].text}{where}"))
    return combined
