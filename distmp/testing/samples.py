"""Losses of microbatches, and divisions of samples over ranks and microbatches in several ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from distmp.errors import ConfigError, require

# Returns the sum of the losses of a microbatch, and its weight: its tokens or samples.
LossSum = Callable[[nn.Module, Any], tuple[Tensor, Any]]
IGNORED = -100
_PASS = "pass loss_sum=..., which returns the sum of the losses of a microbatch and its weight"

_ENTERS = "In an audit, it gets only what enters forward: let labels enter, or use check_gradient"


def loss_and_weight(loss_sum: LossSum, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Return the loss sum of a microbatch, and its weight.

    Raises:
        ConfigError: If they are not a scalar with a gradient and a number.
    """
    found: Any = loss_sum(model, batch)
    try:
        total, weight = found[0], float(found[1])
    except (TypeError, ValueError, RuntimeError, IndexError):
        problem = f"{_PASS}, as a pair"
        raise ConfigError("what loss_sum returns", type(found).__name__, problem) from None
    problem = "return the number of tokens or samples"
    require(0 <= weight < np.inf, "the weight that loss_sum returns", found[1], problem)
    problem = "return a tensor with one element, computed from trained parameters of the model"
    valid = isinstance(total, Tensor) and total.numel() == 1 and total.requires_grad >= (weight > 0)
    require(valid, "the loss that loss_sum returns", total, problem)
    problem = "is not 0; return the number of tokens or samples as its weight, not 0"
    value = total.item()
    require(weight > 0 or value == 0, "the loss that loss_sum returns", value, problem)
    return total, weight


class DefaultLoss:
    """The sum of the cross entropy over labels other than -100, and their number.

    A microbatch is a mapping with `labels`, which the model takes as keywords, or a pair of inputs
    and integer labels. Whether a model shifts its labels, as causal language models do, is found
    from the loss that it returns.

    Args:
        of_samples: Whether it is the sum of the mean losses of samples, and their number.

    Attributes:
        is_guess: Whether training may use another loss: the model has returned none, or one that
            differs from the cross entropy by more than rounding.
    """

    def __init__(self, *, of_samples: bool = False) -> None:
        self.is_guess = True
        self._shift: int | None = None
        self._of_samples = of_samples

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return loss sum and weight of a microbatch."""
        if isinstance(batch, Mapping) and "labels" in batch:
            # With it, models of transformers divide by the tokens of a step.
            inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
            return self._of_output(model(**inputs), batch["labels"])
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return _cross_entropy(model(batch[0]), labels, self._of_samples)
        problem = f"neither a mapping with labels nor inputs and integer labels; {_PASS}. {_ENTERS}"
        raise ConfigError("microbatch", type(batch).__name__, problem)

    def _of_output(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        found = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        problem = f"has no logits; {_PASS}"
        require("logits" in found, "the output of the model", type(output).__name__, problem)
        logits, mean = found["logits"], found.get("loss")
        pairs = [(logits, labels)]
        if logits.dim() == 3:
            pairs.append((logits[:, :-1], labels[:, 1:]))
        if self._shift is None and mean is not None and pairs[-1][1].ne(IGNORED).any():
            self._find_shift(mean.detach(), [_cross_entropy(*pair) for pair in pairs])
        return _cross_entropy(*pairs[self._shift or 0], self._of_samples)

    def _find_shift(self, mean: Tensor, forms: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Find which of several losses the model has returned the mean of."""
        size = mean.abs().clamp(min=1e-30)
        errors = [float((total.detach() / n - mean).abs() / size) for total, n in forms]
        self._shift = errors.index(min(errors))
        self.is_guess = not min(errors) <= 100 * torch.finfo(mean.dtype).eps
        problem = f"is not the mean of the cross entropy over labels; {_PASS}"
        require(min(errors) <= 0.02, "the loss that the model returns", mean.item(), problem)


def _cross_entropy(
    logits: Tensor, labels: Tensor, of_samples: bool = False
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    losses, tokens = (t.reshape(len(labels), -1).sum(1) for t in (flat, labels != IGNORED))
    if of_samples:
        return (losses / tokens.clamp(min=1)).sum(), (tokens > 0).sum()
    return losses.sum(), tokens.sum()


# Relative numbers of samples of consecutive microbatches.
_PATTERN = (1, 3, 2, 5, 1, 4)


class Split(NamedTuple):
    """A division of samples.

    Attributes:
        name: What is special about it.
        samples: Samples of each microbatch, those of rank 0 first.
        each: Number of microbatches of each rank.
    """

    name: str
    samples: Sequence[Sequence[Any]]
    each: int


def make_splits(samples: Sequence[Any], ranks: int, *, tokens: bool) -> Iterator[Split]:
    """Yield divisions of samples over ranks.

    Args:
        samples: The samples, the same on every rank.
        ranks: Number of ranks.
        tokens: Whether there are divisions in which microbatches or a rank have no labels.

    Raises:
        ConfigError: If there are too few samples for three microbatches on each rank.
    """
    problem = f"pass at least {3 * ranks} samples, for three microbatches on each rank"
    require(len(samples) >= 3 * ranks, "number of samples", len(samples), problem)
    for count in (1, 2, 3):
        name = f"{count} uneven microbatch{'es' * (count > 1)} per rank"
        yield Split(name, _divided(samples, ranks * count), count)
    unlabelled = [_without_labels(sample) for sample in samples]
    if tokens and all(sample is not None for sample in unlabelled):
        parts = [*zip(_divided(samples, 2 * ranks), _divided(unlabelled, 2 * ranks), strict=True)]
        first = [each[number < 1] for number, each in enumerate(parts)]
        yield Split("a microbatch without labels", first, 2)
        if ranks > 1:
            last = [each[number >= len(parts) - 2] for number, each in enumerate(parts)]
            yield Split("a rank without labels", last, 2)


def _divided(samples: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Return consecutive samples, at least one each, in sizes as uneven as `_PATTERN`."""
    shares = np.cumsum(np.resize(_PATTERN, parts))
    ends = np.round(shares / shares[-1] * (len(samples) - parts)).astype(int) + 1 + np.arange(parts)
    return [samples[start:end] for start, end in itertools.pairwise([0, *ends])]


def _without_labels(sample: Any) -> Any:
    """Return the sample with all labels ignored; None if it has no integer labels."""
    is_pair = type(sample) in (tuple, list) and len(sample) == 2
    labels = sample.get("labels") if isinstance(sample, Mapping) else sample[1] if is_pair else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    ignored = torch.full_like(labels, IGNORED)
    return (sample[0], ignored) if is_pair else {**sample, "labels": ignored}


def collated(samples: Sequence[Any], collate: Callable[[list[Any]], Any] | None) -> Any:
    """Return a microbatch.

    Raises:
        ConfigError: If the samples cannot be stacked.
    """
    try:
        return (collate or default_collate)(list(samples))
    except (RuntimeError, TypeError) as error:
        problem = f"cannot be stacked ({error}); pass collate=..., or pad samples"
        raise ConfigError("samples", type(samples[0]).__name__, problem) from error
