"""Saves a Hugging Face model, or adapters, in the format of their library at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distmp.distributed.progress import current_phase
from distmp.errors import CheckpointError
from distmp.training.callbacks.callback import Callback, TrainingLoop


class HuggingFaceExport(Callback):
    """Saves the FP32 weights, so that `from_pretrained` of transformers or peft loads them.

    Args:
        known: The properties of the run that describe the model, see `describe_model`.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Write the folder on rank 0. Every rank contributes its shards."""
        settings, known = trainer.config.model, self._known
        if not finished or not (settings.is_hugging_face or settings.peft is not None):
            return
        current_phase.enter("saving the model", transfers=True)
        tokenizer = Path(known["tokenizer"]) if "tokenizer" in known else None
        try:
            _write(trainer, known, tokenizer)
        except CheckpointError as error:
            trainer.console.message(f"{error}; distmp export writes it from the checkpoint")
            return
        what = "model in the Hugging Face format" if settings.peft is None else "adapters for peft"
        source = "no tokenizer was found" if tokenizer is None else f"tokenizer of {tokenizer}"
        trainer.console.message(f"{what}: {trainer.directory.model} ({source})")


def _write(trainer: TrainingLoop, known: Mapping[str, Any], tokenizer: Path | None) -> None:
    # Imported here: most runs do not need it.
    from distmp.export.adapters import AdapterWeights, write_adapter
    from distmp.export.files import write
    from distmp.export.sources import EngineWeights

    folder, writes = trainer.directory.model, trainer.world.rank == 0
    weights = EngineWeights(trainer.engine.state_dict(), keep=writes)
    if "adapter" in known:
        own = AdapterWeights(weights)
        write_adapter(folder, own, known["adapter"], tokenizer, writes=writes)
    else:
        described = known["model"]
        write(folder, weights, described, torch.float32, tokenizer=tokenizer, writes=writes)
