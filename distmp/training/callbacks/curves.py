"""Draws the curves of a run into a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distmp.distributed.progress import current_phase
from distmp.telemetry import draw_curves, read_records
from distmp.training.callbacks.callback import Callback
from distmp.training.run_directory import try_to_write

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


class Curves(Callback):
    """Draws loss, learning rate, gradient norm and loss scale at the end of a run."""

    def on_train_end(self, trainer: Trainer, *, finished: bool) -> None:
        """Draw the curves of all steps up to now, on rank 0."""
        current_phase.enter("drawing curves")
        if trainer.world.rank != 0 or not trainer.config.log.curves:
            return

        def draw(path: Path) -> None:
            draw_curves(read_records(trainer.directory.records), path)

        try_to_write(trainer.directory.curves, draw, trainer.console.message)
