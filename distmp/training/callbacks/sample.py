"""Prints texts that the model generates, every `sample.every` steps and at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distmp.config import RunConfig
from distmp.data import text
from distmp.data.token_metadata import BYTES
from distmp.distributed.progress import current_phase
from distmp.engine.evaluation import evaluation_mode
from distmp.errors import require
from distmp.models.huggingface_files import load_tokenizer
from distmp.models.loss import logits_of
from distmp.training.build import Run
from distmp.training.callbacks.callback import Callback, PendingStep, TrainingLoop


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    count: int,
    sequence_length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue a prompt.

    Calls `model(tokens)` exactly `count` times, so that all ranks of a sharded model can call this
    together, with generators of the same seed.

    Args:
        model: int64 [1, time] -> logits [1, time, vocabulary], or an output with an attribute
            `logits`.
        prompt: Token ids, int64 [length], at least one, on the device of the model.
        count: Number of tokens to add.
        sequence_length: Longest sequence the model accepts; earlier tokens are cut off.
        temperature: Divides the logits; 0 always selects the most likely token.
        generator: CPU generator of the samples; None for torch's default generator.

    Returns:
        Prompt and continuation, int64 [length + count], on the device of the prompt.

    Raises:
        ValueError: If the output of the model is NaN.
    """
    tokens = prompt
    with evaluation_mode(model):
        for _ in range(count):
            logits = logits_of(model(tokens[None, -sequence_length:]))[0, -1]
            token = _choose(logits.float().cpu(), temperature, generator)
            tokens = torch.cat((tokens, token.to(tokens.device)))
    return tokens


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Return one token id, int64 [1], for FP32 logits [vocabulary]."""
    if logits.isnan().any():
        raise ValueError("the output of the model is NaN")
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if temperature == 0.0 or probabilities.isnan().any():  # too small to divide by
        return logits.argmax(keepdim=True)
    return torch.multinomial(probabilities, 1, generator=generator)


# Divisor of the logits.
_TEMPERATURE = 0.7


class TextSample(Callback):
    """Generates samples where tokens are text.

    Args:
        run: The run.

    Raises:
        SetupError: On every rank, if `sample.tokenizer` cannot be used.
    """

    def __init__(self, run: Run) -> None:
        self._every = run.config.sample.every
        self._codec = run.world.ranks.all_or_none(lambda: _find_codec(run.config))

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        """Print a sample if it is due; the last step has one at the end."""
        if self._every and step.step % self._every == 0 and step.step < trainer.config.steps:
            with trainer.timer.paused():
                self._print(trainer, f" after step {step.step}")

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Print a sample of the finished model."""
        if finished:
            self._print(trainer, "")

    def _print(self, trainer: TrainingLoop, when: str) -> None:
        config = trainer.config
        if self._codec is None:
            return
        current_phase.enter("generating a sample")
        # Each token takes a forward, so this may take long.
        trainer.console.message(f"generating {config.sample.length:,} tokens of text{when}")
        try:
            # Every rank generates the same text: the forward of a sharded model needs all ranks.
            tokens = generate(
                trainer.engine.module,
                self._codec.encode(config.sample.prompt).to(trainer.world.device),
                count=config.sample.length,
                sequence_length=config.data.sequence_length,
                temperature=_TEMPERATURE,
                generator=torch.Generator().manual_seed(config.seed),
            )
        except ValueError as error:
            trainer.console.message(f"no sample of generated text{when}: {error}")
            return
        generated = self._codec.decode(tokens)
        trainer.console.message(f"sample of generated text{when}:\n{generated}")


class _Codec(NamedTuple):
    """Converts text to token ids, int64 [length], and back."""

    encode: Callable[[str], Tensor]
    decode: Callable[[Tensor], str]


_BYTES = _Codec(text.encode, text.decode)


def _find_codec(config: RunConfig) -> _Codec | None:
    """Return how the tokens of a run become text; None without a sample.

    Raises:
        ConfigError: If `sample.tokenizer` cannot be used.
    """
    tokenizer = config.text_tokenizer()
    if tokenizer is None:
        return None
    return _BYTES if tokenizer == BYTES else _codec_of(tokenizer, config.sample.prompt)


def _codec_of(directory: str, prompt: str) -> _Codec:
    tokenizer = load_tokenizer("sample.tokenizer", Path(directory).expanduser())
    known = tokenizer.encode(prompt, add_special_tokens=False)
    require(bool(known), "sample.prompt", prompt, f"has no tokens in {directory}; write other text")
    return _Codec(
        lambda prompt: torch.tensor(tokenizer.encode(prompt, add_special_tokens=False)),
        lambda tokens: str(tokenizer.decode(tokens.tolist())),
    )
