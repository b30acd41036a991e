"""Why a step overflowed: what each rank saw, and the conclusion that is drawn from it.

The step is replayed (`distmp.diagnosis.replay`), so that a clean step costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch

from distmp.diagnosis.histogram import ExponentHistogram
from distmp.diagnosis.probe import ForwardOverflow

FP16_LARGEST = 65504.0
# A scale at which a larger share of the gradient becomes zero is no remedy.
MOST = 0.5
# A report names so many parameters, those nearest to the loss.
PARAMETERS_NAMED = 8

Cause = Literal[
    "bad_input",
    "bad_weight",
    "bad_parameter",
    "forward",
    "scale_too_high",
    "range_too_wide",
    "backward",
    "reduction",
    "not_repeated",
]


@dataclass(frozen=True)
class ParameterOverflow:
    """The gradient of one parameter in the first microbatch of a rank where it was not finite.

    Attributes:
        name: Name of the parameter in the model.
        module: Name of the module that holds it; empty for the model itself.
        rank: Where it was seen, before gradients were reduced over ranks.
        microbatch: Index of the microbatch within the step of that rank.
        inf: Number of infinite values.
        nan: Number of NaN values.
        largest_finite: Largest magnitude among the finite values, with the loss scale in it; 0 if
            there is none.
    """

    name: str
    module: str
    rank: int
    microbatch: int
    inf: int
    nan: int
    largest_finite: float


@dataclass(frozen=True)
class RankOverflowStats:
    """What one rank saw; each list has an entry per microbatch.

    Attributes:
        losses: Loss sums of the step itself.
        repeated_losses: Loss sums of its repetition.
        loss_weights: Weights of the step itself, as the loss function returned them.
        bad_inputs: Number of non-finite values in the floating-point tensors of the batch.
        forward: Where forward first was not finite in the repetition, if it was.
        bad_parameters: Names of the model's parameters that hold non-finite values.
        bad_weights: Names of the FP32 weights with a non-finite value in this rank's part.
        wide_weights: Names of those that are not finite once they are rounded to the compute dtype,
            which include the former.
        parameters: Parameters with a non-finite gradient, in the order in which backward came to
            them; those nearest to the loss first.
        largest: Largest finite magnitude in any gradient.
        histogram: Exponents of all gradient values, with the loss scale in them.
        largest_at_lowest: Largest magnitude in any gradient at the lowest scale, inf if it was not
            finite there either; None if that was not tried.
    """

    losses: Sequence[float]
    repeated_losses: Sequence[float]
    loss_weights: Sequence[float]
    bad_inputs: Sequence[int]
    forward: Sequence[ForwardOverflow | None]
    bad_parameters: Sequence[str]
    bad_weights: Sequence[str]
    wide_weights: Sequence[str]
    parameters: Sequence[ParameterOverflow]
    largest: float
    histogram: ExponentHistogram
    largest_at_lowest: float | None = None


@dataclass(frozen=True)
class OverflowContext:
    """What all ranks know about the step.

    Attributes:
        scale: The loss scale of the step.
        weight: The global weight of the step.
        floor: The value that overflows cannot push the scale below; None if they do not move it.
        compute_dtype: The type of activations and their gradients.
        has_masters: Whether the model's parameters are copied from FP32 master weights after every
            step.
        exact: Whether the step was repeated with the very weights that it had.
    """

    scale: float
    weight: float
    floor: float | None
    compute_dtype: torch.dtype
    has_masters: bool
    exact: bool

    @property
    def lowest(self) -> float:
        """The scale at which the step is tried once more, to see what lowering can achieve."""
        return min(self.scale, 1.0 if self.floor is None else min(self.floor, 1.0))

    @property
    def is_fp16(self) -> bool:
        """Whether the range of float16 is the limit."""
        return self.compute_dtype == torch.float16


@dataclass(frozen=True)
class OverflowReport:
    """Why a step was skipped; the same on every rank.

    Attributes:
        cause: One of
            `bad_input`: the batch holds non-finite values;
            `bad_weight`: the weight that the loss function returned is negative or not finite;
            `bad_parameter`: a parameter of the model holds non-finite values;
            `forward`: the loss is not finite, whenever it is computed;
            `scale_too_high`: gradients are finite at a lower scale;
            `range_too_wide`: no scale fits float16;
            `backward`: a finite loss has non-finite gradients, and there is no loss scale;
            `reduction`: each rank's gradients are finite, their sum or norm is not;
            `not_repeated`: it did not recur when the step was repeated.
        diagnosis: The cause in words, with the place.
        advice: What to do.
        ranks: Ranks on which it was seen.
        world_size: Number of ranks.
        microbatch: First microbatch, on the first of these ranks, where that is known.
        module: Module where it was first seen, if known.
        parameters: Parameters with a non-finite gradient, those nearest to the loss first; at most
            8 per rank.
        parameters_total: Number of parameters with a non-finite gradient on any rank.
        fitting_scale: Highest power of two at which the parameters' gradients would fit float16,
            where that was measured.
        lost_share: Share of the gradient values seen that would be zero at `fitting_scale`.
        exact: Whether the step was repeated with the very weights that it had.

    Example:
        >>> import torch, distmp
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(2, 1),
        ...     lambda module, batch: (module(batch).sum(), len(batch)),
        ...     lambda named: torch.optim.SGD(named, lr=0.1),
        ...     policy="fp32",
        ... )
        >>> outcome = engine.step([torch.ones(3, 2), torch.full((3, 2), torch.nan)])
        >>> report = engine.explain(outcome)
        >>> report.cause, report.microbatch
        ('bad_input', 1)
    """

    cause: Cause
    diagnosis: str
    advice: str
    ranks: tuple[int, ...]
    world_size: int
    microbatch: int | None
    module: str | None
    parameters: tuple[ParameterOverflow, ...]
    parameters_total: int
    fitting_scale: float | None
    lost_share: float | None
    exact: bool

    @property
    def one_rank_only(self) -> bool:
        """Whether one rank of several is alone with it."""
        return self.world_size > 1 and len(self.ranks) == 1

    def to_record(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold, apart from infinities and NaN."""
        return {**dataclasses.asdict(self), "one_rank_only": self.one_rank_only}

    def __str__(self) -> str:
        """Return diagnosis and advice on one line."""
        return f"{self.diagnosis}; {self.advice}"


@dataclass(frozen=True)
class _Finding:
    """A cause, where it was seen, and what is said about it."""

    cause: Cause
    text: str
    advice: str
    ranks: tuple[int, ...] = ()
    microbatch: int | None = None
    module: str | None = None


def diagnose(evidence: Sequence[RankOverflowStats], facts: OverflowContext) -> OverflowReport:
    """Draw the conclusion from what all ranks saw.

    Args:
        evidence: One entry per rank, in rank order.
        facts: What all ranks know about the step.
    """
    fitting = _fitting_scale(evidence, facts)
    lost = None if fitting is None else _lost_share(evidence, facts.scale, fitting)
    finding = (
        _bad_input(evidence)
        or _bad_weight(evidence, facts)
        or _bad_parameter(evidence)
        or _forward(evidence, facts)
        or _other_loss(evidence, facts)
        or _backward(evidence, facts, fitting, lost)
        or _reduction(evidence, facts)
        or _not_repeated(facts)
    )
    found = [parameter for rank in evidence for parameter in rank.parameters[:PARAMETERS_NAMED]]
    return OverflowReport(
        cause=finding.cause,
        diagnosis=finding.text + _where(finding, len(evidence)),
        advice=finding.advice,
        ranks=finding.ranks,
        world_size=len(evidence),
        microbatch=finding.microbatch,
        module=finding.module,
        parameters=tuple(found),
        parameters_total=len({entry.name for rank in evidence for entry in rank.parameters}),
        fitting_scale=fitting,
        lost_share=lost,
        exact=facts.exact,
    )


def _where(finding: _Finding, world_size: int) -> str:
    """Return " on rank 1 of 4 only, microbatch 0", as far as it is known."""
    if not finding.ranks:
        return ""
    if world_size == 1:
        text = ""
    elif len(finding.ranks) == 1:
        text = f" on rank {finding.ranks[0]} of {world_size} only"
    elif len(finding.ranks) == world_size:
        text = f" on all {world_size} ranks"
    else:
        text = f" on ranks {', '.join(map(str, finding.ranks))} of {world_size}"
    return text if finding.microbatch is None else f"{text}, microbatch {finding.microbatch}"


def _bad_input(evidence: Sequence[RankOverflowStats]) -> _Finding | None:
    found = {rank: seen.bad_inputs for rank, seen in enumerate(evidence) if any(seen.bad_inputs)}
    if not found:
        return None
    count = sum(map(sum, found.values()))
    first = next(iter(found.values()))
    return _Finding(
        "bad_input",
        f"bad input: {count} inf or NaN among the floating-point values of the batch",
        "check the data at these samples",
        tuple(found),
        next(index for index, number in enumerate(first) if number),
    )


def _bad_weight(evidence: Sequence[RankOverflowStats], facts: OverflowContext) -> _Finding | None:
    if 0 <= facts.weight < math.inf:
        return None
    bad = {
        rank: next(index for index, weight in enumerate(seen.loss_weights) if not _counts(weight))
        for rank, seen in enumerate(evidence)
        if not all(map(_counts, seen.loss_weights))
    }
    return _Finding(
        "bad_weight",
        f"the weights that the loss function returned add up to {facts.weight:g}; a weight is "
        "negative or not finite",
        "return the number of samples or tokens that the loss was summed over",
        tuple(bad),
        next(iter(bad.values()), None),
    )


def _counts(weight: float) -> bool:
    return 0 <= weight < math.inf


def _bad_parameter(evidence: Sequence[RankOverflowStats]) -> _Finding | None:
    found = {rank: seen.bad_parameters for rank, seen in enumerate(evidence) if seen.bad_parameters}
    if not found:
        return None
    name = next(iter(found.values()))[0]
    module = _module_of(name)
    if holders := _ranks_with(name, [seen.bad_weights for seen in evidence]):
        text = f"parameter {name!r} itself holds inf or NaN"
        advice = "continue from an earlier checkpoint; check what else writes to the weights"
        return _Finding("bad_parameter", text, advice, holders, module=module)
    if holders := _ranks_with(name, [seen.wide_weights for seen in evidence]):
        text = f"parameter {name!r} is inf: its FP32 master weight is beyond the range of float16"
        advice = f"{_USE_BF16}, or keep that module in FP32 (keep_fp32)"
        return _Finding("bad_parameter", text, advice, holders, module=module)
    text = f"the FP32 master weight of {name!r} is finite, but the parameter holds inf or NaN"
    advice = (
        "it is copied from its FP32 master weight after every step; check what else writes to it, "
        "and the memory of that machine"
    )
    return _Finding("bad_parameter", text, advice, tuple(found), module=module)


def _ranks_with(name: str, names: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return tuple(rank for rank, held in enumerate(names) if name in held)


def _forward(evidence: Sequence[RankOverflowStats], facts: OverflowContext) -> _Finding | None:
    bad = _first_losses(evidence, lambda finite, finite_again: not (finite or finite_again))
    if not bad:
        return None
    rank, microbatch = next(iter(bad.items()))
    origin = evidence[rank].forward[microbatch]
    text = "overflow in the forward pass: the loss itself is not finite"
    return _Finding(
        "forward",
        text + _origin(origin),
        _forward_advice(origin, facts),
        tuple(bad),
        microbatch,
        None if origin is None else origin.module,
    )


def _first_losses(
    evidence: Sequence[RankOverflowStats], wanted: Callable[[bool, bool], bool]
) -> dict[int, int]:
    """Return the first microbatch of each rank that has one whose loss is as wanted.

    Args:
        evidence: One entry per rank, in rank order.
        wanted: Called with whether the loss of the step is finite, and that of its repetition.
    """
    found = {}
    for rank, seen in enumerate(evidence):
        finite = zip(
            map(math.isfinite, seen.losses), map(math.isfinite, seen.repeated_losses), strict=True
        )
        matching = (index for index, pair in enumerate(finite) if wanted(*pair))
        if (first := next(matching, None)) is not None:
            found[rank] = first
    return found


def _forward_advice(origin: ForwardOverflow | None, facts: OverflowContext) -> str:
    if origin is None:
        return "look for an overflow or a division by zero in the loss function"
    if facts.is_fp16:
        return f"no loss scale helps where activations leave the range of float16: {_USE_BF16}"
    return "lower optim.lr or optim.max_norm, or look for a division by zero there"


def _origin(origin: ForwardOverflow | None) -> str:
    """Return where forward first was not finite, for the end of a clause."""
    if origin is None:
        return ", though what the modules return is"
    module = repr(origin.module) if origin.module else "the model"
    return f", first at the {origin.side} of {module}"


def _other_loss(evidence: Sequence[RankOverflowStats], facts: OverflowContext) -> _Finding | None:
    """Conclude from a loss that was finite only in the step, or only in its repetition."""
    found = _first_losses(evidence, operator.ne)
    if not found:
        return None
    rank, microbatch = next(iter(found.items()))
    loss = evidence[rank].losses[microbatch]
    again = evidence[rank].repeated_losses[microbatch]
    text = _did_not_recur(facts) if math.isfinite(again) else "the step and its repetition differ"
    text += f": the loss was {loss:.4g}, and {again:.4g} in the repetition"
    advice = f"look for {_suspects(facts)}"
    return _Finding("not_repeated", text, advice, tuple(found), microbatch)


def _backward(
    evidence: Sequence[RankOverflowStats],
    facts: OverflowContext,
    fitting: float | None,
    lost: float | None,
) -> _Finding | None:
    bad = {rank: seen.parameters for rank, seen in enumerate(evidence) if seen.parameters}
    if not bad:
        return None
    first = next(iter(bad.values()))[0]
    cause, text, advice = _backward_cause(facts, fitting, lost)
    finite = f", largest finite {first.largest_finite:.3g}" if first.largest_finite else ""
    place = f"; first in the gradient of {first.name!r} ({first.inf} inf, {first.nan} NaN{finite})"
    return _Finding(cause, text + place, advice, tuple(bad), first.microbatch, first.module)


def _backward_cause(
    facts: OverflowContext, fitting: float | None, lost: float | None
) -> tuple[Cause, str, str]:
    """Return cause, text and advice for a finite loss whose gradients are not."""
    if not facts.is_fp16:
        text = "the loss is finite, but its gradient is not, and there is no loss scale to lower"
        return "backward", text, _LOOK_FOR_DIVISION
    wide = "the range of the gradients is too wide for float16"
    if fitting is None:
        text = f"{wide}: they overflow even at loss scale {_scale(facts.lowest)}"
        advice = f"{_USE_BF16}; if that overflows as well, {_LOOK_FOR_DIVISION}"
        return "range_too_wide", text, advice
    if lost is not None and lost > MOST:
        text = f"{wide}: they fit at loss scale {_scale(fitting)}, where {lost:.0%} become zero"
        return "range_too_wide", text, _USE_BF16
    text = (
        f"loss scale {_scale(facts.scale)} was too high: the parameters' gradients fit at "
        f"{_scale(fitting)}"
    )
    return "scale_too_high", text, _how_to_lower(facts.floor, fitting)


_USE_BF16 = "use a bf16 policy"
_LOOK_FOR_DIVISION = "look for a division by zero or the root of zero in that module"


def _how_to_lower(floor: float | None, fitting: float) -> str:
    if floor is None:
        return "lower precision.loss_scale.init, or make the scale dynamic"
    if fitting < floor:
        return f"lower precision.loss_scale.min_scale = {floor:g}, or {_USE_BF16}"
    return "nothing to do: the scale backs off by itself"


def _scale(value: float) -> str:
    """Return "2^16" for a power of two."""
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{value:g}"


def _reduction(evidence: Sequence[RankOverflowStats], facts: OverflowContext) -> _Finding | None:
    largest = max(seen.largest for seen in evidence)
    # The norm is summed from squares: in float32 it ends at the root of the largest number.
    if largest < torch.finfo(torch.float32).max ** 0.5:
        return None
    ranks = tuple(rank for rank, seen in enumerate(evidence) if seen.largest == largest)
    return _Finding(
        "reduction",
        f"the gradients of each rank are finite, up to {largest:.3g}, but their sum or norm is "
        "beyond float32",
        "lower optim.lr, or a loss scale that is set too high",
        ranks,
    )


def _not_repeated(facts: OverflowContext) -> _Finding:
    advice = f"if it recurs, look for {_suspects(facts)}"
    if facts.scale > facts.lowest:
        advice = f"loss scale {_scale(facts.scale)} may be at the edge of what fits; {advice}"
    return _Finding("not_repeated", _did_not_recur(facts), advice)


def _did_not_recur(facts: OverflowContext) -> str:
    moved = "" if facts.exact else ", with weights that one update has moved since"
    return f"an overflow that did not recur when the step was repeated{moved}"


def _suspects(facts: OverflowContext) -> str:
    """Return what makes a step and its repetition differ."""
    copies = (
        "a value written into a 16-bit parameter (gone by now: parameters are copied from FP32 "
        "master weights after every step), "
        if facts.has_masters
        else ""
    )
    return (
        f"a batch that is changed in place after the step, {copies}a race or a non-deterministic "
        "operation, and faulty memory or hardware"
    )


def _fitting_scale(evidence: Sequence[RankOverflowStats], facts: OverflowContext) -> float | None:
    """Return the highest power of two at which all ranks' gradients fit, if they do at all."""
    largest = [seen.largest_at_lowest for seen in evidence]
    measured = [value for value in largest if value is not None and math.isfinite(value)]
    if not facts.is_fp16 or len(measured) < len(largest):
        return None
    # What overflows may be the gradient of an activation: this scale is too high in any case.
    limit = math.log2(facts.scale) - 1
    if max(measured) > 0:
        limit = min(limit, math.log2(FP16_LARGEST / max(measured) * facts.lowest))
    return max(2.0 ** math.floor(limit), facts.lowest)


def _lost_share(evidence: Sequence[RankOverflowStats], scale: float, fitting: float) -> float:
    """Return which share of the finite values other than zero would be zero at `fitting`."""
    total = reduce(operator.add, (seen.histogram for seen in evidence))
    return total.shares(round(math.log2(fitting / scale))).zero


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
