"""Losses: each returns a sum and its weight, so that no mean of means is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.data import IGNORED
from distmp.errors import ConfigError
from distmp.models.linear_cross_entropy import check_targets
from distmp.utils.tensor_trees import described

# Largest number of wrappers of a model: DDP, a compiled module, FSDP1.
_WRAPPERS = 3

NO_POSITIONS = (
    "{} does not take the positions of tokens in their documents; use distmp's transformer, or "
    "give your model a keyword `positions` and the attribute takes_positions = True"
)


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next token, summed over the targets that are not IGNORED.

    A model with the attribute `takes_targets` computes the sum itself, in chunks of tokens:
    distmp's transformer, and Hugging Face models after `huggingface.prepare_loss`. For others, this
    holds the logits of all tokens.

    Args:
        model: Called with "inputs"; returns logits [batch, time, vocabulary], or an output with an
            attribute `logits`, as models of Hugging Face do. If it takes targets, it returns the
            loss sum in place of logits.
        batch: "inputs" int64 [batch, time] and "targets" int64 [batch, time]. "positions" int64
            [batch, time], if any, go to the model; see `Transformer.forward`.

    Returns:
        Loss sum in nats and number of targets, both FP32, 0-dim, on the device of the logits. The
        softmax is computed in FP32 for logits of any dtype. Counts are exact up to 2**24.

    Raises:
        ConfigError: For positions, if the model has no attribute `takes_positions`, and for
            targets outside of the vocabulary, see `check_targets`, and a batch without these keys.
    """
    _check_batch(batch)
    targets = batch["targets"]
    options = {"positions": batch["positions"]} if "positions" in batch else {}
    if options and not takes_positions(model):
        raise ConfigError("batch", [*batch], NO_POSITIONS.format(type(model).__name__))
    if takes_targets(model):
        loss_sum = logits_of(model(batch["inputs"], targets=targets, **options))
    else:
        logits = logits_of(model(batch["inputs"], **options))
        check_targets(targets, logits.shape[-1])
        loss_sum = F.cross_entropy(
            logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    return loss_sum, (targets != IGNORED).sum().to(torch.float32)


def _check_batch(batch: Any) -> None:
    if isinstance(batch, Mapping) and "inputs" in batch and "targets" in batch:
        return
    raise ConfigError(
        "batch",
        described(batch),
        "the loss next_token reads the keys inputs and targets, both int64 [batch, time]; return "
        "them from the data set, or set model.loss to a function that reads what is there",
    )


def takes_targets(model: nn.Module) -> bool:
    """Return whether a model, perhaps wrapped, computes its loss itself."""
    return _has(model, "takes_targets")


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model, perhaps wrapped, takes the positions of tokens in their documents."""
    return _has(model, "takes_positions")


def _has(model: nn.Module, attribute: str) -> bool:
    """Return the attribute of a model, or of the model in its wrappers, whose only child it is."""
    for _ in range(_WRAPPERS):
        children = [*model.children()]
        if hasattr(model, attribute) or len(children) != 1:
            break
        model = children[0]
    return bool(getattr(model, attribute, False))


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its `logits`."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
