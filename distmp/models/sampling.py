"""Generates text with a model, token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distmp.models.loss import logits_of


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
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        for _ in range(count):
            logits = logits_of(model(tokens[None, -sequence_length:]))[0, -1]
            token = _choose(logits.float().cpu(), temperature, generator)
            tokens = torch.cat((tokens, token.to(tokens.device)))
    finally:
        for part in training:  # parts that were in evaluation mode before stay so
            part.training = True
    return tokens


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Return one token id, int64 [1], for FP32 logits [vocabulary]."""
    if logits.isnan().any():
        raise ValueError("the output of the model is NaN")
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if temperature == 0.0 or probabilities.isnan().any():  # too small to divide by
        return logits.argmax(keepdim=True)
    return torch.multinomial(probabilities, 1, generator=generator)
