"""Losses of microbatches: those that the user gives, and the one by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.errors import ConfigError, require

# Returns the sum of the losses of a microbatch, and its weight: its tokens or samples.
LossSum = Callable[[nn.Module, Any], tuple[Tensor, Any]]
IGNORED = -100
_PASS = "pass loss_sum=..., which returns the sum of the losses of a microbatch and its weight"
_ENTERS = (
    "In an audit, no labels entered forward: pass them to the model as `labels`, or use"
    " check_gradient"
)


def loss_and_weight(loss_sum: LossSum, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Return the loss sum of a microbatch, and its weight.

    Raises:
        ConfigError: If they are not a loss and a number.
    """
    found: Any = loss_sum(model, batch)
    try:
        total, weight = found[0], float(found[1])
    except (TypeError, ValueError, RuntimeError, IndexError):
        problem = f"{_PASS}, as a pair"
        raise ConfigError("what loss_sum returns", type(found).__name__, problem) from None
    problem = "return the number of tokens or samples"
    require(0 <= weight < np.inf, "the weight that loss_sum returns", found[1], problem)
    problem = "is not 0; return the number of tokens or samples as its weight, not 0"
    valid = weight > 0 or not total.any()
    require(valid, "the loss that loss_sum returns", total, problem)
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
        keys = [*batch] if isinstance(batch, Mapping) else type(batch).__name__
        problem = f"neither a mapping with labels nor inputs and integer labels; {_PASS}. {_ENTERS}"
        raise ConfigError("microbatch", keys, problem)

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
