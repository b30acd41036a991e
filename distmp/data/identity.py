"""Identifies a dataset without reading it."""

from __future__ import annotations

from typing import Any

from distmp.data.build import Datasets
from distmp.data.streams import length_of


def identity(datasets: Datasets) -> dict[str, Any]:
    """Return what a checkpoint records about the training data, as numbers and text.

    Args:
        datasets: The datasets of the run. A training set may have a method `digest() -> str`;
            that of text files covers names and sizes of files, not their content.
    """
    train = datasets.train
    return {
        "samples": length_of(train),
        "vocabulary": datasets.vocabulary_size,
        "digest": train.digest() if hasattr(train, "digest") else None,
    }
