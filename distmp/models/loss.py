"""Losses: each returns a sum and its weight, so that no mean of means is computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.data import IGNORED
from distmp.errors import ConfigError
from distmp.models.hugging_face_batch import is_hugging_face, model_inputs
from distmp.models.linear_cross_entropy import check_targets
from distmp.utils.tensor_trees import described

# Largest number of wrappers of a model: DDP, a compiled module, FSDP1.
_WRAPPERS = 3


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next token, summed over the targets that are not IGNORED.

    A model with the attribute `takes_targets` computes the sum itself, in chunks of tokens:
    distmp's transformer, and Hugging Face models after `huggingface.prepare_loss`. For others, this
    holds the logits of all tokens.

    Args:
        model: Called with "inputs"; returns logits [batch, time, vocabulary], or an output with an
            attribute `logits`, as models of Hugging Face do. If it takes targets, it returns the
            loss sum in place of logits.
        batch: "inputs" int64 [batch, time] and "targets" int64 [batch, time]. Or the keys of
            Hugging Face, see `distmp.models.hugging_face_batch`.

    Returns:
        Loss sum in nats and number of targets, both FP32, 0-dim, on the device of the logits. The
        softmax is computed in FP32 for logits of any dtype. Counts are exact up to 2**24.

    Raises:
        ConfigError: For targets outside of the vocabulary, see `check_targets`, and a batch without
            these keys.
    """
    options: Mapping[str, Tensor] = {}
    if is_hugging_face(batch):
        inputs, targets, options = model_inputs(batch, arguments_of(model))
    elif isinstance(batch, Mapping) and "inputs" in batch and "targets" in batch:
        inputs, targets = batch["inputs"], batch["targets"]
    else:
        raise ConfigError(
            "batch",
            described(batch),
            "the loss next_token reads the keys inputs and targets, both int64 [batch, time], or "
            "those of Hugging Face, input_ids and labels; return them from the dataset, or set "
            "model.loss to a function that reads what is there",
        )
    if takes_targets(model):
        loss_sum = logits_of(model(inputs, targets=targets, **options))
    else:
        logits = logits_of(model(inputs, **options))
        check_targets(targets, logits.shape[-1])
        loss_sum = F.cross_entropy(
            logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    return loss_sum, (targets != IGNORED).sum().to(torch.float32)


def takes_targets(model: nn.Module) -> bool:
    """Return whether a model, perhaps wrapped, computes its loss itself."""
    found = (part.takes_targets for part in _in_wrappers(model) if hasattr(part, "takes_targets"))
    return bool(next(found, False))


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that the forward of a model takes, perhaps wrapped."""
    names: frozenset[str] = frozenset()
    for module in _in_wrappers(model):
        own, passes_more = _arguments(type(module).forward)
        names |= own
        if not passes_more:
            break
    return names


def _in_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model, and the models in its wrappers, of which each has one child."""
    yield model
    for _ in range(_WRAPPERS):
        children = [*model.children()]
        if len(children) != 1:
            return
        model = children[0]
        yield model


@functools.cache
def _arguments(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names of the arguments of a function, and whether it takes any others."""
    parameters = inspect.signature(forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return frozenset(parameters), inspect.Parameter.VAR_KEYWORD in kinds


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its `logits`."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
