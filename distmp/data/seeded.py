"""Makes random numbers of samples a function of the seed and the position in the order.

A data set that crops, masks or shuffles draws from torch, numpy or Python's `random`. Seeding them
for each position gives a resumed run the same samples that it would have had without the
interruption, with any number of workers and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmp.utils.generators import generators_kept, seed_generators


class SeededSamples:
    """A data set indexed by (position, index) that seeds the generators with the position.

    Args:
        dataset: Map-style data set.
        seed: Seed of the run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> Any:
        """Return the samples of a microbatch; torch's data loader calls this method.

        Args:
            places: (position, index) of each sample.
        """
        get_items = getattr(self.dataset, "__getitems__", None)
        with generators_kept():
            if get_items is not None:
                self._seed_generators(places[0][0])
                return get_items([index for _, index in places])
            return [self._sample(position, index) for position, index in places]

    def _sample(self, position: int, index: int) -> Any:
        self._seed_generators(position)
        return self.dataset[index]

    def _seed_generators(self, position: int) -> None:
        seed_generators(f"sample {self.seed} {position}")
