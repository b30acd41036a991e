"""Samples with several documents; tokens attend only to their own document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distmp.data import IGNORED


def document_positions(ends: Tensor) -> Tensor:
    """Return the position of each token in its document, or in the sample if it begins earlier.

    Args:
        ends: Whether a token is the last one of its document, bool [time].

    Returns:
        int64 [time].
    """
    places = torch.arange(len(ends))
    starts = torch.zeros_like(places)
    starts[1:] = torch.where(ends[:-1], places[1:], 0)
    return places - starts.cummax(0).values


class PackedDocuments(Dataset[dict[str, Tensor]]):
    """Adds "positions" to the samples of a dataset, and drops targets of another document.

    Args:
        dataset: Map-style dataset of {"inputs": int64 [T], "targets": int64 [T]}. Its other
            attributes are attributes of this one, too.
        end_of_text: Token id that ends each document.
    """

    def __init__(self, dataset: Any, end_of_text: int) -> None:
        self.dataset = dataset
        self.end_of_text = end_of_text

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample with "positions" int64 [T], which restart in each document.

        The target of the last token of a document would be the first one of the next document. It
        is IGNORED.
        """
        sample = self.dataset[index]
        ends = sample["inputs"] == self.end_of_text
        return {
            **sample,
            "targets": sample["targets"].masked_fill(ends, IGNORED),
            "positions": document_positions(ends),
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)
