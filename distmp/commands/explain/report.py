"""Format an explanation as text with at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from distmp.commands.explain.explanation import Explanation, Prediction, largest_gains
from distmp.commands.explain.hardware_rates import MEASURED, MEASURED_BY
from distmp.commands.explain.observe import ObservedDtypes
from distmp.commands.explain.types import NO_MODULE, ModuleGroup
from distmp.precision.policy import dtype_word
from distmp.utils.dtypes import dtype_name
from distmp.utils.units import bytes_text, quantity

WIDTH = 100
LONGEST_NAME = 30
LINKS = ("inside a machine", "between machines")
COLUMNS = ("stored", "stepped", "computed", "observed", "reduced", "summed", "kept")


def report(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of the report."""
    predicted = explanation.predicted
    yield from _heading(explanation)
    yield ""
    yield from _types(explanation)
    yield ""
    yield from _memory(predicted)
    yield ""
    yield from _communication(explanation)
    yield ""
    yield from _products(explanation)
    for warning in explanation.warnings:
        yield from ("", *_wrapped(f"warning: {warning}"))
    for difference in explanation.differences:
        yield from ("", *_wrapped(f"!!! POLICY MISMATCH: {difference}"))


def _heading(explanation: Explanation) -> Iterator[str]:
    policy, predicted = explanation.policy, explanation.predicted
    yield from _wrapped(
        f"precision {policy.name} ({explanation.policy_reason}), "
        f"loss scale {policy.loss_scale or 'none'}"
        + (f", functions in FP32: {', '.join(kept)}" if (kept := policy.kept_functions) else "")
    )
    reason = f" ({predicted.strategy_reason})" if predicted.strategy_reason else ""
    yield from _wrapped(
        f"strategy {predicted.strategy} on {_count(explanation.world_size, 'rank')} "
        f"({explanation.device}){reason}, {_count(predicted.microbatches, 'microbatch')} per step"
    )


def _count(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{ending}"


def _types(explanation: Explanation) -> Iterator[str]:
    predicted = explanation.predicted
    several = explanation.world_size > 1
    rows: list[tuple[str, ...]] = [(f"{predicted.parameters:,} parameters", "count", *COLUMNS)]
    rows += [
        (
            _short(group.name),
            quantity(group.parameters),
            dtype_word(group.stored),
            dtype_word(group.stepped),
            _computed(group),
            explanation.seen(group) or "-",
            dtype_word(group.reduced) if several else "-",
            dtype_word(group.accumulated),
            "fp32" if group.kept else "",
        )
        for group in predicted.groups
    ]
    yield from _table(rows, right=(1,))
    if explanation.observed is None:
        yield "observed: nothing; the model is too large to run on this machine"
    else:
        yield from _wrapped(f"observed: {_observed(explanation.observed, predicted)}")
        yield from _converted(explanation.observed, predicted)


def _computed(group: ModuleGroup) -> str:
    if group.narrow:
        return " ".join(group.narrow)
    return "autocast" if group.computed is None else dtype_word(group.computed)


def _observed(observed: ObservedDtypes, predicted: Prediction) -> str:
    """Describe the observed step, and the operations outside of the modules in the table."""
    known = {group.name for group in predicted.groups}
    parts = [
        f"{kind} {'' if name == NO_MODULE else f'in {name} '}in {_words(dtypes)}"
        for name, kinds in observed.computed.items()
        if name not in known
        for kind, dtypes in kinds.items()
    ]
    if observed.backward:  # empty if all of them are narrow
        kind = "wide products" if observed.narrow else "products"
        parts.append(f"{kind} of backward in {_words(observed.backward)}")
    return "; ".join(filter(None, (observed.of, ", ".join(parts))))


def _converted(observed: ObservedDtypes, predicted: Prediction) -> Iterator[str]:
    """Yield why norms and others compute in a wider dtype than the policy specifies."""
    names: dict[str, list[str]] = {}
    for group in predicted.groups:
        for kind, dtypes in observed.computed.get(group.name, {}).items():
            wider = group.computed and max(map(_bytes, dtypes)) > _bytes(group.computed)
            if wider and kind != "products":  # these are mismatches
                names.setdefault(f"{kind} in {_words(dtypes)}", []).append(group.name)
    for what, groups in names.items():
        yield from _wrapped(
            f"{what}, not as computed: torch or the model's code converts their inputs, which adds "
            f"precision and is no mismatch ({', '.join(groups)})"
        )


def _bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_word, dtypes)))


def _memory(predicted: Prediction) -> Iterator[str]:
    rows = [("peak memory of a rank", "", "bytes per parameter")]
    parts = [
        *predicted.memory.items(),
        ("total", predicted.memory_bytes),
        ("at the start, before the first step", predicted.start_memory_bytes),
    ]
    rows += [(part, bytes_text(size), f"{size / predicted.parameters:.2f}") for part, size in parts]
    yield from _table(rows, right=(1, 2))


def _communication(explanation: Explanation) -> Iterator[str]:
    predicted = explanation.predicted
    if not predicted.communication:
        yield "no communication with one rank"
        return
    local = predicted.ranks_per_machine
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
        for entry in predicted.communication
    ]
    total = _links(predicted.communication_bytes, predicted.between_machines_bytes)
    rows.append(("total", "", "", "", *total))
    yield from _table([row if several else row[: -len(LINKS)] for row in rows], right=(3, 4, 5, 6))
    if several:
        machines = _count(explanation.world_size // local, "machine")
        sent = bytes_text(predicted.between_machines_bytes)
        yield from _wrapped(
            f"{machines} of {_count(local, 'rank')}; with one network card for each rank, "
            f"each card sends {sent}"
        )


def _products(explanation: Explanation) -> Iterator[str]:
    products = explanation.predicted.products
    total = max(1, sum(products.flops.values()))
    rows = [("matrix products of a rank per step", "TFLOP", "share")]
    rows += [
        (label, f"{flops / 1e12:.4g}", f"{flops / total:.1%}")
        for label, flops in sorted(products.flops.items(), key=lambda item: -item[1])
    ]
    yield from _table(rows, right=(1, 2))
    if gains := largest_gains(products):
        yield from _wrapped(products.layers)
        yield from _gains(explanation, gains)


def _gains(explanation: Explanation, gains: Mapping[str, float | None]) -> Iterator[str]:
    """Describe the gain from narrow products.

    Args:
        explanation: What is known of the run.
        gains: Upper limit of the gain over bfloat16 by GPU; None if it has no rate for a format.
    """
    known = [f"{name} {gain:.2f}" for name, gain in gains.items() if gain is not None]
    yield from _wrapped(
        "datasheet: upper limit of the speed-up over bf16, for a step that consists of matrix "
        f"products at the rates of the datasheet: {', '.join(known) or 'none'}"
    )
    if emulated := [name for name, gain in gains.items() if gain is None]:
        yield from _wrapped(f"GPUs without instructions for these formats: {', '.join(emulated)}")
    measured = [
        f"{one.narrow / one.wide:.2f} ({one.policy}: {one.what}, {one.hardware})"
        for one in MEASURED
        if one.policy == explanation.policy.name
    ]
    if measured:
        yield from _wrapped(f"measured by {MEASURED_BY}: {', '.join(measured)}")


def _links(total: int, between: int) -> tuple[str, str, str]:
    return bytes_text(total), bytes_text(total - between), bytes_text(between)


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
