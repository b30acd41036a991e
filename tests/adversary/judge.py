"""Compares the results of the engine with those of the oracle.

A complaint is a line that starts with its kind, so that the shrinker can distinguish failures.

A difference may come from inputs of ReLU near 0, whose sign rounding decides. Then the oracle
repeats the step with the other branch of each such input that brings it closer to the engine. What
still differs is a defect.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.adversary.cases import MASTERS, Case, refusal
from tests.adversary.oracle import Expected, Oracle, Tensors
from tests.adversary.states import State, assemble, changes

if TYPE_CHECKING:
    from tests.adversary.run import Record, StepRecord

# Relative error of weights, norm and loss, and of a 16-bit weight after an update.
EXACT = 1e-5
LOOSE = {
    "tf32": 1e-2,
    "bf16": 0.1,
    "bf16-autocast": 0.1,
    "bf16-pure": 0.1,
    "bf16,reduce=bf16": 0.1,
    "bf16,keep_fp32=head": 0.1,
    "fp16": 0.03,
    "fp16-autocast": 0.03,
    "fp16-static": 0.03,
}
# Rounding error of the compute dtype.
ROUNDING = {"bf": 2.0**-8, "fp": 2.0**-11, "tf": 0.0}

# Most inputs of ReLU per step whose other branch is tried.
MOST_KINKS = 64

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
    """Return the complaints about the records of all ranks."""
    refused = {record.refused for record in records}
    if refused != {None}:
        reason = refusal(case)
        return [] if reason and None not in refused else [f"refused: {refused}"]
    oracle = Oracle(case)
    complaints = list(_start(case, oracle, records))
    start = oracle.weights
    before = [record.initial for record in records]
    for index, step in enumerate(case.steps):
        steps = [record.steps[index] for record in records]
        complaints += _same_numbers(index, steps)
        wholes, conflicts = assemble([one.state for one in steps])
        complaints += [f"ranks.state: {name} differs after step {index}" for name in conflicts]
        if not (step.reload or step.freeze or step.thaw):  # otherwise the tensors differ
            complaints += _skipped(case, oracle, index, before, steps)
        before = [one.after or one.state for one in steps]
        complaints += _left_alone(index, steps)
        if oracle.certain:
            oracle, found = _right(case, index, oracle, start, steps[0], wholes)
            complaints += found
    return [*complaints, *_rounded(case, records)]


def _start(case: Case, oracle: Oracle, records: list[Record]) -> Iterator[str]:
    """Check that all ranks start with rank 0's parameters and buffers, and unrounded masters."""
    wholes, conflicts = assemble([record.initial for record in records])
    yield from (f"ranks.state: {name} differs at the start" for name in conflicts)
    for name, wanted in (oracle.weights | oracle.buffers).items():
        found = wholes.get(f"model/{name}")
        if found is None:
            yield f"state.missing: {name}"
        elif not torch.equal(found, wanted.to(found.dtype)):
            yield f"start: {name} is {_values(found)}, expected {_values(wanted)}"


def _rounded(case: Case, records: list[Record]) -> Iterator[str]:
    """Check that 16-bit parameters are the rounded FP32 weights."""
    if case.policy not in MASTERS:
        return
    wholes, _ = assemble([record.steps[-1].state for record in records])
    for rank, record in enumerate(records):
        for name, parameter in record.parameters.items():
            values = parameter.values
            if not torch.equal(values, wholes[f"model/{name}"].to(values.dtype)):
                yield f"rounded: {name} on rank {rank} is not its FP32 weight"


# Comparisons between ranks, and with earlier steps


def _same_numbers(index: int, steps: list[StepRecord]) -> Iterator[str]:
    first, *others = steps
    for rank, other in enumerate(others, start=1):
        for name, value in first.numbers.items():
            if not _same(value, other.numbers[name]):
                yield (
                    f"ranks.{name}: step {index}: {value} on rank 0, "
                    f"{other.numbers[name]} on rank {rank}"
                )
        if first.report != other.report:
            yield f"ranks.report: {first.report} on rank 0, {other.report} on rank {rank}"
        if not _same(first.evaluation or 0.0, other.evaluation or 0.0):
            yield f"ranks.evaluation: {first.evaluation}, {other.evaluation} on rank {rank}"


def _same(one: Any, other: Any) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _skipped(
    case: Case, oracle: Oracle, index: int, before: list[State], steps: list[StepRecord]
) -> Iterator[str]:
    """Check that a skipped step changes nothing."""
    buffers = {f"model/{name}" for name in oracle.buffers}
    for rank, (earlier, step) in enumerate(zip(before, steps, strict=True)):
        if not step.numbers["skipped"]:
            continue
        for name in changes(earlier, step.state):
            if name in buffers:
                yield f"skip.buffers: step {index} was skipped, and {name} changed on rank {rank}"
            elif name.startswith(("model/", "optimizer/")):
                yield f"skip.weights: step {index} was skipped, and {name} changed on rank {rank}"


def _left_alone(index: int, steps: list[StepRecord]) -> Iterator[str]:
    """Check that `explain` and `evaluate` change nothing."""
    for rank, step in enumerate(steps):
        if step.after is not None:
            for name in changes(step.state, step.after):
                yield f"alone: explain or evaluate after step {index} changed {name} on rank {rank}"


# Comparisons with the oracle


def _right(
    case: Case, index: int, oracle: Oracle, start: Tensors, step: StepRecord, wholes: Tensors
) -> tuple[Oracle, list[str]]:
    """Return the oracle after the step, and the complaints about the step."""
    earlier = copy.deepcopy(oracle)
    expected = oracle.step(index, step.numbers)
    if not oracle.certain:
        return oracle, []
    complaints = [*_compared(case, index, oracle, expected, start, step, wholes)]
    flipped: list[Any] = []
    for kink in oracle.near_kinks(LOOSE.get(case.policy, EXACT))[:MOST_KINKS] if complaints else ():
        trial = copy.deepcopy(earlier)
        expected = trial.step(index, step.numbers, [*flipped, kink])
        if _distance(trial, wholes) < _distance(oracle, wholes):
            oracle, flipped = trial, [*flipped, kink]
            complaints = [*_compared(case, index, oracle, expected, start, step, wholes)]
    return oracle, complaints


def _distance(oracle: Oracle, wholes: Tensors) -> float:
    weights = oracle.weights.items()
    return sum(float((w - wholes[f"model/{name}"].double()).square().sum()) for name, w in weights)


def _compared(
    case: Case,
    index: int,
    oracle: Oracle,
    expected: Expected,
    start: Tensors,
    step: StepRecord,
    wholes: Tensors,
) -> Iterator[str]:
    yield from _numbers(case, index, expected, step.numbers)
    yield from _state(case, index, oracle, start, wholes)
    if step.evaluation is not None:
        yield from _evaluation(case, index, oracle.evaluate(index), step.evaluation)
    if step.report is not None and not oracle.risky:
        yield from _report(case, index, step.report)


def _numbers(case: Case, index: int, expected: Expected, numbers: dict[str, Any]) -> Iterator[str]:
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
            right = abs(wanted - found) <= tolerance * max(abs(wanted), 0.1)
        else:
            right = not math.isfinite(found)
        if not right:
            yield f"numbers.{item.name}: step {index}: {found}, expected {wanted}"


def _state(
    case: Case, index: int, oracle: Oracle, start: Tensors, wholes: Tensors
) -> Iterator[str]:
    weights = oracle.weights
    moved = math.sqrt(sum(float((w - start[n]).square().sum()) for n, w in weights.items()))
    for name, wanted in weights.items():
        found = wholes[f"model/{name}"].double()
        if not found.isfinite().all():
            yield f"weights.finite: step {index}: {name} is {found.tolist()}"
        elif (error := _excess(case, wanted, found, moved, index)) > 1:
            yield (
                f"weights.{'frozen' if name in oracle.frozen else 'value'}: step {index}: {name} "
                f"is {_values(found)}, expected {_values(wanted)}: {error:.3g} times the tolerance"
            )
    for name, wanted in oracle.buffers.items():
        yield from _buffer(case, index, name, wanted, wholes[f"model/{name}"])


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
    """Check an explanation if there is one clear cause."""
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
    # A sharded gradient is already summed over ranks when it is checked.
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
