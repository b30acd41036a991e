"""Batches with the keys of Hugging Face: "input_ids", "labels" and "attention_mask".

"labels" are not shifted: label t is token t, and the loss predicts it from the tokens before it.
Labels of -100 have no loss. Loss and weight are those of the causal language models of
transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from distmp.data import IGNORED
from distmp.errors import ConfigError

_RIGHT = (
    "this model takes no attention_mask, so padding has to follow the tokens: each row is ones, "
    "then zeros; set padding_side='right' on the tokenizer"
)


def is_hugging_face(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has the keys of Hugging Face.

    Raises:
        ConfigError: If it has "inputs", too.
    """
    if "input_ids" in batch and "inputs" in batch:
        raise ConfigError(
            "batch",
            [*batch],
            "has 'inputs' and 'input_ids'; return either inputs and targets (shifted by one "
            "token), or input_ids and labels (not shifted)",
        )
    return "input_ids" in batch


def model_inputs(
    batch: Mapping[str, Tensor], arguments: Collection[str]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the inputs, the targets and the keyword arguments of a model.

    Args:
        batch: "input_ids" int64 [batch, time]. "labels" of the same shape, not shifted; without
            them, every token that "attention_mask" (0 for padding) leaves is a label.
            "position_ids", if any, restart in each document.
        arguments: Names of the arguments of the model's forward. One that takes no
            "attention_mask" gets none, and needs padding at the end.

    Returns:
        Inputs and targets, int64 [batch, time], and the arguments. The target of the last token is
        IGNORED.

    Raises:
        ConfigError: If there are neither labels nor a mask, or padding where the model sees it.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    options: dict[str, Tensor] = {}
    if mask is not None and "attention_mask" in arguments:
        options["attention_mask"] = mask
    elif mask is not None:
        _check_padding(mask)
    if "position_ids" in batch:
        options["position_ids"] = batch["position_ids"]
    return ids, F.pad(_labels(batch)[:, 1:], (0, 1), value=IGNORED), options


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    ids, labels, mask = batch["input_ids"], batch.get("labels"), batch.get("attention_mask")
    if labels is None and mask is None:
        raise ConfigError(
            "batch",
            [*batch],
            f"has no 'labels'; add them (a copy of input_ids, not shifted, with {IGNORED} where no "
            "token is to be predicted), or the 'attention_mask' of the padding, which gives them",
        )
    found = ids.masked_fill(mask == 0, IGNORED) if labels is None and mask is not None else labels
    if found is None or found.shape != ids.shape or ids.dim() != 2:
        shapes = {key: tuple(value.shape) for key, value in batch.items() if key != "position_ids"}
        raise ConfigError("batch", shapes, "input_ids and labels must be [batch, time]")
    return found


def _check_padding(mask: Tensor) -> None:
    """Refuse padding before tokens.

    On a GPU, a comparison would make the host wait. There, a kernel stops the process.

    Raises:
        ConfigError: With the first row that has such padding.
    """
    if isinstance(mask, FakeTensor) or torch.compiler.is_compiling():
        return
    if mask.dim() != 2:
        raise ConfigError("attention_mask", tuple(mask.shape), _RIGHT)
    is_right = ((mask[:, 1:] != 0) <= (mask[:, :-1] != 0)).all(1)
    if mask.device.type != "cpu":
        torch._assert_async(is_right.all(), f"attention_mask: {_RIGHT}")
    elif not is_right.all():
        raise ConfigError("attention_mask", mask[~is_right][0].tolist(), _RIGHT)
