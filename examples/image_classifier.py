"""An image classifier: data with random crops, model and loss. There is no training loop here.

    distmp train --config examples/image_classifier.yaml

The images are digits that this file draws, with noise, so nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# Rows of 5 pixels, from top to bottom.
DIGITS = (
    "01110 10001 10001 10001 10001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
CLASSES = len(DIGITS)
SIZE, MARGIN = 12, 2  # of a crop; a stored image has a margin on each side


class Digits:
    """Noisy digits at random places, with random crops for training.

    distmp seeds the random generators from the position of a sample, so crops are reproducible and
    do not depend on the number of ranks.
    """

    def __init__(self, samples: int, noise: float, *, train: bool) -> None:
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.train = train
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        side = SIZE + 2 * MARGIN
        self.images = noise * torch.randn(samples, 1, side, side, generator=generator)
        corners = torch.randint(MARGIN + 1, side - MARGIN - 7, (samples, 2), generator=generator)
        for image, label, (row, column) in zip(self.images, self.labels, corners, strict=True):
            image[0, row : row + 7, column : column + 5] += drawn(int(label))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, column = torch.randint(2 * MARGIN + 1, (2,)) if self.train else (MARGIN, MARGIN)
        image = self.images[index, :, row : row + SIZE, column : column + SIZE]
        return {"inputs": image, "targets": self.labels[index]}


def drawn(digit: int) -> Tensor:
    """Return a digit as FP32 [7, 5]."""
    return torch.tensor([[float(pixel) for pixel in row] for row in DIGITS[digit].split()])


def digits(split: str, sequence_length: int, samples: int = 2048, noise: float = 0.3) -> Digits:
    """Return the dataset of a split (`data.source`)."""
    return Digits(samples if split == "train" else samples // 8, noise, train=split == "train")


def classifier(channels: int = 16) -> nn.Module:
    """Return the model (`model.name`)."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.GroupNorm(4, 2 * channels),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(2 * channels * (SIZE // 2) ** 2, CLASSES),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the loss sum and the number of samples (`model.loss`)."""
    logits = model(batch["inputs"]).float()
    targets = batch["targets"]
    return cross_entropy(logits, targets, reduction="sum"), len(targets)


def two_best(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return how often the target is among the two best classes (`validation.metrics`)."""
    targets = batch["targets"][:, None]
    return (logits.topk(2).indices == targets).sum(), len(targets)
