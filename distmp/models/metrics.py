"""Metrics on held-out data: each returns a sum and its weight, as losses do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from distmp.data import IGNORED
from distmp.errors import ConfigError, require
from distmp.models.loss import logits_of
from distmp.models.settings import EMA_PREFIX, PERPLEXITY
from distmp.utils.imports import load_function

Metric = Callable[[Any, Any], "tuple[Tensor | float, Tensor | float]"]
"""metric(outputs, batch) -> (sum, weight), each a number or a 0-dim tensor."""


def find_metrics(paths: Mapping[str, str]) -> dict[str, Metric]:
    """Return the functions of `validation.metrics` by name, except those derived from the loss.

    Raises:
        ConfigError: See `find_metric`.
    """
    found = {name: find_metric(name, path) for name, path in paths.items()}
    return {name: metric for name, metric in found.items() if metric is not None}


def find_metric(name: str, path: str) -> Metric | None:
    """Return the function of an entry of `validation.metrics`.

    Args:
        name: Name of the metric.
        path: "accuracy", "perplexity", or an import path.

    Returns:
        The function; None for "perplexity", which is derived from the loss.

    Raises:
        ConfigError: If the name is reserved, or the path names no function of two arguments.
    """
    valid = name.isidentifier() and name != "loss" and not name.startswith(EMA_PREFIX)
    hint = "choose another name: letters, digits and '_', not 'loss' and not 'ema_...'"
    require(valid, f"validation.metrics.{name}", path, hint)
    if path == PERPLEXITY:
        return None
    if path == "accuracy":
        return accuracy
    problem = "cannot be called as metric(outputs, batch): {reason}"
    return load_function(f"validation.metrics.{name}", path, ("outputs", "batch"), problem)


def accuracy(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the number of correct predictions, and of targets that are not IGNORED.

    Args:
        outputs: Logits [..., classes], or an output with an attribute `logits`.
        batch: "targets" int64 [...], or a sequence whose second element they are.

    Raises:
        ConfigError: If there are no such targets.

    Example:
        >>> import torch
        >>> from distmp.models.metrics import accuracy
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
        >>> correct, count = accuracy(logits, {"targets": torch.tensor([0, 1, 1])})
        >>> int(correct), int(count)
        (2, 3)
    """
    logits = logits_of(outputs)
    targets = None
    with suppress(TypeError, IndexError, KeyError):
        targets = batch["targets"] if isinstance(batch, Mapping) else batch[1]
    if not isinstance(targets, Tensor) or targets.shape != logits.shape[:-1]:
        shape = f" and targets {[*targets.shape]}" if isinstance(targets, Tensor) else ""
        raise ConfigError(
            "validation.metrics",
            "accuracy",
            "needs logits [..., classes] and integer targets [...] as batch['targets'] or "
            f"batch[1], but the model returned {[*logits.shape]}{shape}; name your own function",
        )
    counted = targets != IGNORED
    right = (logits.argmax(-1) == targets) & counted
    return right.sum(dtype=torch.float64), counted.sum(dtype=torch.float64)
