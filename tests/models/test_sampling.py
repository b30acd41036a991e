from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from distmp.training.callbacks.sample import generate


class Counter(nn.Module):
    """Predicts the next of ten tokens after each token; records its inputs."""

    def __init__(self, certainty: float = 50.0) -> None:
        super().__init__()
        self.certainty = certainty
        self.seen: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(tokens[0].tolist())
        return self.certainty * nn.functional.one_hot((tokens + 1) % 10, 10).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continues_after_the_prompt(temperature: float) -> None:
    model = Counter().train()
    tokens = generate(
        model, torch.tensor([3, 7]), count=5, sequence_length=4, temperature=temperature
    )
    assert tokens.tolist() == [3, 7, 8, 9, 0, 1, 2]
    assert tokens.dtype == torch.int64
    assert model.seen == [[3, 7], [3, 7, 8], [3, 7, 8, 9], [7, 8, 9, 0], [8, 9, 0, 1]]
    assert model.training


def test_temperature_and_probabilities() -> None:
    # One logit of 2 among zeros: at temperature 2 its token has e / (e + 9) = 0.232.
    generator = torch.Generator().manual_seed(0)
    tokens = generate(
        Counter(2.0),
        torch.tensor([0]),
        count=4000,
        sequence_length=1,
        temperature=2.0,
        generator=generator,
    ).tolist()
    share = sum(b == (a + 1) % 10 for a, b in itertools.pairwise(tokens)) / 4000
    assert abs(share - 0.232) < 4 * (0.232 * 0.768 / 4000) ** 0.5


def test_same_generator_same_text() -> None:
    drawn = [
        generate(
            Counter(0.1),
            torch.tensor([0]),
            count=20,
            sequence_length=8,
            generator=torch.Generator().manual_seed(seed),
        ).tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_mode_comes_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2)).train()
    with pytest.raises(RuntimeError):
        generate(model, torch.tensor([0]), count=1, sequence_length=8)
    assert model.training
