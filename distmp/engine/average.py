"""Exponential moving average (EMA) of the weights, sharded like the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from distmp.distributed.comparison import check_same
from distmp.engine.engine import Engine
from distmp.engine.settings import EmaConfig
from distmp.errors import TrainingError, listed, require
from distmp.optim.state import check_shapes
from distmp.utils.dtypes import local_values
from distmp.utils.flat_shard import FlatShard

logger = logging.getLogger("distmp")


class WeightAverage:
    """Averages the trained weights of an engine. Each rank averages its local tensors.

    The average begins with the weights that the engine has when it is built. Skipped steps do not
    count. Frozen parameters and buffers are not averaged.

    Args:
        engine: The engine.
        config: The decay.

    Attributes:
        values: The average by parameter name, FP32, with the sharding of `engine.weights()`.

    Raises:
        ConfigError: If `config` has no decay.

    Example:
        >>> import torch, distmp
        >>> from distmp.engine.average import WeightAverage
        >>> from distmp.engine.settings import EmaConfig
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(8, 4),
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, fused=True),
        ...     policy="fp32",
        ... )
        >>> average = WeightAverage(engine, EmaConfig(decay=0.9))
        >>> _ = engine.step([torch.ones(2, 8)])
        >>> average.update()
        >>> with average.as_weights():
        ...     evaluation = engine.evaluate([torch.ones(2, 8)])
    """

    def __init__(self, engine: Engine, config: EmaConfig) -> None:
        problem = "the average would always be the weights; use a number below 1, such as 0.999"
        require(config.decay != 0, "config.decay", config.decay, problem)
        self._engine = engine
        self._config = config
        self.values: dict[str, Tensor] = {}
        self.restart()

    @torch.no_grad()
    def update(self) -> None:
        """Include the weights, if a step was applied since the last call. The host does not wait.

        Call it once after each `Engine.step`.

        Raises:
            TrainingError: If a checkpoint has replaced the weights since the average began, or the
                engine has an average as its weights.
        """
        self._check_not_replaced()
        self._check_not_exchanged("average.update()")
        self._is_updated = True
        share = self._share()
        for name, weights in self._engine.weights().items():
            average = local_values(self.values[name])
            average.lerp_(local_values(weights).to(average.dtype), share.to(average.device))

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Continue from stored values with the sharding of `values`, by parameter name.

        Parameters that are missing keep their average.

        Raises:
            ConfigError: If a name is not that of a trained parameter.
            CheckpointError: If a value has another shape or sharding.
            TrainingError: Inside of `as_weights`.
        """
        self._check_not_exchanged("average.load()")
        unknown = listed(sorted(values.keys() - self.values.keys()))
        problem = "is not the name of a trained parameter; use the names of engine.weights()"
        require(not unknown, "values", unknown, problem)
        check_shapes(values, {name: self.values[name] for name in values})
        for name in values:
            local_values(self.values[name]).copy_(local_values(values[name]))
        self._begin()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights that the engine has now.

        Raises:
            TrainingError: Inside of `as_weights`.
        """
        self._check_not_exchanged("average.restart()")
        for name, weights in self._engine.weights().items():
            self.values[name] = _copy(weights)
        self._begin()

    def _begin(self) -> None:
        self._loads, self._is_updated = self._engine.loads, False
        self._applied = self._engine.step_counts[0].clone()

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Give the engine the average as its weights; restore the weights bit for bit on exit.

        Average and weights are swapped tensor by tensor. Every rank has to use it. After an
        exception, the engine keeps the average as its weights; `Engine.step` refuses to train it,
        and `Engine.save` to store it.

        Raises:
            TrainingError: On exit, if a state was loaded inside; on entry, as for `update`.
            ConfigError: On every rank, if their decays differ.
        """
        self._check_not_replaced()
        self._check_not_exchanged("average.as_weights()")
        world, decay = self._engine.world, repr(self._config.decay)
        check_same(world.group, world.device, {"config.decay": decay})
        self._warn_if_never_updated()
        kept: dict[str, Tensor] = {}
        self._exchange(kept)
        self._engine.holds_average = True
        # Not in `finally`: the swap is collective, and after an error other ranks may not reach it.
        yield
        if not self._engine.holds_average:
            raise TrainingError(
                "a state was loaded inside of average.as_weights(), so the weights from before it "
                "are lost; load outside of it"
            )
        self._exchange(kept)
        self._engine.holds_average = False

    @property
    def is_replaced(self) -> bool:
        """Whether a checkpoint has replaced the weights since the average began or was loaded."""
        return self._engine.loads != self._loads

    def _check_not_replaced(self) -> None:
        if self.is_replaced:
            raise TrainingError(
                "engine.load, engine.load_state_dict or a rollback has replaced the weights since "
                "their average began; after it, call average.load(values) with the average that "
                "you saved, or average.restart() to begin with the loaded weights"
            )

    def _check_not_exchanged(self, call: str) -> None:
        if self._engine.holds_average:
            raise TrainingError(
                f"{call} was called while the engine has an average as its weights; call it after "
                "average.as_weights() has ended, and after an error in it only after engine.load"
            )

    def _warn_if_never_updated(self) -> None:
        applied = self._engine.step_counts[0] != self._applied
        if self._is_updated or self._engine.world.rank != 0 or not applied:
            return
        self._is_updated = True  # warns once
        logger.warning(
            "the average lacks the last steps, because average.update() was never called since it "
            "began or was loaded; call it after each engine.step"
        )

    def _share(self) -> Tensor:
        """Return the share of the weights in this update, FP32 0-dim; 0 without a new update."""
        applied, before = self._engine.step_counts[0], self._applied
        self._applied = applied.clone()
        share = torch.full_like(applied, 1 - self._config.decay, dtype=torch.float32)
        return torch.where(applied == before, 0.0, share)

    @torch.no_grad()
    def _exchange(self, kept: dict[str, Tensor]) -> None:
        """Swap average and weights.

        Args:
            kept: Weights in 16 bits, which cannot hold the average, while they are replaced.
        """
        for name, weights in self._engine.weights().items():
            live, average = local_values(weights), local_values(self.values[name])
            if name in kept:
                live.copy_(kept.pop(name))
                continue
            before = live.clone()
            live.copy_(average)
            if live.dtype == average.dtype:
                average.copy_(before)
            else:
                kept[name] = before
        self._engine.publish_weights()


@torch.no_grad()
def _copy(tensor: Tensor) -> Tensor:
    """Return an FP32 copy with the same sharding."""
    if isinstance(tensor, FlatShard):
        values = local_values(tensor).to(torch.float32, copy=True)
        return FlatShard.of(values, tensor.global_shape, tensor.start)
    return tensor.detach().to(torch.float32, copy=True)
