"""Every class of the classifier, from gradients that are made up; without torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from distmp.testing.classify import (
    TEXTS,
    Array,
    GradientMismatch,
    SplitResult,
    diagnose,
    over_ranks,
)

WEIGHTS = [
    np.array([[3.0], [7.0], [2.0]]),
    np.array([[3.0, 1.0], [4.0, 2.0], [5.0, 9.0]]),
    np.array([[3.0, 1.0, 2.0, 8.0], [4.0, 2.0, 0.0, 5.0], [5.0, 9.0, 1.0, 3.0]]),
]
RANK = 1
Counts = Callable[[Array], Array]


def project(gradient: Array, terms: Array, extra: Array | float = 0.0) -> Array:
    every = np.stack([*terms, np.broadcast_to(extra, gradient.shape), gradient])
    return every @ every.T


def split(
    weights: Array,
    counts: Array,
    size: int = 40,
    error: float = 0.0,
    max_norm: float | None = None,
    **options: object,
) -> SplitResult:
    """Return a result in which each microbatch counts with a number, with a relative error."""
    generator = np.random.default_rng(weights.size)
    terms = generator.normal(size=(weights.size, size)) * weights.reshape(-1, 1)
    gradient = counts.ravel() @ terms
    noise = generator.normal(size=size)
    gradient = gradient + error * noise / np.linalg.norm(noise) * np.linalg.norm(gradient)
    if max_norm is not None:
        gradient = gradient * min(1.0, max_norm / np.linalg.norm(gradient))
    products = {"weight": project(gradient, terms)}
    return SplitResult("uneven", RANK, weights, products=products, **options)  # type: ignore[arg-type]


def found(counts: Counts, **options: object) -> list[GradientMismatch]:
    splits = [split(w, np.broadcast_to(counts(w), w.shape), **options) for w in WEIGHTS]  # type: ignore[arg-type]
    return diagnose(splits, "token_mean")


def inverse(values: Array) -> Array:
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0)


def last(w: Array) -> Array:
    return np.arange(w.shape[1]) == w.shape[1] - 1


def row(w: Array, rank: int) -> Array:
    return (np.arange(len(w)) == rank)[:, None] * np.ones_like(w)


PREDICTED: dict[str, list[Counts]] = {
    "right": [lambda w: 1 / w.sum()],
    "ranks_twice": [
        lambda w: 1 / w.sum() / len(w),
        lambda w: 1 / w.sum() / len(w) ** 2,
        lambda w: 1 / w.sum() / w.size,
    ],
    "ranks_never": [
        lambda w: len(w) / w.sum(),
        lambda w: len(w) ** 2 / w.sum(),
        lambda w: w.size / w.sum(),
    ],
    "microbatches_twice": [lambda w: 1 / w.sum() / w.shape[1]],
    "microbatches_never": [lambda w: w.shape[1] / w.sum()],
    "short_update": [lambda w: w.shape[1] / 4 / w.sum()],
    "accumulated_twice": [lambda w: 2 / w.sum()],
    "sum": [lambda w: np.ones(()), lambda w: np.ones(()) / len(w)],
    "microbatch_means": [lambda w: inverse(w) / w.size, lambda w: inverse(w) / (w > 0).sum()],
    "rank_means": [lambda w: 1 / w.sum(1, keepdims=True) / len(w)],
    "pass_means": [lambda w: 1 / w.sum(0) / w.shape[1]],
    "reduced_again": [
        lambda w: float(len(w)) ** (w.shape[1] - 1 - np.arange(w.shape[1])) / w.sum()
    ],
    "last_microbatch": [
        lambda w: last(w) / w.sum(),
        lambda w: last(w) / w[:, -1].sum(),
        lambda w: last(w) * inverse(w) / len(w),
    ],
    "own_rank": [
        lambda w: row(w, RANK) / w.sum(),
        lambda w: row(w, RANK) / w[RANK].sum(),
        lambda w: row(w, RANK) * inverse(w) / w.shape[1],
    ],
    "same_data": [lambda w: row(w, 0) / w[0].sum()],
    "weighted": [lambda w: (1 + row(w, 2)) / w.sum()],
    "loss_scale": [lambda w: 1024 / w.sum(), lambda w: 2.0**-16 / w.sum()],
    "constant": [lambda w: 0.7 / w.sum()],
    "miscounted": [lambda w: 1 / (w.sum() + w.size)],
}
CASES = [(kind, counts) for kind, several in PREDICTED.items() for counts in several]


@pytest.mark.parametrize(("kind", "counts"), CASES, ids=[kind for kind, _ in CASES])
@pytest.mark.parametrize("error", [0.0, 1e-6])
def test_a_prediction_is_recognized(kind: str, counts: Counts, error: float) -> None:
    kinds = [mismatch.kind for mismatch in found(counts, error=error)]
    assert kinds == ([] if kind == "right" else [kind])


def test_a_factor_names_the_numbers_that_it_is_a_product_of() -> None:
    weights = np.array([[3.0, 1.0, 2.0, 8.0], [4.0, 2.0, 6.0, 5.0]])
    numbers = "by the number of ranks times that of microbatches"
    for factor, text in ((8.0, f"{numbers}: divided by neither"), (1 / 8, f"{numbers} once too")):
        for counts in (1 / weights / weights.size, np.full(weights.shape, 1 / weights.sum())):
            (mismatch,) = diagnose([split(weights, factor * counts)], "token_mean")
            assert text in mismatch.text
    (mismatch,) = diagnose([split(weights, 4.0 / weights / weights.size)], "token_mean")
    assert "times 4: multiplied by the number of microbatches, or" in mismatch.text


def test_a_small_error_is_never_right() -> None:
    for error in (1e-4, 1e-3, 1e-2):
        (mismatch,) = found(PREDICTED["right"][0], error=error)
        assert mismatch.kind == "unexplained"
        assert mismatch.size == pytest.approx(error, rel=1e-2)


def test_clipping() -> None:
    right, means = PREDICTED["right"][0], PREDICTED["microbatch_means"][0]
    (mismatch,) = found(right, max_norm=0.5)
    assert mismatch.kind == "clipped"
    assert "to the norm 0.5" in mismatch.text
    for counts, kinds in ((right, []), (means, ["microbatch_means"])):
        splits = [split(w, np.broadcast_to(counts(w), w.shape), max_norm=0.5) for w in WEIGHTS]
        for each in splits:
            each.max_norm = 0.5
        assert [each.kind for each in diagnose(splits, "token_mean")] == kinds


def test_a_smaller_gradient_is_not_clipped_if_larger_ones_are_not() -> None:
    factors = [1.0] * (len(WEIGHTS) - 1) + [0.01]
    splits = [
        split(w, np.full(w.shape, factor / w.sum()))
        for w, factor in zip(WEIGHTS, factors, strict=True)
    ]
    (mismatch,) = diagnose(splits, "token_mean")
    assert mismatch.kind == "miscounted"


@pytest.mark.parametrize("factors", [(0.3, 0.3), (0.3, 0.7)])
def test_clipping_has_one_factor(factors: tuple[float, float]) -> None:
    splits = []
    for weights in WEIGHTS:
        generator = np.random.default_rng(weights.size)
        terms = generator.normal(size=(2, weights.size, 8))
        right = terms.sum(1) / weights.sum()
        scale = 1 / np.linalg.norm(right)  # clipped to the same norm in every split
        products = {f"{n}": project(factors[n] * scale * right[n], terms[n]) for n in range(2)}
        splits.append(SplitResult("uneven", RANK, weights, products=products))
    (mismatch,) = diagnose(splits, "token_mean")
    assert mismatch.parameters == ("0", "1")
    assert mismatch.kind == ("clipped" if factors[0] == factors[1] else "unexplained")


def test_single_parameters_are_named() -> None:
    splits = [split(w, np.broadcast_to(1 / w.sum(), w.shape)) for w in WEIGHTS]
    for each in splits:
        weights = each.weights
        terms = np.random.default_rng(5).normal(size=(weights.size, 8))
        right = terms.sum(0) / weights.sum()
        each.products["doubled"] = project(2 * right, terms)
        each.products["zero"] = project(0 * right, terms)
        each.products["rounded"] = project(right * (1 + 1e-3), terms)
        each.in_16_bits.add("rounded")
        # Terms that cancel: nothing but rounding errors is left.
        each.products["noise"] = project(1e-9 * right, terms - terms.mean(0))
        each.noise["noise"] = 0.5
        # The same without a known noise, as of the bias of keys in attention.
        each.products["tiny"] = project(1e-9 * right, terms - terms.mean(0))
        each.products["broken"] = project(np.nan * right, terms)
    mismatches = {each.kind: each.parameters for each in diagnose(splits, "token_mean")}
    assert mismatches == {
        "accumulated_twice": ("doubled",),
        "missing": ("zero",),
        "summed_in_16_bits": ("rounded",),
        "not_finite": ("broken",),
    }


def test_shards_with_factors_of_their_own() -> None:
    splits = [
        split(w, np.broadcast_to(1 / w.sum(), w.shape), error=0.1, shard_factors=(0.3, 0.5))
        for w in WEIGHTS
    ]
    (mismatch,) = diagnose(splits, "token_mean")
    assert mismatch.kind == "shard_clipped"
    assert "0.3, 0.5" in mismatch.text


def test_ranks_are_named_and_combined() -> None:
    one = GradientMismatch("missing", ("weight",), TEXTS["missing"], 1.0)
    assert over_ranks([[one], [one]]) == [one]
    (combined,) = over_ranks([[], [one], [one]])
    assert combined.text == "no gradient, or zero, on ranks 1-2"
    own = GradientMismatch("own_rank", ("weight",), "", 1.0)
    same = GradientMismatch("same_data", ("weight",), TEXTS["same_data"], 1.0)
    assert over_ranks([[own], [same]]) == [same]


def test_other_gradients_and_sums() -> None:
    def with_samples(w: Array, counts: Array) -> SplitResult:
        terms = np.random.default_rng(w.size).normal(size=(w.size + 1, 40))
        products = {"weight": project(counts @ terms, terms[:-1], terms[-1])}
        return SplitResult("uneven", RANK, w, extra="sample_mean", products=products)

    means = [with_samples(w, np.append(np.zeros(w.size), 1.0)) for w in WEIGHTS]
    assert [each.kind for each in diagnose(means, "token_mean")] == ["sample_mean"]
    tokens = [with_samples(w, np.append(np.full(w.size, 1 / w.sum()), 0.0)) for w in WEIGHTS]
    assert diagnose(tokens, "token_mean") == []
    left = [with_samples(w, np.append(np.full(w.size, 1 / w.sum()), 1.0)) for w in WEIGHTS]
    for each in left:
        each.extra = "accumulated_twice"
    (mismatch,) = diagnose(left, "token_mean")
    assert mismatch.kind == "accumulated_twice"
    assert "never removed" in mismatch.text
    sums = [split(w, np.ones(w.shape)) for w in WEIGHTS]
    assert diagnose(sums, "sum") == []
