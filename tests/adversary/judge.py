"""Compares what the engine did with what the oracle says.

A complaint is a line that begins with its kind, so that the shrinker can tell one failure from
another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.adversary.cases import Case, Step, refusal
from tests.adversary.oracle import Expected, Oracle, Tensors

if TYPE_CHECKING:
    from tests.adversary.run import Record, StepRecord

# Relative error of weights, norm and loss, and of a 16-bit weight that an update is added to.
EXACT = 1e-5
LOOSE = {
    "tf32": 1e-2,
    "bf16": 0.1,
    "bf16-autocast": 0.1,
    "bf16-pure": 0.1,
    "bf16,reduce=bf16": 0.1,
    "fp16": 0.03,
    "fp16-autocast": 0.03,
    "fp16-static": 0.03,
}
# A rounding to the type that the model computes in.
ROUNDING = {"bf": 2.0**-8, "fp": 2.0**-11, "tf": 0.0}

EXACT_NUMBERS = (
    "overflow",
    "skipped",
    "dropped",
    "weight",
    "loss_scale",
    "applied_total",
    "skipped_total",
    "skipped_in_a_row",
    "stop",
    "scale_exhausted",
)


def judge(case: Case, records: list[Record]) -> list[str]:
    """Return what is wrong with the records of all ranks."""
    refused = {record.refused for record in records}
    if refused != {None}:
        reason = refusal(case)
        return [] if reason and None not in refused else [f"refused: {refused}"]
    return [*_same_on_all_ranks(records), *_right(case, records)]


# Ranks with each other


def _same_on_all_ranks(records: list[Record]) -> Iterator[str]:
    first, *others = records
    for rank, record in enumerate(others, start=1):
        for index, (one, other) in enumerate(zip(first.steps, record.steps, strict=True)):
            for name, value in one.numbers.items():
                if not _same(value, other.numbers[name]):
                    yield (
                        f"ranks.{name}: step {index}: {value} on rank 0, "
                        f"{other.numbers[name]} on rank {rank}"
                    )
            if one.buffers != other.buffers:
                yield f"ranks.buffers: differ after step {index} on rank {rank}"
            if one.report != other.report:
                yield f"ranks.report: {one.report} on rank 0, {other.report} on rank {rank}"
        if first.replicated != record.replicated:
            yield f"ranks.state: differs at the end on rank {rank}"


def _same(one: Any, other: Any) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


# The first rank with the oracle


def _right(case: Case, records: list[Record]) -> Iterator[str]:
    oracle = Oracle(case)
    start = oracle.weights
    for record in records:
        yield from (f"rounded: {name} is not its FP32 weight" for name in record.rounded)
        before = record.initial
        for index, step in enumerate(record.steps):
            if step.numbers["skipped"]:
                after = step.weights, step.buffers
                yield from _untouched(case.steps[index], index, before, after)
            before = step.weights, step.buffers
    for index, step in enumerate(records[0].steps):
        expected = oracle.step(index, step.numbers)
        if not oracle.certain:
            return
        yield from _numbers(case, index, expected, step.numbers)
        yield from _state(case, index, oracle, start, step)
        if step.evaluation is not None:
            yield from _evaluation(case, index, oracle.evaluate(index), step.evaluation)
        if step.report is not None and not oracle.uncertain:
            yield from _report(case, index, step.report)


def _untouched(
    step: Step, index: int, before: tuple[str, str], after: tuple[str, str]
) -> Iterator[str]:
    if step.reload or step.freeze or step.thaw:
        return  # the tensors are others
    if before[0] != after[0]:
        yield f"skip.weights: step {index} was skipped, and weights or their state changed"
    if before[1] != after[1]:
        yield f"skip.buffers: step {index} was skipped, and buffers changed"


def _numbers(
    case: Case, index: int, expected: Expected, numbers: dict[str, Any]
) -> Iterator[str]:
    tolerance = LOOSE.get(case.policy, EXACT)
    for item in fields(expected):
        wanted, found = getattr(expected, item.name), numbers[item.name]
        if wanted is None:
            continue
        if item.name in EXACT_NUMBERS:
            right = wanted == found
        elif item.name == "learning_rate":
            right = abs(wanted - found) <= 1e-6 * wanted
        elif math.isfinite(wanted):
            right = abs(wanted - found) <= tolerance * max(abs(wanted), 1e-2)
        else:
            right = not math.isfinite(found)
        if not right:
            yield f"numbers.{item.name}: step {index}: {found}, expected {wanted}"


def _state(
    case: Case, index: int, oracle: Oracle, start: Tensors, step: StepRecord
) -> Iterator[str]:
    assert step.whole is not None
    weights, buffers = oracle.weights, oracle.buffers
    missing = (weights.keys() | buffers.keys()) - step.whole.keys()
    if missing:
        yield f"state.missing: {sorted(missing)}"
        return
    moved = math.sqrt(sum(float((w - start[n]).square().sum()) for n, w in weights.items()))
    for name, wanted in weights.items():
        found = step.whole[name].double()
        if not found.isfinite().all():
            yield f"weights.finite: step {index}: {name} is {found.tolist()}"
        elif (error := _excess(case, wanted, found, moved, index)) > 1:
            yield (
                f"weights.{'frozen' if name in oracle.frozen else 'value'}: step {index}: {name} "
                f"is {_values(found)}, expected {_values(wanted)}: {error:.3g} times the tolerance"
            )
    for name, wanted in buffers.items():
        yield from _buffer(case, index, name, wanted, step.whole[name])


def _excess(case: Case, wanted: Tensor, found: Tensor, moved: float, index: int) -> float:
    """Return the error of a parameter in tolerances."""
    if case.policy not in LOOSE:
        return float((wanted - found).abs().amax()) / (EXACT * max(1.0, float(wanted.abs().amax())))
    # Relative to how far training has moved the weights; frozen parameters and `bf16-pure` keep
    # weights in 16 bits, where each update rounds them.
    rounding = ROUNDING[case.policy[:2]] * (index + 2 if case.policy == "bf16-pure" else 1)
    allowed = LOOSE[case.policy] * moved + rounding * float(wanted.norm()) + 1e-6
    return float((wanted - found).norm()) / allowed


def _buffer(case: Case, index: int, name: str, wanted: Tensor, found: Tensor) -> Iterator[str]:
    tolerance = LOOSE.get(case.policy, EXACT) if wanted.is_floating_point() else 0.0
    error = (wanted.double() - found.double()).abs()
    if not bool((error <= tolerance * (1 + wanted.double().abs())).all()):
        yield f"buffers: step {index}: {name} is {_values(found)}, expected {_values(wanted)}"


def _evaluation(case: Case, index: int, wanted: float | None, found: float) -> Iterator[str]:
    tolerance = LOOSE.get(case.policy, EXACT)
    if wanted is not None and not abs(wanted - found) <= tolerance * max(1.0, abs(wanted)):
        yield f"evaluation: step {index}: {found}, expected {wanted}"


def _report(case: Case, index: int, report: dict[str, Any]) -> Iterator[str]:
    """Judge an explanation where there is one cause and no doubt about it."""
    if not case.attribution:
        if report:
            yield f"report.attribution: step {index}: {report} although it is off"
        return
    if not report:
        yield f"report.missing: step {index}"
        return
    faults = case.steps[index].faults
    if len(faults) != 1 or faults[0][2].place == "loss":
        return
    rank, microbatch, fault = faults[0]
    # A sharded gradient is a sum over ranks before anybody sees it.
    spread = case.sharded and fault.place == "backward"
    if report["ranks"] != (rank,) and not (spread and rank in report["ranks"]):
        yield f"report.ranks: step {index}: {report['ranks']}, expected rank {rank}"
    if report["microbatch"] not in (microbatch, None):
        yield f"report.microbatch: step {index}: {report['microbatch']}, expected {microbatch}"
    causes = {"input": "bad_input", "weight": "bad_weight", "stem": "forward", "output": "forward"}
    if report["cause"] != causes.get(fault.place, report["cause"]):
        yield f"report.cause: step {index}: {report['cause']} for a fault in {fault.place}"


def _values(tensor: Tensor) -> str:
    values = tensor.double().flatten()[:4]
    return str([float(f"{value:.6g}") for value in values.tolist()])
