"""Narrow matrix products during a step: random numbers, and statistics over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from distmp.distributed.world import World
from distmp.quantization import NarrowLayers
from distmp.utils.host_copy import HostCopy


class NarrowStatistics:
    """Statistics of the operands of narrow products in a step, summed over ranks.

    They are copied to the host in the background.

    Args:
        layers: Names of the layers.
        sums: Saturated or non-finite, underflowed and all values, of each layer and operand, over
            all ranks, FP64 [layers, 5, 3].
        largest: Largest magnitudes on this rank, FP64 [layers, 5].
    """

    def __init__(self, layers: list[str], sums: Tensor, largest: Tensor) -> None:
        self.layers = layers
        self._shape = (len(layers), sums.shape[1], 4)
        self._copy = HostCopy(torch.cat([largest[..., None], sums], 2).flatten())

    def read(self) -> Tensor:
        """Wait for the step and return FP64 [layers, 5, 4] on the host.

        The second dimension is that of `distmp.quantization.linear.OPERANDS`, the third that of
        `distmp.quantization.counts.STATISTICS`.
        """
        return torch.tensor(self._copy.read(), dtype=torch.float64).view(self._shape)


class NarrowProducts:
    """What the engine does about narrow products; nothing under wide policies.

    Args:
        layers: The layers with narrow products; None without any.
        world: The ranks.

    Attributes:
        layers: The layers with narrow products; None without any.
        step: Number of steps taken since the start of training.
        statistics: Those of the last step; None before, and without narrow products.
    """

    def __init__(self, layers: NarrowLayers | None, world: World) -> None:
        self.layers = layers
        self.step = 0
        self.statistics: NarrowStatistics | None = None
        self._world = world

    def begin_step(self) -> None:
        """Clear the statistics of the previous step."""
        if self.layers is not None:
            self.layers.begin_step()

    def begin_microbatch(self, index: int, count: int) -> None:
        """Derive random numbers from the position of the microbatch in the global batch.

        Args:
            index: Index of the microbatch on this rank.
            count: Number of microbatches on each rank.
        """
        if self.layers is not None:
            self.layers.begin_microbatch(self.step, self._world.rank * count + index)

    def terms(self) -> Tensor | None:
        """Return the numbers to sum over ranks, FP64 1-dim; None without narrow products."""
        return None if self.layers is None else self.layers.counts[..., 1:].flatten()

    def end_step(self, sums: Tensor) -> None:
        """Keep the statistics of the step.

        Args:
            sums: The sums of `terms` over ranks.
        """
        self.step += 1
        if self.layers is not None:
            counts = self.layers.counts
            self.statistics = NarrowStatistics(
                [*self.layers.modules], sums.view_as(counts[..., 1:]), counts[..., 0]
            )
