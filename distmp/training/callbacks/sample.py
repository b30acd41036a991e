"""Prints a text that the trained model generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distmp.data.text import decode, encode
from distmp.distributed.progress import current_phase
from distmp.models.sampling import generate
from distmp.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


class TextSample(Callback):
    """Generates a sample at the end of a run, where samples are text."""

    def on_train_end(self, trainer: Trainer, *, finished: bool) -> None:
        """Print the sample of the section `sample`."""
        if not finished:
            return
        current_phase.enter("generating a sample")
        try:
            text = _generate_text(trainer)
        except ValueError as error:
            trainer.console.message(f"no sample of generated text: {error}")
            return
        if text is not None:
            trainer.console.message(f"sample of generated text:\n{text}")


def _generate_text(trainer: Trainer) -> str | None:
    """Return a generated text, or None if the model does not generate text.

    Raises:
        ValueError: If the output of the model is NaN.
    """
    config = trainer.config
    # The loss `next_token` requires that the model turns token ids into logits.
    writes_text = config.data.source == "text" and config.model.loss == "next_token"
    if not writes_text or config.sample.length == 0:
        return None
    # Every rank generates the same text: the forward of a sharded model needs all ranks.
    tokens = generate(
        trainer.engine.module,
        encode(config.sample.prompt).to(trainer.world.device),
        count=config.sample.length,
        sequence_length=config.data.sequence_length,
        temperature=config.sample.temperature,
        generator=torch.Generator().manual_seed(config.seed),
    )
    return decode(tokens)
