"""Low-precision matmuls during a step: random numbers, and statistics over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distmp.distributed.world import World
from distmp.engine.precision_phases import PhaseSchedule
from distmp.errors import ConfigError
from distmp.quantization.layers import LowPrecisionLayers
from distmp.quantization.linear import ProductFormats
from distmp.scaling.step_decision import StepDecision
from distmp.utils.host_copy import HostCopy


class MatmulStatistics:
    """Statistics of the operands of low-precision matmuls in a step, summed over ranks.

    They are copied to the host in the background.

    Args:
        layers: Names of the layers.
        sums: Saturated or non-finite, underflowed and all values, of each layer and operand, over
            all ranks, FP64 [layers, 5, 3].
        largest: Largest magnitudes on this rank, FP64 [layers, 5].
    """

    def __init__(self, layers: list[str], sums: Tensor, largest: Tensor) -> None:
        self.layers = layers
        self._copy = HostCopy(torch.cat([largest[..., None], sums], 2))

    def read(self) -> Tensor:
        """Wait for the step and return FP64 [layers, 5, 4] on the host.

        The second dimension is that of `distmp.quantization.linear.OPERANDS`, the third that of
        `distmp.quantization.operands.STATISTICS`.
        """
        return self._copy.tensor()


class LowPrecisionMatmuls:
    """Runs low-precision matmuls in the steps of an engine; without layers it does nothing.

    Args:
        layers: The layers with low-precision matmuls; None: there are none.
        world: The ranks.
        schedule: Sets the formats of each step; None without phases.

    Attributes:
        layers: The layers with low-precision matmuls; None: there are none.
        statistics: Statistics of the last step; None before the first step and without layers.
        schedule: Sets the formats of each step; None without phases.
        formats: The policy of `precision.phases` in the last step; None without phases.
        product_formats: The formats of the layers in the last step; None without layers.
    """

    def __init__(
        self, layers: LowPrecisionLayers | None, world: World, schedule: PhaseSchedule | None = None
    ) -> None:
        self.layers = layers
        self.statistics: MatmulStatistics | None = None
        self.formats: str | None = None
        self.product_formats: ProductFormats | None = None
        self._world = world
        self.schedule = schedule
        self._forwards = _forwards(layers)

    def check_unchanged(self) -> None:
        """Refuse layers that have another forward than when the engine was built.

        Raises:
            ConfigError: If another engine, or the user, has replaced the forward of a layer.
        """
        problem = (
            "was replaced since the engine was built (by an assignment, or by another engine that "
            "has the same layer), so its products would not be those of precision.policy; change a "
            "model before you build the engine, and give each engine its own layers"
        )
        forwards = _forwards(self.layers)
        if changed := [name for name, each in forwards.items() if each is not self._forwards[name]]:
            raise ConfigError("model", f"{changed[0]}.forward", problem)

    def begin_step(self, step: int) -> None:
        """Clear the statistics of the previous step, and store the formats of step `step`."""
        if self.layers is not None:
            self.layers.begin_step()
            self.product_formats = self.layers.formats
        if self.schedule is not None:
            self.formats = self.schedule.begin_step(step)

    def begin_microbatch(self, step: int, index: int, count: int) -> None:
        """Derive random numbers from the position of the microbatch in the global batch.

        Args:
            step: Number of steps before this one.
            index: Index of the microbatch on this rank.
            count: Number of microbatches on each rank.
        """
        if self.layers is not None:
            self.layers.begin_microbatch(step, self._world.rank * count + index)

    def terms(self) -> Tensor | None:
        """Return the numbers to sum over ranks, FP64 1-dim; None without layers."""
        return None if self.layers is None else self.layers.counts[..., 1:].flatten()

    def end_step(self, sums: Tensor, decision: StepDecision) -> None:
        """Keep the statistics of the step, and set the formats of the next one.

        Args:
            sums: The sums of `terms` over ranks.
            decision: The decision on this step.
        """
        if self.layers is not None:
            counts = self.layers.counts
            sums = sums.view_as(counts[..., 1:])
            self.statistics = MatmulStatistics([*self.layers.modules], sums, counts[..., 0])
        if self.schedule is not None:
            self.schedule.end_step(decision)

    def continue_from_state(self) -> None:
        """Continue from the loaded state."""
        if self.schedule is not None:
            self.schedule.continue_from_state()


def _forwards(layers: LowPrecisionLayers | None) -> dict[str, Any]:
    modules = {} if layers is None else layers.modules
    return {name: vars(module).get("forward") for name, module in modules.items()}
