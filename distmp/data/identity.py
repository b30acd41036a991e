"""What tells one data set from another, without reading it."""

from __future__ import annotations

from typing import Any

from distmp.data.build import Datasets


def identity(datasets: Datasets) -> dict[str, Any]:
    """Return what a checkpoint notes about the training data, in numbers and text.

    Args:
        datasets: A data set that has a method `digest() -> str` is asked; those of text and token
            files answer with names and sizes of files, not with their content.
    """
    train = datasets.train
    return {
        "samples": len(train),
        "vocabulary": datasets.vocabulary_size,
        "digest": train.digest() if hasattr(train, "digest") else None,
    }
