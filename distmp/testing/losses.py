"""Losses of microbatches: those that the user gives, and those of torch's loss functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distmp.errors import ConfigError, require

# Returns the sum of the losses of a microbatch, and its weight: its tokens or samples.
LossSum = Callable[[nn.Module, Any], tuple[Tensor, Any]]
IGNORED = -100
PASS = "pass loss_sum=..., which returns the sum of the losses of a microbatch and its weight"
# Without `ctc_loss`, whose mean gives samples several weights.
_FUNCTIONS = {
    each
    for each in vars(F).values()
    if inspect.isfunction(each) and "reduction" in each.__code__.co_varnames
} - {F.ctc_loss}


def is_loss(function: Any, args: Sequence[Any] = (), kwargs: Any = None) -> bool:
    """Return whether a function of torch computes losses, or here the mean of all elements."""
    is_mean = function in (torch.mean, Tensor.mean) and len(args) == 1 and not kwargs
    return is_mean or function in _FUNCTIONS


def bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    if function not in _FUNCTIONS:  # a mean of all elements
        return {"input": args[0].flatten(), "reduction": "batchmean"}
    found = inspect.signature(function).bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


def _single(function: Any, arguments: dict[str, Any]) -> Tensor:
    losses: Tensor = function(**{**arguments, "reduction": "none"})
    return losses


@torch.no_grad()
def counted(function: Any, arguments: dict[str, Any]) -> Tensor:
    """Return how much each loss of a call counts in their mean."""
    if arguments["reduction"] == "batchmean":
        return torch.ones(len(arguments["input"]))
    target, ignored = arguments.get("target"), arguments.get("ignore_index")
    if target is None or ignored is None or target.is_floating_point():
        return torch.ones_like(_single(function, arguments))
    kept, weight = target != ignored, arguments["weight"]
    return kept if weight is None else weight[target.where(kept, 0)] * kept


def loss_and_weight(loss_sum: LossSum, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Return the loss sum of a microbatch, and its weight.

    Raises:
        ConfigError: If they are not a loss and a number.
    """
    found: Any = loss_sum(model, batch)
    try:
        total, weight = found[0], float(found[1])
    except (TypeError, ValueError, RuntimeError, IndexError):
        problem = f"{PASS}, as a pair"
        raise ConfigError("what loss_sum returns", type(found).__name__, problem) from None
    problem = "return the number of tokens or samples"
    require(0 <= weight < np.inf, "the weight that loss_sum returns", found[1], problem)
    problem = "is not 0; return the number of tokens or samples as its weight, not 0"
    valid = weight > 0 or not total.any()
    require(valid, "the loss that loss_sum returns", total, problem)
    return total, weight


class _LossCalls(TorchFunctionMode):
    """Lists calls of loss functions: function, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_loss(func) and result.requires_grad:
            self.calls.append((func, bound(func, args, kwargs or {})))
        return result


@dataclass(frozen=True)
class DefaultLoss:
    """The sum of the losses of a microbatch, and their number.

    A microbatch is a mapping with `labels`, which the model takes as keywords, or a pair of inputs
    and integer labels. The loss is the one of torch that the model calls, or the cross entropy over
    labels other than -100.

    Attributes:
        of_samples: Whether it is the sum of the mean losses of samples, and their number.
    """

    of_samples: bool = False

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return loss sum and weight of a microbatch."""
        if isinstance(batch, Mapping) and "labels" in batch:
            with _LossCalls() as losses:
                model(**batch)
            problem = f"are not one; {PASS}"
            require(len(losses.calls) == 1, "loss functions in forward", len(losses.calls), problem)
            return self._summed(*losses.calls[0], len(batch["labels"]))
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            logits = model(batch[0]).flatten(0, -2)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            arguments = bound(F.cross_entropy, [logits, labels.flatten()], {})
            return self._summed(F.cross_entropy, arguments, len(labels))
        keys = [*batch] if isinstance(batch, Mapping) else type(batch).__name__
        problem = f"neither a mapping with labels nor inputs and integer labels; {PASS}"
        raise ConfigError("microbatch", keys, problem)

    def _summed(
        self, function: Any, arguments: dict[str, Any], samples: int
    ) -> tuple[Tensor, Tensor]:
        each = _single(function, arguments), counted(function, arguments)
        losses, tokens = (part.reshape(samples, -1).sum(1) for part in each)
        if self.of_samples:
            return (losses / tokens.clamp(min=1)).sum(), (tokens > 0).sum()
        return losses.sum(), tokens.sum()
