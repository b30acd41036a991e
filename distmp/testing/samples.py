"""Losses of microbatches, and divisions of samples over ranks and microbatches in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from distmp.errors import ConfigError

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
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ConfigError("what loss_sum returns", type(found).__name__, f"{_PASS}, as a pair")
    total, weight = found[0], _number(found[1])
    if not 0 <= weight < np.inf:
        problem = "return the number of tokens or samples"
        raise ConfigError("the weight that loss_sum returns", found[1], problem)
    if not isinstance(total, Tensor) or total.numel() != 1 or (weight and not total.requires_grad):
        problem = "return a tensor with one element, computed from trained parameters of the model"
        raise ConfigError("the loss that loss_sum returns", total, problem)
    if not weight and abs(float(total.detach())) > 0:
        problem = "is not 0; return the number of tokens or samples as its weight, not 0"
        raise ConfigError("the loss that loss_sum returns", float(total.detach()), problem)
    return total, weight


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return np.nan


class DefaultLoss:
    """The sum of the cross entropy over labels other than -100, and their number.

    A microbatch is a mapping with `labels`, which the model takes as keywords, or a pair of inputs
    and integer labels. Whether a model shifts its labels, as causal language models do, is found
    from the loss that it returns.

    Attributes:
        is_guess: Whether training may use another loss: the model has returned none, or one that
            differs from the cross entropy by more than rounding.
    """

    def __init__(self) -> None:
        self.is_guess = True
        self._form: int | None = None

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return loss sum and weight of a microbatch."""
        if isinstance(batch, Mapping) and "labels" in batch:
            # With it, models of transformers divide by the tokens of a step.
            inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
            return self._of_output(model(**inputs), batch["labels"])
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return _cross_entropy(model(batch[0]), labels)
        problem = f"neither a mapping with labels nor inputs and integer labels; {_PASS}. {_ENTERS}"
        raise ConfigError("microbatch", type(batch).__name__, problem)

    def _of_output(self, output: Any, labels: Tensor) -> tuple[Tensor, int]:
        found = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        if "logits" not in found:
            problem = f"has no logits; {_PASS}"
            raise ConfigError("the output of the model", type(output).__name__, problem)
        logits, mean = found["logits"], found.get("loss")
        forms = [_cross_entropy(logits, labels)]
        if logits.dim() == 3:
            forms.append(_cross_entropy(logits[:, :-1], labels[:, 1:]))
        if self._form is None and mean is not None and all(weight for _, weight in forms):
            errors = [abs(float((total / weight - mean).detach())) for total, weight in forms]
            self._form = errors.index(min(errors))
            rounding = 100 * torch.finfo(mean.dtype).eps
            self.is_guess = not min(errors) <= rounding * abs(float(mean.detach()))
            if not min(errors) <= 0.02 * abs(float(mean.detach())):
                problem = f"is not the mean of the cross entropy over labels; {_PASS}"
                raise ConfigError("the loss that the model returns", mean.item(), problem)
        return forms[self._form or 0]


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    if logits.dim() == labels.dim() + 1 and labels.dim() > 1:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total, int((labels != IGNORED).sum())


# Relative numbers of samples of consecutive microbatches.
_PATTERN = (1, 3, 2, 5, 1, 4)


@dataclass(frozen=True)
class Split:
    """A division of samples.

    Attributes:
        name: What is special about it.
        samples: Samples by rank and microbatch; all ranks have as many microbatches.
    """

    name: str
    samples: tuple[tuple[tuple[Any, ...], ...], ...]

    @property
    def flat(self) -> list[tuple[Any, ...]]:
        """Samples of all microbatches, those of rank 0 first."""
        return [microbatch for rank in self.samples for microbatch in rank]


def make_splits(samples: Sequence[Any], ranks: int, *, tokens: bool) -> Iterator[Split]:
    """Yield divisions of samples over ranks.

    Args:
        samples: The samples, the same on every rank.
        ranks: Number of ranks.
        tokens: Whether there are divisions in which microbatches or a rank have no labels.

    Raises:
        ConfigError: If there are too few samples for three microbatches on each rank, or if all
            labels are ignored.
    """
    if len(samples) < 3 * ranks:
        problem = f"pass at least {3 * ranks} samples, for three microbatches on each rank"
        raise ConfigError("number of samples", len(samples), problem)
    unlabelled = [_without_labels(sample) for sample in samples]
    pairs = zip(samples, unlabelled, strict=True)
    if all(empty is not None and _labels(each).equal(_labels(empty)) for each, empty in pairs):
        problem = "all are ignored, so that there is nothing to compare; pass some others"
        raise ConfigError("labels of samples", IGNORED, problem)
    for count in (1, 2, 3):
        yield _divided(samples, ranks, count)
    if not tokens or any(sample is None for sample in unlabelled):
        return
    first, *others = range(2 * ranks)
    yield _masked("a microbatch without labels", samples, unlabelled, ranks, {first})
    if ranks > 1:
        yield _masked("a rank without labels", samples, unlabelled, ranks, set(others[-2:]))


def _divided(samples: Sequence[Any], ranks: int, count: int) -> Split:
    sizes = _sizes(len(samples), ranks * count)
    ends = np.cumsum(sizes)
    parts = [tuple(samples[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    by_rank = [tuple(parts[rank * count : (rank + 1) * count]) for rank in range(ranks)]
    return Split(f"{count} uneven microbatch{'es' * (count > 1)} per rank", tuple(by_rank))


def _sizes(samples: int, parts: int) -> list[int]:
    """Return sizes of at least 1, as uneven as `_PATTERN`."""
    shares = np.array([_PATTERN[part % len(_PATTERN)] for part in range(parts)], dtype=float)
    ends = np.round(np.cumsum(shares) / shares.sum() * (samples - parts)).astype(int)
    return [1 + int(size) for size in np.diff(ends, prepend=0)]


def _masked(
    name: str, samples: Sequence[Any], unlabelled: Sequence[Any], ranks: int, masked: set[int]
) -> Split:
    labelled, without = (_divided(each, ranks, 2).samples for each in (samples, unlabelled))
    chosen = tuple(
        tuple((without if 2 * r + m in masked else labelled)[r][m] for m in range(2))
        for r in range(ranks)
    )
    return Split(name, chosen)


def _without_labels(sample: Any) -> Any:
    """Return the sample with all labels ignored; None if it has no integer labels."""
    labels = _labels(sample)
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    ignored = torch.full_like(labels, IGNORED)
    is_mapping = isinstance(sample, Mapping)
    return {**sample, "labels": ignored} if is_mapping else (sample[0], ignored)


def _labels(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return sample.get("labels")
    return sample[1] if type(sample) in (tuple, list) and len(sample) == 2 else None


def collated(samples: Sequence[Any], collate: Callable[[list[Any]], Any] | None) -> Any:
    """Return a microbatch.

    Raises:
        ConfigError: If the samples cannot be stacked.
    """
    if collate is not None:
        return collate(list(samples))
    try:
        return default_collate(list(samples))
    except (RuntimeError, TypeError) as error:
        problem = f"cannot be stacked ({error}); pass collate=..., or pad samples"
        raise ConfigError("samples", type(samples[0]).__name__, problem) from None
