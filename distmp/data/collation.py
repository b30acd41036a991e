"""Combines samples into a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, default_collate

from distmp.data.errors import DataError
from distmp.utils.tensor_trees import described


def collate_of(dataset: Any) -> Callable[[list[Any]], Any]:
    """Return the function that makes a microbatch of samples.

    It is the attribute `collate_fn` of the dataset, or of the dataset that is split into
    `torch.utils.data.Subset`s; without one, `collate`.
    """
    while not hasattr(dataset, "collate_fn") and isinstance(dataset, Subset):
        dataset = dataset.dataset
    function: Callable[[list[Any]], Any] = getattr(dataset, "collate_fn", None) or collate
    return function


def collate(samples: Sequence[Any]) -> Any:
    """Combine samples into a microbatch, as torch's `default_collate` does.

    The values of a mapping may be lists of numbers, which is what Hugging Face datasets return
    without `with_format("torch")`: they become tensors [batch, length].

    Raises:
        DataError: If the samples cannot be stacked, for example because of their lengths.
    """
    converted = [_with_tensors(sample) for sample in samples]
    try:
        return default_collate(converted)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the samples of a microbatch cannot be stacked: {str(error).splitlines()[0]}; "
            f"the first is {described(converted[0])}; pad or crop the samples, or give a "
            "collate_fn(samples) that returns a microbatch",
        ) from error


def _with_tensors(sample: Any) -> Any:
    """Return a mapping with lists of numbers as tensors; any other sample as it is."""
    if not isinstance(sample, Mapping) or not any(isinstance(v, list) for v in sample.values()):
        return sample
    return {key: _as_tensor(value) for key, value in sample.items()}


def _as_tensor(value: Any) -> Any:
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if first is value or not isinstance(first, bool | int | float):
        return value
    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError):  # lists of several lengths or types
        return value
