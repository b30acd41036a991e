"""Format an explanation as text with at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from distmp.commands.explain.explanation import Explanation
from distmp.commands.explain.observe import ModuleGroup
from distmp.precision.policy import dtype_word
from distmp.utils.dtypes import dtype_name
from distmp.utils.units import bytes_text, counted, quantity, text_table

WIDTH = 100
LONGEST_NAME = 30
LINKS = ("inside a machine", "between machines")
COLUMNS = ("stored", "updated", "computed", "observed", "reduced", "summed", "kept")


def report(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from _heading(explanation)
    yield ""
    yield from _types(explanation)
    yield ""
    yield from _memory(explanation)
    yield ""
    yield from _communication(explanation)
    if explanation.low_precision_layers:
        yield from ("", *_wrapped(explanation.low_precision_layers))
    for warning in explanation.warnings:
        yield from ("", *_wrapped(f"warning: {warning}"))
    for difference in explanation.differences:
        yield from ("", *_wrapped(f"!!! POLICY MISMATCH: {difference}"))


def _heading(explanation: Explanation) -> Iterator[str]:
    policy = explanation.policy
    yield from _wrapped(
        f"precision {policy.name} ({explanation.policy_reason}), "
        f"loss scale {policy.loss_scale or 'none'}"
        + (f", functions in FP32: {', '.join(kept)}" if (kept := policy.kept_functions) else "")
    )
    reason = f" ({explanation.strategy_reason})" if explanation.strategy_reason else ""
    yield from _wrapped(
        f"strategy {explanation.strategy} on {counted(explanation.world_size, 'rank')} "
        f"({explanation.device}){reason}, "
        f"{counted(explanation.microbatches, 'microbatch')} per step"
    )
    if " free" in explanation.strategy_reason:  # auto compared a size with the free memory
        yield from _wrapped(
            "the free memory is that of this machine; for another one, set strategy and "
            "sharding.accumulate"
        )


def _types(explanation: Explanation) -> Iterator[str]:
    several = explanation.world_size > 1
    rows: list[tuple[str, ...]] = [(f"{explanation.parameters:,} parameters", "count", *COLUMNS)]
    rows += [
        (
            _short(group.name),
            quantity(group.parameters),
            dtype_word(group.stored),
            dtype_word(group.updated) if group.trained else "-",
            _computed(group),
            seen(explanation, group) or "-",
            dtype_word(group.reduced) if several and group.trained else "-",
            dtype_word(group.accumulated) if group.trained else "-",
            "fp32" if group.kept else "",
        )
        for group in explanation.groups
    ]
    yield from text_table(rows, right=(1,))


def _computed(group: ModuleGroup) -> str:
    if group.low_precision:
        return " ".join(group.low_precision)
    return "autocast" if group.computed is None else dtype_word(group.computed)


def seen(explanation: Explanation, group: ModuleGroup) -> str:
    """Return the dtypes in which a group was observed to compute, or an empty string."""
    observed = explanation.observed
    formats = observed.low_precision.get(group.name) if group.low_precision else None
    return " ".join(sorted(formats or map(dtype_word, observed.in_group(group.name))))


def _memory(explanation: Explanation) -> Iterator[str]:
    rows = [("peak memory of a rank", "", "bytes per parameter")]
    parts = [
        *explanation.memory.items(),
        ("total", explanation.memory_bytes),
        ("at the start, before the first step", explanation.start_memory_bytes),
    ]
    rows += [
        (part, bytes_text(size), f"{size / explanation.parameters:.2f}") for part, size in parts
    ]
    yield from text_table(rows, right=(1, 2))


def _communication(explanation: Explanation) -> Iterator[str]:
    if not explanation.communication:
        yield "no communication with one rank"
        return
    local = explanation.ranks_per_machine
    several = explanation.world_size > local
    rows = [("a rank sends per step", "collective", "type", "calls", "total", *LINKS)]
    rows += [
        (
            entry.purpose,
            entry.kind,
            dtype_name(entry.dtype),
            str(entry.calls),
            *_links(entry.nbytes, entry.between_machines),
        )
        for entry in explanation.communication
    ]
    total = _links(explanation.communication_bytes, explanation.between_machines_bytes)
    rows.append(("total", "", "", "", *total))
    yield from text_table(
        [row if several else row[: -len(LINKS)] for row in rows], right=(3, 4, 5, 6)
    )
    if several:
        machines = counted(explanation.world_size // local, "machine")
        yield from _wrapped(
            f"{machines} of {counted(local, 'rank')}; with one network card for each rank, "
            f"each card sends {bytes_text(explanation.between_machines_bytes)}"
        )


def _links(total: int, between: int) -> tuple[str, str, str]:
    return bytes_text(total), bytes_text(total - between), bytes_text(between)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else "..." + name[3 - LONGEST_NAME :]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
