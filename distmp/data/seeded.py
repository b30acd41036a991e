"""Makes random numbers of samples a function of the seed and the position in the order.

A dataset that crops, masks or shuffles draws from torch, numpy or Python's `random`. Seeding them
for each position gives a resumed run the same samples that it would have had without the
interruption, with any number of workers and ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from distmp.distributed.ranks import describe
from distmp.errors import DataError, DistmpError
from distmp.utils.generators import generators_kept, seed_generators


class SeededMicrobatches:
    """A dataset indexed by (position, index) that seeds the generators with the position.

    Args:
        dataset: Map-style dataset. An attribute `draws_nothing = True` disables the seeding for
            each sample, which takes time.
        seed: Seed of the run.
        collate: Combines samples into a microbatch.
        collate_draws: Whether `collate` may draw random numbers, too.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any],
        *,
        collate_draws: bool = True,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate
        self._collate_draws = collate_draws
        self._draws = not getattr(dataset, "draws_nothing", False)

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> Any:
        """Return a collated microbatch; torch's data loader calls this method.

        Args:
            places: (position, index) of each sample.
        """
        if not (self._draws or self._collate_draws):
            return self.collate([self.dataset[index] for _, index in places])
        with generators_kept():
            samples = self._samples(places)
            seed_generators(f"microbatch {self.seed} {places[0][0]}")
            return self.collate(samples)

    def _samples(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        get_items = getattr(self.dataset, "__getitems__", None)
        if get_items is not None:
            self._seed_generators(places[0][0])
            samples: list[Any] = get_items([index for _, index in places])
            return samples
        return [self.sample(position, index) for position, index in places]

    def sample(self, position: int, index: int) -> Any:
        """Return one sample; changes the state of the generators.

        Raises:
            DataError: If the dataset fails.
        """
        self._seed_generators(position)
        try:
            return self.dataset[index]
        except DistmpError:
            raise
        except Exception as error:
            raise DataError(
                f"sample {index} of the dataset {type(self.dataset).__qualname__} cannot be read: "
                f"{describe(error)} ({_place(error)})"
            ) from error

    def _seed_generators(self, position: int) -> None:
        if self._draws:
            seed_generators(f"sample {self.seed} {position}")


def _place(error: Exception) -> str:
    """Return the file and line in which an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
