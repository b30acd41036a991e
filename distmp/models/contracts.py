"""What distmp passes to users' functions, and what they return, as one table for docs and help."""

from __future__ import annotations

from typing import NamedTuple


class Contract(NamedTuple):
    """How distmp calls a function that a setting names, or what a built-in value of it does.

    Attributes:
        setting: The setting.
        value: The function with its arguments, or the built-in value.
        returns: What it returns, as a phrase.
    """

    setting: str
    value: str
    returns: str


CONTRACTS = (
    Contract(
        "data.source",
        "build(split, sequence_length, **data.options)",
        "the dataset of split 'train' or 'validation'; None without validation",
    ),
    Contract(
        "data.source",
        "text, tokens",
        "samples {inputs, targets}, int64 [sequence_length]; targets are the next tokens",
    ),
    Contract("model.name", "build(**model.options)", "a torch.nn.Module"),
    Contract(
        "model.loss",
        "loss(model, batch)",
        "the sum over the microbatch, a 0-dim tensor, and its weight, a number",
    ),
    Contract(
        "model.loss",
        "next_token",
        "cross entropy in nats and the number of targets that are not -100; reads inputs, targets "
        "and, if present, positions, int64 [batch, time], or Hugging Face's input_ids, labels and "
        "attention_mask",
    ),
)


def as_table() -> str:
    """Return the table in Markdown."""
    rows = [f"| `{c.setting}` | `{c.value}` | {c.returns} |" for c in CONTRACTS]
    return "\n".join(["| setting | function or value | returns |", "|---|---|---|", *rows])


def as_text() -> str:
    """Return the table for the help of commands."""
    lines = [f"{c.setting}: {c.value} -> {c.returns}." for c in CONTRACTS]
    return "\n\n".join(["Functions are named by import paths, module:function.", *lines])
