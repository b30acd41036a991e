"""Saves a Hugging Face model in its own format at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distmp.distributed.progress import current_phase
from distmp.errors import CheckpointError
from distmp.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


class HuggingFaceExport(Callback):
    """Saves the FP32 weights, so that `from_pretrained` loads them."""

    def on_train_end(self, trainer: Trainer, *, finished: bool) -> None:
        """Write the folder on rank 0. Every rank contributes its shards."""
        if not finished or not trainer.config.model.is_hugging_face:
            return
        # Imported here: most runs do not need it.
        from distmp.export.files import write
        from distmp.export.sources import EngineWeights

        current_phase.enter("saving the model", transfers=True)
        folder, writes = trainer.directory.model, trainer.world.rank == 0
        weights = EngineWeights(trainer.engine.state_dict(), keep=writes)
        try:
            write(folder, weights, trainer.fingerprint["model"], torch.float32, writes=writes)
        except CheckpointError as error:
            trainer.console.message(f"{error}; distmp export writes it from the checkpoint")
        else:
            trainer.console.message(f"model in the Hugging Face format: {folder}")
