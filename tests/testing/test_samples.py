"""Losses of microbatches that the user has not given, or given wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distmp.testing.samples import DefaultLoss

INPUTS, LABELS = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 2, -100])


class WithLoss(nn.Module):
    """Returns logits, and the cross entropy with label smoothing; None: no loss."""

    def __init__(self, smoothing: float | None) -> None:
        super().__init__()
        self.head, self.smoothing = nn.Linear(2, 3), smoothing

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(inputs)
        if self.smoothing is None:
            return {"logits": logits}
        loss = cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return {"logits": logits, "loss": loss}


@pytest.mark.parametrize(("smoothing", "is_guess"), [(None, True), (0.005, True), (0.0, False)])
def test_loss_is_a_guess_unless_the_model_returns_it(
    smoothing: float | None, is_guess: bool
) -> None:
    torch.manual_seed(0)
    loss = DefaultLoss()
    loss(WithLoss(smoothing), {"inputs": INPUTS, "labels": LABELS})
    assert loss.is_guess == is_guess
