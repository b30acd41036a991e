"""Losses of microbatches that the user has not given, or given wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distmp.errors import ConfigError
from distmp.testing import check_gradient
from distmp.testing.check import default_loss, make_splits
from distmp.testing.reference import loss_and_weight

INPUTS, LABELS = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 2, -100])


class WithLoss(nn.Module):
    """Returns logits, and the cross entropy with class weights and label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.weight = nn.Linear(2, 3), torch.tensor([1.0, 2.0, 4.0])

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(inputs)
        return {"logits": logits, "loss": cross_entropy(logits, labels, self.weight, **SMOOTHED)}


SMOOTHED: Any = {"label_smoothing": 0.1}


def test_loss_is_the_one_that_the_model_calls() -> None:
    torch.manual_seed(0)
    model = WithLoss()
    total, weight = default_loss(model, {"inputs": INPUTS, "labels": LABELS})
    mean = model(INPUTS, LABELS)["loss"]
    assert float(weight) == 1 + 2 + 4
    torch.testing.assert_close(total / weight, mean)


@pytest.mark.parametrize(
    ("batch", "found"), [(INPUTS, "'Tensor'"), ({"ids": INPUTS, "mask": LABELS}, "['ids', 'mask']")]
)
def test_microbatch_without_labels_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(ConfigError, match="pass loss_sum") as error:
        default_loss(nn.Linear(2, 3), batch)
    assert str(error.value).startswith(f"microbatch = {found}: neither")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss, "as a pair"),
        (lambda loss: (loss, None), "as a pair"),
        (lambda loss: (loss, -1), "as a pair"),
        (lambda loss: (loss, 0), "a weight of 0 only with a loss of 0"),
    ],
)
def test_wrong_returns_of_loss_sum_are_refused(returned: Any, message: str) -> None:
    def loss_sum(model: nn.Module, batch: Tensor) -> Any:
        return returned(model(batch).square().sum())

    with pytest.raises(ConfigError, match=f"what loss_sum returns = .*{message}"):
        loss_and_weight(loss_sum, nn.Linear(2, 3), INPUTS)


def test_loss_without_labels_may_have_no_gradient() -> None:
    total, weight = loss_and_weight(lambda *_: (torch.zeros(()), torch.tensor(0)), nn.ReLU(), 0)
    assert (float(total), weight) == (0, 0)


def test_samples_whose_labels_are_all_ignored_are_refused() -> None:
    def train_step(model: nn.Module, microbatches: list[Any]) -> None:
        for inputs, labels in microbatches:
            cross_entropy(model(inputs), labels, reduction="sum").backward()

    samples = [(row, torch.tensor(-100)) for row in INPUTS]
    for weights in ("tokens", "samples", "sum"):
        with pytest.raises(ConfigError, match="weights of samples = 0: there is nothing to compa"):
            check_gradient(train_step, nn.Linear(2, 3), samples, weights)
    check_gradient(train_step, nn.Linear(2, 3), [*samples, (INPUTS[0], LABELS[1])], "sum")


def test_samples_are_divided_unevenly() -> None:
    splits = dict(make_splits([*zip(INPUTS, LABELS, strict=True)], 1, tokens=True))
    sizes = [[len(part) for part in parts] for parts in splits.values()]
    assert sizes == [[4], [1, 3], [1, 2, 1], [1, 3]]
    masked = splits["a microbatch without labels"]
    assert [[int(label) for _, label in part] for part in masked] == [[-100], [1, 2, -100]]
