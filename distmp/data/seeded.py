"""Samples that draw random numbers, the same ones at their place in the order of the data.

A data set that crops, masks or shuffles draws from torch, numpy or Python's `random`. What it draws
is made a function of the seed and of the position in the order, as the order itself is: a run that
is resumed gets the samples it would have had, with any number of workers and ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class SeededSamples:
    """A data set that is asked for (position, index) and draws what belongs to the position.

    Args:
        dataset: Map-style data set.
        seed: Of the run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> Any:
        """Return the samples of a microbatch; the data loader calls it by this name."""
        whole_microbatch = getattr(self.dataset, "__getitems__", None)
        with _generators_kept():
            if whole_microbatch is not None:
                _seed_generators(self.seed, places[0][0])
                return whole_microbatch([index for _, index in places])
            return [self._sample(position, index) for position, index in places]

    def _sample(self, position: int, index: int) -> Any:
        _seed_generators(self.seed, position)
        return self.dataset[index]


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Give torch's generator of the CPU, numpy's and Python's back as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _seed_generators(seed: int, position: int) -> None:
    digest = hashlib.sha256(f"sample {seed} {position}".encode()).digest()
    # Not `torch.manual_seed`, which seeds all devices.
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    random.seed(digest[12:])
