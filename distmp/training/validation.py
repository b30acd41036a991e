"""What a run shows of its model: the loss on held-out data, and a sample of what it writes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distmp.config import RunConfig
from distmp.data.loading import evaluation_batches
from distmp.data.text import decode, encode
from distmp.distributed.stopping import until_stop_requested
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.models.sampling import generate
from distmp.training.setup import RunComponents


class Validation:
    """Evaluates the model of a run; every rank has to call each method.

    Args:
        config: Of the run.
        parts: Its data.
        engine: Its engine.
        world: The ranks.
        asked: Whether this rank is asked to stop; then all of them leave off.

    Attributes:
        ended_early: Whether the last validation was left off because some rank was asked to stop.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: RunComponents,
        engine: Engine,
        world: World,
        asked: Callable[[], bool],
    ) -> None:
        self._config = config
        self._datasets = parts.datasets
        self._engine = engine
        self._world = world
        self._asked = asked
        self.ended_early = False

    def loss(self, samples: int | None) -> float | None:
        """Return the mean loss on so many held-out samples, or on all of them.

        None if there is no held-out data, or if the validation was left off.
        """
        if self._datasets.validation is None:
            return None
        batches = until_stop_requested(
            evaluation_batches(
                self._datasets.validation,
                samples=samples,
                microbatch_size=self._config.batch.microbatch_size,
                rank=self._world.rank,
                world_size=self._world.world_size,
            ),
            self._asked,
            self._world.group,
        )
        loss = self._engine.evaluate(batches)
        self.ended_early = batches.ended_early
        return None if self.ended_early else loss

    def sample(self) -> str | None:
        """Return a text that the model writes, or None if it does not write text."""
        config = self._config
        # The loss `next_token` says that the model turns token ids into logits.
        writes_text = config.data.source == "text" and config.model.loss == "next_token"
        if not writes_text or config.sample.length == 0:
            return None
        # Every rank writes the same text, because the forward of a sharded model needs all ranks.
        tokens = generate(
            self._engine.module,
            encode(config.sample.prompt).to(self._world.device),
            count=config.sample.length,
            sequence_length=config.data.sequence_length,
            temperature=config.sample.temperature,
            generator=torch.Generator().manual_seed(config.seed),
        )
        return decode(tokens)
