"""An explanation as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

import torch

from distmp.explain.explanation import Explanation
from distmp.explain.types import NO_MODULE, Group
from distmp.precision.policy import dtype_name, dtype_word
from distmp.telemetry.units import bytes_text, quantity

WIDTH = 100
LONGEST_NAME = 32


def report(explanation: Explanation) -> Iterator[str]:
    """Yield the lines."""
    yield from _heading(explanation)
    yield ""
    yield from _types(explanation)
    yield ""
    yield from _memory(explanation)
    yield ""
    yield from _wire(explanation)
    for warning in explanation.warnings:
        yield from ("", *_wrapped(f"warning: {warning}"))
    for difference in explanation.differences:
        yield from ("", *_wrapped(f"!!! NOT AS PROMISED: {difference}"))


def _heading(explanation: Explanation) -> Iterator[str]:
    ranks = f"{explanation.world_size} rank{'s' * (explanation.world_size > 1)}"
    yield from _wrapped(
        f"precision {explanation.policy.name} ({explanation.policy_reason}), "
        f"loss scale {explanation.policy.loss_scale or 'none'}"
    )
    reason = f" ({explanation.strategy_reason})" if explanation.strategy_reason else ""
    yield from _wrapped(
        f"strategy {explanation.strategy} on {ranks} ({explanation.device}){reason}, "
        f"{explanation.microbatches} microbatch{'es' * (explanation.microbatches > 1)} per step"
    )


def _types(explanation: Explanation) -> Iterator[str]:
    head = (
        f"{explanation.parameters:,} parameters",
        "count",
        "stored",
        "stepped",
        "computed",
        "observed",
        "reduced",
        "summed",
        "kept",
    )
    rows = [
        (
            _short(group.name),
            quantity(group.parameters),
            dtype_word(group.stored),
            dtype_word(group.stepped),
            _computed(group),
            explanation.seen(group) or "-",
            dtype_word(group.reduced) if explanation.world_size > 1 else "-",
            dtype_word(group.accumulated),
            "fp32" if group.kept else "",
        )
        for group in explanation.groups
    ]
    yield from _table([head, *rows], right=(1,))
    if explanation.observed is None:
        yield "observed: nothing; the model is too large to be run here"
    else:
        yield from _wrapped(f"observed: {explanation.observed.of}; {_also_seen(explanation)}")


def _also_seen(explanation: Explanation) -> str:
    """Say what was computed outside of the modules of the table."""
    observed = explanation.observed
    assert observed is not None
    known = {group.name for group in explanation.groups}
    seen = [
        f"{kind} {'' if name == NO_MODULE else f'in {name} '}in {_words(found)}"
        for name, kinds in observed.computed.items()
        if name not in known
        for kind, found in kinds.items()
    ]
    return ", ".join([*seen, f"products of backward in {_words(observed.backward)}"])


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_word, dtypes)))


def _computed(group: Group) -> str:
    return "autocast" if group.computed is None else dtype_word(group.computed)


def _memory(explanation: Explanation) -> Iterator[str]:
    total = sum(explanation.memory.values())
    rows = [("memory of a rank, when it is most", "", "bytes per parameter")]
    parts = [*explanation.memory.items(), ("total", total)]
    rows += [
        (part, bytes_text(size), f"{size / explanation.parameters:.2f}") for part, size in parts
    ]
    yield from _table(rows, right=(1, 2))


def _wire(explanation: Explanation) -> Iterator[str]:
    if not explanation.wire:
        yield "nothing is sent: there is one rank"
        return
    rows = [("sent by a rank in a step", "collective", "type", "calls", "")]
    rows += [
        (
            entry.purpose,
            entry.kind,
            dtype_name(entry.dtype),
            str(entry.calls),
            bytes_text(entry.nbytes),
        )
        for entry in explanation.wire
    ]
    total = sum(entry.nbytes for entry in explanation.wire)
    rows.append(("total", "", "", "", bytes_text(total)))
    yield from _table(rows, right=(3, 4))


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else "..." + name[3 - LONGEST_NAME :]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
