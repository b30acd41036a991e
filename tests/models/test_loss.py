from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from distmp.data import IGNORED
from distmp.models.loss import next_token_loss


class Constant(nn.Module):
    """Returns the same logits for any input."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape == self.logits.shape[:2]
        return self.logits


def batch(targets: Tensor) -> dict[str, Tensor]:
    return {"inputs": torch.zeros_like(targets), "targets": targets}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_over_targets_that_count(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(3, 40, 7, generator=generator)).to(dtype)
    targets = torch.randint(7, (3, 40), generator=generator)
    targets[1, 5:30] = IGNORED
    loss, weight = next_token_loss(Constant(logits), batch(targets))
    probabilities = torch.softmax(logits.double(), -1)
    expected = sum(
        -probabilities[i, j, targets[i, j]].log().item()
        for i in range(3)
        for j in range(40)
        if targets[i, j] != IGNORED
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert weight.item() == 95
    assert loss.dtype == weight.dtype == torch.float32
    assert loss.shape == weight.shape == ()


def test_ignored_batch_has_neither_loss_nor_weight_nor_gradient() -> None:
    logits = torch.randn(2, 4, 7, requires_grad=True)
    loss, weight = next_token_loss(Constant(logits), batch(torch.full((2, 4), IGNORED)))
    loss.backward()
    assert (loss.item(), weight.item()) == (0.0, 0.0)
    assert logits.grad is not None
    assert not logits.grad.any()
