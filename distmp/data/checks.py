"""Checks of datasets that users pass, before the first sample is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Sampler

from distmp.data.loading import is_stream
from distmp.errors import ConfigError


def check_dataset(setting: str, dataset: Any, workers: int) -> None:
    """Refuse an object that is no dataset, or one that is already divided over ranks or workers.

    Args:
        setting: Name of the argument that holds the dataset, for messages.
        dataset: The object that the user passed.
        workers: Processes that read it.

    Raises:
        ConfigError: With the type of the object, and what to pass instead.
    """
    if problem := problem_of(dataset):
        raise ConfigError(setting, type(dataset).__name__, problem)
    check_workers("workers", workers, dataset)


def check_workers(setting: str, workers: int, dataset: Any) -> None:
    """Refuse several workers for a stream.

    Raises:
        ConfigError: With the number of workers.
    """
    if workers > 1 and is_stream(dataset):
        raise ConfigError(
            setting,
            workers,
            "each worker would read the whole stream; use 1, which reads ahead, or 0",
        )


def problem_of(dataset: Any) -> str | None:
    """Return why samples cannot be read from an object, and what to do; None if they can."""
    if isinstance(dataset, TorchDataLoader | Sampler):
        return (
            "is not a dataset; pass its dataset (loader.dataset), without a DistributedSampler: "
            "distmp shuffles, divides the samples over the ranks, and collates"
        )
    if isinstance(dataset, Mapping):
        return f"holds several datasets; pass one of {', '.join(map(repr, list(dataset)[:5]))}"
    if isinstance(dataset, Iterator):
        return (
            "can be read only once; pass an object whose __iter__ begins a new pass, such as an "
            "IterableDataset, or a list of its samples"
        )
    if is_stream(dataset):
        return _problem_of_stream(dataset)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return (
            "is not a dataset: it needs __len__ and __getitem__ (map-style), or __iter__ (iterable)"
        )
    return None if len(dataset) else "has no sample"


def _problem_of_stream(dataset: Any) -> str | None:
    if getattr(dataset, "_distributed", None) is None:  # of Hugging Face
        return None
    return (
        "is divided over the ranks by split_dataset_by_node; pass the dataset before that, "
        "because distmp divides it, too"
    )
