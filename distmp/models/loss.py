"""Losses: each returns a sum and its weight, so that no mean of means is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.data import IGNORED


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the next token, summed over the targets that are not IGNORED.

    Args:
        model: Called with "inputs"; returns logits [batch, time, vocabulary], or an output with an
            attribute `logits`, as models of Hugging Face do.
        batch: "inputs" int64 [batch, time] and "targets" int64 [batch, time].

    Returns:
        Loss sum in nats and number of targets, both FP32, 0-dim, on the device of the logits. The
        softmax is computed in FP32 for logits of any dtype. Counts are exact up to 2**24.
    """
    logits = logits_of(model(batch["inputs"]))
    targets = batch["targets"]
    loss_sum = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss_sum, (targets != IGNORED).sum().to(torch.float32)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its `logits`."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits
