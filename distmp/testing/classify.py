"""The classes of wrong gradients, and which of them explains what was measured.

A measured gradient is compared with weighted sums of the gradients of single microbatches. Each
class predicts the weights, up to a factor that depends on the number of ranks or microbatches.
Several divisions of the same samples decide between classes that predict the same for one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distmp.errors import DistmpError, listed, rank_names

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Relative error of FP32 arithmetic, beyond what the float64 reference shows of it.
_TOLERANCE = 2e-5
# Error of a parameter relative to the whole gradient, where its own is nothing but rounding errors.
_FLOOR = 1e-6
# Relative error of 16-bit sums of few terms.
_ROUNDED = 2.0**-6

# What is wrong, and what to do, by class.
CLASSES = {
    "right": ("agrees", ""),
    "ranks_twice": ("divided by the number of ranks twice", "multiply by the number of ranks"),
    "ranks_never": ("multiplied by the number of ranks", "divide after your own all-reduce"),
    "microbatches_twice": ("divided by the microbatches once too often", "do not divide again"),
    "microbatches_never": ("multiplied by the number of microbatches", "divide each mean loss"),
    "short_update": ("divided by the microbatches of a full update", "divide by its tokens"),
    "accumulated_twice": ("accumulated twice, or never removed", "call zero_grad"),
    "token_mean": ("agrees with the mean over tokens", 'pass weights="tokens"'),
    "sample_mean": ("agrees with the mean over samples", 'pass weights="samples"'),
    "sum": ("agrees with the sum", "divide by the tokens of all ranks"),
    "microbatch_means": ("agrees with the mean of microbatch means", "use distmp.global_mean"),
    "rank_means": ("agrees with the mean of rank means", "all-reduce the number of tokens"),
    "pass_means": ("agrees with the mean of microbatch means over ranks", "count all tokens first"),
    "reduced_again": ("microbatches reduced again with each later one", "reduce after the last"),
    "last_microbatch": ("only the last microbatch counts", "call zero_grad before the loop"),
    "own_rank": ("never reduced: only this rank counts", "wrap after unfreezing, call the wrapper"),
    "summed_in_16_bits": ("microbatches summed in 16 bits", "use FP32 parameters and autocast"),
    "reduced_in_16_bits": ("ranks reduced in 16 bits", "reduce in FP32, without compression hook"),
    "same_data": ("ranks train on the same microbatches", "use DistributedSampler"),
    "different_weights": ("the weights differ between ranks", "seed all ranks, reduce gradients"),
    "missing": ("no gradient, or zero", "reduce zeros if unused, avoid no_grad and detach"),
    "in_no_optimizer": ("in no parameter group of the optimizer", "build it after wrapping"),
    "skipped": ("optimizer not called equally often on ranks", "use distmp.DistributedGradScaler"),
    "scheduler": ("the learning rate changed after a skipped step", "step it with the optimizer"),
    "loss_scale": ("multiplied by a loss scale, or divided by it twice", "unscale them once"),
    "constant": ("multiplied by a constant", "pass loss_sum= if it is a weight"),
    "miscounted": ("divided by another number", "count labels as the loss does"),
    "clipped": ("clipped before it was read", "pass max_norm=, clip after reducing"),
    "shard_clipped": ("clipped by the norm of each rank's shard", "clip DTensors, not shards"),
    "not_finite": ("NaN or infinite", "divide by at least 1 token"),
    "weighted": ("microbatches count with wrong weights", "divide sums equally, clip only once"),
    "unexplained": ("in no class", "pass loss_sum= with all terms; compare labels, later changes"),
}
TEXTS = {kind: text for kind, (text, _) in CLASSES.items()}


@dataclass
class SplitResult:
    """What was measured with one division of the samples.

    Attributes:
        name: What is special about the division.
        rank: This rank.
        weights: Weight of each microbatch, of shape (ranks, microbatches).
        max_norm: What the gradient is clipped to on purpose.
        norm: Norm of the gradient before it was clipped; None if it is not known.
        extra: What the term after those of microbatches is: the `sample_mean` or `token_mean`, if
            another one is wanted, or a gradient that may be `accumulated_twice`.
        products: Of each parameter: inner products of the gradients of microbatches, that of
            `extra`, and the measured one.
        noise: Of each of them: the error that the dtypes of the run cause, relative to the gradient
            wanted.
        shard_factors: Factors below 1 between parts of the measured and the wanted gradient, at
            most one per rank; none if there is one factor, or more.
        in_16_bits: Names of parameters whose gradient is held in 16 bits.
        reduction: A collective that has reduced in 16 bits; empty without one.
        is_unlike: Whether microbatches weight further losses differently, relative to the first.
        others: Names of parameters of other optimizers, which count only for the norm.
        is_sum: Whether the losses may be sums; otherwise all are means.
    """

    name: str
    rank: int
    weights: Array
    max_norm: float | None = None
    extra: str = "accumulated_twice"
    products: dict[str, Array] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    shard_factors: tuple[float, ...] = ()
    in_16_bits: set[str] = field(default_factory=set)
    reduction: str = ""
    norm: float | None = None
    is_unlike: bool = False
    others: set[str] = field(default_factory=set)
    is_sum: bool = True


@dataclass(frozen=True)
class GradientMismatch:
    """Describes a way in which gradients are wrong; a `GradientError` lists them.

    Attributes:
        kind: A key of `CLASSES`; empty if it may be right.
        parameters: Names of the parameters.
        text: What was measured.
        size: Norm of the error relative to the gradient wanted, the largest of all splits; NaN if
            it was not measured.

    Example:
        >>> from distmp.testing import GradientMismatch
        >>> print(GradientMismatch("sum", ("head.weight",), "agrees with the sum", 9.0))
        head.weight: agrees with the sum (9 off, relative); fix: divide by the tokens of all ranks
    """

    kind: str
    parameters: tuple[str, ...]
    text: str
    size: float = math.nan

    def __str__(self) -> str:
        size = f" ({self.size:.2g} off, relative)" if self.size == self.size else ""
        fix = f"; fix: {CLASSES[self.kind][1]}" if self.kind else ""
        return f"{listed(list(self.parameters))}: {self.text}{size}{fix}"


def mismatch(
    kind: str, names: Iterable[str], detail: str = "", size: float = math.nan
) -> GradientMismatch:
    """Return a mismatch with the text of its class."""
    return GradientMismatch(kind, tuple(names), f"{TEXTS[kind]}{detail}", size)


class GradientError(DistmpError, AssertionError):
    """The gradient is not the one wanted.

    Attributes:
        mismatches: What is wrong, by class.

    Example:
        >>> from distmp.testing import GradientError, GradientMismatch
        >>> wrong = GradientMismatch("ranks_twice", ("head.weight",), "divided by 2 twice", 0.5)
        >>> try:
        ...     raise GradientError(str(wrong), [wrong])
        ... except GradientError as error:
        ...     print(error.mismatches[0].kind)
        ranks_twice
    """

    def __init__(self, message: str, mismatches: Sequence[GradientMismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


# Predictions


def _factors(r: int, m: int, most: int) -> list[tuple[str, float, str]]:
    """Return factors for r ranks and m microbatches: class, value and text; the simplest first."""
    both = "the number of ranks times that of microbatches"
    return [
        ("right", 1.0, TEXTS["right"]),
        ("ranks_twice", 1 / r, TEXTS["ranks_twice"]),
        ("ranks_never", r, TEXTS["ranks_never"]),
        ("microbatches_twice", 1 / m, TEXTS["microbatches_twice"]),
        ("microbatches_never", m, TEXTS["microbatches_never"]),
        ("short_update", m / most, TEXTS["short_update"]),
        ("accumulated_twice", 2.0, TEXTS["accumulated_twice"]),
        ("ranks_twice", 1 / (r * m), f"divided by {both} once too often"),
        ("ranks_never", r * m, f"multiplied by {both}: divided by neither"),
        ("ranks_twice", 1 / r**2, TEXTS["ranks_twice"]),
        ("ranks_never", r**2, TEXTS["ranks_never"]),
    ]


def inverse(values: Array) -> Array:
    """Return 1 / values, and 0 for 0."""
    return np.where(values > 0, 1 / np.where(values > 0, values, 1), 0)


def _coefficients(split: SplitResult) -> Iterator[tuple[str, Array | float]]:
    """Yield class and weights of the microbatches of each prediction; the simplest first."""
    w, (ranks, count) = split.weights, split.weights.shape
    total, position, rows = inverse(w.sum()), np.arange(count), np.arange(ranks)[:, None]
    by_rank, means = inverse(w.sum(1, keepdims=True)), inverse(w)
    last, own = position == count - 1, rows == split.rank
    yield "token_mean", total
    yield "sum", 1.0
    yield "microbatch_means", means / (ranks * count)
    yield "microbatch_means", means / max(1, int((w > 0).sum()))
    yield "rank_means", by_rank / ranks
    yield "pass_means", inverse(w.sum(0)) / count
    yield "reduced_again", total * float(ranks) ** (count - 1 - position)
    yield "weighted", total * w
    yield "last_microbatch", last * total
    yield "last_microbatch", last * inverse(w[:, -1].sum())
    yield "last_microbatch", last * means / ranks
    yield from (("own_rank", own * each) for each in (total, by_rank, means / count, 1.0))
    yield from (("same_data", (rows == row) * by_rank) for row in range(ranks))


def _norm(products: Array, combinations: Array) -> Array:
    """Return the norms of combinations of gradients."""
    squares = np.einsum("...k,kl,...l->...", combinations, products, combinations)
    return np.sqrt(np.maximum(squares, 0))


class _Predictions:
    """All predictions for one division of the samples, as combinations of its gradients.

    Attributes:
        kinds: Their classes, the wanted one first, then the simplest.
        factors: Class, value and text of each of their factors.
        mean: What is wanted, as text.
        products: As of `SplitResult`, of parameters whose gradient is finite.
        wanted: The combination that is right.
        measured: The combination that is the measured gradient.
    """

    def __init__(self, split: SplitResult, wanted: str, most: int) -> None:
        self.split, w = split, split.weights
        self.mean = TEXTS[wanted].removeprefix("agrees with ")
        self.products = {n: each for n, each in split.products.items() if np.isfinite(each).all()}
        *_, extra, self.measured = np.eye(w.size + 2)
        kinds, values = zip(*_coefficients(split), strict=True)
        rows = [np.append(np.broadcast_to(each, w.shape), [0, 0]) for each in values]
        right = rows[wanted == "sum"]
        added = extra + right * (split.extra == "accumulated_twice")
        self.kinds = ["right", split.extra, *kinds]
        self.factors = _factors(len(w), w.shape[1], most)
        factors = np.array([[value] for _, value, _ in self.factors])
        self._predicted = np.stack([right, added, *rows])[:, None] * factors
        products = self.summed(self.products)
        # Of each prediction: how many times smaller it is than the gradient was before clipping.
        self.hidden = np.ones(self._predicted.shape[:2])
        if split.max_norm is not None:
            # Whatever the gradient is, it has been clipped by its own norm.
            norms = _norm(products, self._predicted)[..., None]
            self._predicted = self._predicted * np.minimum(1, split.max_norm / (norms + 1e-6))
            if split.norm is not None and norms[0, 0] > split.max_norm:
                self.hidden = split.norm / (norms[..., 0] + 1e-300)
        self.wanted = self._predicted[0, 0]
        self._norm = _norm(products, self.wanted)

    def fits_by_chance(self, label: int) -> bool:
        """Return whether a prediction fits some multiples of the wanted gradient by chance."""
        row, column = divmod(label, len(self.factors))
        kind = self.kinds[row]
        of_ranks = self.factors[column][1] * len(self.split.weights) == 1  # DDP's mean of sums
        is_sum = kind == "sum" and (self.split.is_sum or of_ranks)
        return kind == "weighted" or (min(row, column) > 0 and not is_sum)

    def summed(self, names: Iterable[str]) -> Array:
        """Return the products of several parameters together, those that were measured."""
        found = [self.products[name] for name in names if name in self.products]
        return np.sum([np.zeros((len(self.measured),) * 2), *found], 0)

    def lacks(self, name: str) -> bool:
        """Return whether there is no gradient, although there should be."""
        products = self.summed([name])
        return bool(products[-1, -1] == 0 < _norm(products, self.wanted))

    def allowed(self, names: Iterable[str]) -> float:
        """Return the relative error of several parameters that arithmetic explains."""
        return _TOLERANCE + 2 * max(self.split.noise.get(name, 0.0) for name in names)

    def fits(self, name: str, *, exactly: bool = False) -> set[int]:
        """Return the predictions that a parameter's gradient agrees with; 0 is the wanted one."""
        products = self.products[name]
        errors = _norm(products, self._predicted - self.measured)
        is_rounded = bool(self.split.reduction) or name in self.split.in_16_bits
        share = _TOLERANCE if exactly else self.allowed([name]) + _ROUNDED * is_rounded
        allowed = share * _norm(products, self._predicted) + _FLOOR * self._norm
        return {*np.flatnonzero(errors <= allowed).tolist()}

    def size(self, names: Iterable[str]) -> float:
        """Return the norm of the error of several parameters, relative to the gradient wanted."""
        products = self.summed(names)
        norm, error = _norm(products, np.stack([self.wanted, self.wanted - self.measured]))
        return float(error / norm) if norm else float(error > 0)


# The diagnosis of one rank

_Found = Iterator[GradientMismatch]


def diagnose(splits: Sequence[SplitResult], wanted: str) -> list[GradientMismatch]:
    """Return what is wrong with gradients, in the order of `CLASSES`.

    Args:
        splits: What this rank has measured with each division of the samples, one at least.
        wanted: The class that is right: `token_mean`, `sample_mean` or `sum`.
    """
    most = max(split.weights.shape[1] for split in splits)
    predictions = [_Predictions(split, wanted, most) for split in splits]
    broken = {n for each in predictions for n in each.split.products.keys() - each.products}
    found = [mismatch("not_finite", sorted(broken)), *_compared(predictions)]
    summed = {name for split in splits if split.weights.shape[1] > 1 for name in split.in_16_bits}
    found.append(mismatch("summed_in_16_bits", sorted(summed), "", _size(predictions, summed)))
    names = sorted(splits[0].products.keys() - summed - splits[0].others - broken)
    # Otherwise another tensor was reduced in 16 bits.
    rounded = any(0 not in p.fits(name, exactly=True) for p in predictions for name in names)
    if rounded and (reduction := max(split.reduction for split in splits)):
        size = _size(predictions, names)
        found.append(mismatch("reduced_in_16_bits", names, f": {reduction}", size))
    return sorted((m for m in found if m.parameters), key=lambda m: [*CLASSES].index(m.kind))


def _compared(predictions: list[_Predictions]) -> _Found:
    """Explain all parameters with as few classes as possible."""
    names = dict.fromkeys(n for p in predictions for n in p.products if n not in p.split.others)
    fits = {n: [p.fits(n) for p in predictions if n in p.products] for n in names}
    labels = {name: set.intersection(*found) for name, found in fits.items()}
    left = [name for name, found in labels.items() if 0 not in found]
    if labels and not left:
        yield from _hidden(predictions, [*labels], set.intersection(*labels.values()))
    factor = _common_factor(predictions, left) if left else None
    if factor and factor[0] in ("constant", "loss_scale"):
        for name in left:
            labels[name] -= {*filter(predictions[0].fits_by_chance, labels[name])}
    while counts := [label for name in left for label in labels[name]]:
        best = max(sorted(set(counts)), key=counts.count)
        yield _predicted(predictions, best, [name for name in left if best in labels[name]])
        left = [name for name in left if best not in labels[name]]
    missing = {name for name in left for each in predictions if each.lacks(name)}
    yield mismatch("missing", sorted(missing))
    if left := [name for name in left if name not in missing]:
        found = _common_factor(predictions, left) or _counted(predictions, left)
        kind, detail = found or ("unexplained", "")
        yield mismatch(kind, left, detail, _size(predictions, left))


def _predicted(predictions: list[_Predictions], label: int, names: list[str]) -> GradientMismatch:
    worst = max(predictions, key=lambda each: each.size(names))
    row, column = divmod(label, len(worst.factors))
    kind, mean, factor = worst.kinds[row], worst.mean, worst.factors[column][1]
    values = np.array([[value for _, value, _ in each.factors] for each in predictions])
    # Factors that are equal in every split.
    same = [worst.factors[i] for i in np.flatnonzero((values == values[:, [column]]).all(0))]
    cause = ", or ".join(dict.fromkeys(text for _, _, text in same))
    text = f"{factor:.3g} times {mean}: {cause}"
    if kind != "right":
        times = f", times {factor:.3g}: {cause}" * (same[0][0] != "right")
        text = f"{TEXTS[kind]}{times}, instead of {mean}"
    named = same[0][0] if kind == "right" else kind
    text += f"; with {worst.split.name}"
    return GradientMismatch(named, tuple(names), text, worst.size(names))


def _hidden(predictions: list[_Predictions], names: list[str], labels: set[int]) -> _Found:
    """Explain gradients that are right only because they are clipped."""
    fits = (np.flatnonzero(abs(p.hidden - 1) <= _ROUNDED + p.allowed(names)) for p in predictions)
    if 0 in (same := labels.intersection(*fits)):
        return
    factor = float(max((each.hidden[0, 0] for each in predictions), key=lambda f: abs(f - 1)))
    power = _power_of_2([factor])
    detail = f": 2 ** {power}" if power else f": {factor:.5g}"
    found = mismatch("loss_scale" if power else "constant", names, detail)
    if same:
        found = _predicted(predictions, min(same), names)
    yield replace(found, text=f"{found.text}; right only after clipping", size=abs(factor - 1))


def _size(predictions: list[_Predictions], names: Collection[str]) -> float:
    return max(each.size(names) for each in predictions)


# What no prediction explains


def _common_factor(predictions: list[_Predictions], names: list[str]) -> tuple[str, str] | None:
    """Explain gradients that are parallel to the wanted ones."""
    found = []
    for each in predictions:
        products = each.summed(names)
        wanted, measured = _norm(products, np.stack([each.wanted, each.measured]))
        cosine = each.wanted @ products[-1] / (wanted * measured or 1.0)
        if 1 - cosine**2 > each.allowed(names) ** 2:
            return None
        found.append((cosine * measured / wanted, measured))
    factors, norms = np.transpose(found)
    if power := _power_of_2(factors):
        return "loss_scale", f": 2 ** {power}"
    reduced, is_constant = norms[factors < 1 - 1e-3], np.ptp(factors) < 1e-3 * abs(factors[0])
    # Gradients below the limit are not clipped, and no larger one is left as it is.
    if len(reduced) and factors.max() <= 1 + 1e-3 and norms.max() <= 1.001 * reduced.min():
        if power := _power_of_2([(predictions[0].split.max_norm or 0.0) / reduced[0]]):
            return "loss_scale", f": clipped before it was unscaled: to max_norm / 2 ** {power}"
        if not is_constant or len(factors) == 1:
            return "clipped", f", to the norm {reduced[0]:.4g}"
        return "constant", f": {factors[0]:.5g}, or clipped to the norm {reduced[0]:.4g}"
    if is_constant:
        return "constant", f": {factors[0]:.5g}"
    return "miscounted", f": {', '.join(f'{each:.5g}' for each in factors)} of the one wanted"


def _power_of_2(values: Sequence[float]) -> int:
    """Return the exponent of the loss scale that all values are; 0 if they are none."""
    exponents = np.log2(np.abs(values) + 1e-300)
    power = round(exponents[0])
    return power if abs(power) >= 3 and np.abs(exponents - power).max() < 1e-3 else 0


def _counted(predictions: list[_Predictions], names: list[str]) -> tuple[str, str] | None:
    """Explain gradients by the factors of shards, ranks or microbatches."""
    if shards := [each.split.shard_factors for each in predictions if each.split.shard_factors]:
        return "shard_clipped", f": factors {', '.join(f'{each:.3g}' for each in shards[0])}"
    texts, norms = [], []
    for each in predictions:
        products, w = each.summed(names), each.split.weights
        gram, inner = products[: w.size, : w.size], products[-1, : w.size]
        counts = np.linalg.lstsq(gram, inner, rcond=1e-9)[0]
        if 1 - counts @ inner / products[-1, -1] > (1e-3 + each.allowed(names)) ** 2:
            return None
        norms.append(_norm(gram, np.repeat(np.eye(len(w)), w.shape[1], 1) * counts))
        shares = np.where(w > 0, counts.reshape(w.shape) * w.sum(), 1)
        if np.abs(shares - 1).max() > 1e-2:
            shown = np.array2string(shares, precision=3, separator=", ").replace("\n", "")
            texts.append(f", with {each.split.name}: {shown} by rank instead of 1")
    clipped = np.array(norms) > 0.999 * np.max(norms)
    if clipped.any(1).all() and clipped.sum() > 1 < clipped.shape[1]:
        return "clipped", f": the part of each rank alone, to the norm {np.max(norms):.4g}"
    return ("weighted", texts[0]) if texts else None


def over_ranks(by_rank: Sequence[Sequence[GradientMismatch]]) -> list[GradientMismatch]:
    """Combine the diagnoses of all ranks; every rank gets the same."""
    # On the rank whose data the others have, it looks as if gradients were never reduced.
    shared = any(each.kind == "same_data" for mismatches in by_rank for each in mismatches)
    found: dict[tuple[str, tuple[str, ...]], dict[int, GradientMismatch]] = {}
    for rank, mismatches in enumerate(by_rank):
        for each in mismatches:
            if shared and each.kind == "own_rank":
                each = mismatch("same_data", each.parameters, size=each.size)
            found.setdefault((each.kind, each.parameters), {})[rank] = each
    combined = []
    for same in found.values():
        each, where = next(iter(same.values())), f", on {rank_names(same)}"
        text = each.text if len(same) == len(by_rank) else each.text + where
        combined.append(replace(each, text=text))
    return combined
