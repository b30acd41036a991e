"""Determines why a step overflowed, from statistics of each rank.

The statistics come from a replay of the step (`distmp.diagnosis.replay`), so a clean step costs
nothing.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch

from distmp.diagnosis.histogram import ExponentHistogram
from distmp.errors import rank_names
from distmp.utils.dtypes import dtype_name
from distmp.utils.units import scale_text

FP16_LARGEST = 65504.0
# A lower scale does not help if it turns a larger share of the gradient into zeros.
MOST = 0.5
# Largest number of parameters of a rank in a report, those nearest to the loss.
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


class ForwardOverflow(NamedTuple):
    """The first module that returned a non-finite value in forward.

    Attributes:
        module: Name of the module; empty for the model itself.
        side: "input" if its input was already non-finite, because of an operation between modules;
            otherwise "output".
    """

    module: str
    side: Literal["input", "output"]


@dataclass(frozen=True)
class ParameterOverflow:
    """A non-finite gradient of one parameter, in the first microbatch of a rank that has it.

    Attributes:
        name: Name of the parameter in the model.
        module: Name of the module that holds the parameter; empty for the model itself.
        rank: The rank, before gradients were reduced over ranks.
        microbatch: Index of the microbatch within the step of this rank.
        inf: Number of infinite values.
        nan: Number of NaN values.
        largest_finite: Largest magnitude of the finite values, multiplied by the loss scale; 0 if
            there are none.
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
    """Statistics of one rank, from the step and its repetition.

    Attributes:
        losses: Loss sum of each microbatch in the step.
        repeated_losses: Loss sum of each microbatch in the repetition.
        loss_weights: Weight of each microbatch in the step, as returned by the loss function.
        bad_inputs: Number of non-finite values in the floating-point tensors of each microbatch.
        bad_rows: The first rows of each microbatch with such values, in the first tensor with any.
        forward: For each microbatch, the first module with a non-finite value in forward, or None.
        bad_parameters: Names of the model's parameters that hold non-finite values.
        bad_weights: Names of the FP32 weights with a non-finite value in this rank's shard.
        overflowing_weights: Names of the FP32 weights that are non-finite after rounding to the
            compute dtype; includes `bad_weights`.
        parameters: Parameters with a non-finite gradient, in the order of backward, so those
            nearest to the loss first.
        largest: Largest finite magnitude of all gradients, multiplied by the loss scale.
        histogram: Exponents of all gradient values, multiplied by the loss scale.
        largest_at_lowest: Largest magnitude of all gradients at the lowest scale, inf if a gradient
            is not finite there; None if it was not measured.
    """

    losses: Sequence[float]
    repeated_losses: Sequence[float]
    loss_weights: Sequence[float]
    bad_inputs: Sequence[int]
    bad_rows: Sequence[Sequence[int]]
    forward: Sequence[ForwardOverflow | None]
    bad_parameters: Sequence[str]
    bad_weights: Sequence[str]
    overflowing_weights: Sequence[str]
    parameters: Sequence[ParameterOverflow]
    largest: float
    histogram: ExponentHistogram
    largest_at_lowest: float | None = None


Evidence = Sequence[RankOverflowStats]
"""Statistics of each rank, in rank order."""


@dataclass(frozen=True)
class OverflowContext:
    """Properties of the step that are the same on all ranks.

    Attributes:
        scale: The loss scale of the step.
        weight: The sum of the weights of all microbatches and ranks.
        floor: The lower limit of the loss scale; None if the scale is not dynamic.
        compute_dtype: The dtype of activations and their gradients.
        reduce_dtype: The dtype in which gradients are summed over ranks.
        has_masters: Whether the model's parameters are copied from FP32 master weights after every
            step.
        has_updates: Whether updates were applied before the step.
        exact: Whether the step was repeated with exactly the same weights.
    """

    scale: float
    weight: float
    floor: float | None
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    has_masters: bool
    has_updates: bool
    exact: bool

    @property
    def lowest(self) -> float:
        """The scale of the second repetition, which shows whether a lower scale helps."""
        return min(self.scale, 1.0 if self.floor is None else min(self.floor, 1.0))

    @property
    def is_fp16(self) -> bool:
        """Whether gradients have the range of float16."""
        return self.compute_dtype == torch.float16


@dataclass(frozen=True)
class OverflowReport:
    """Why a step was skipped; the same on every rank.

    Attributes:
        cause: One of
            `bad_input`: the batch contains non-finite values;
            `bad_weight`: the weight that the loss function returned is negative or not finite;
            `bad_parameter`: a parameter of the model holds non-finite values;
            `forward`: the loss is not finite, in the step and in its repetition;
            `scale_too_high`: gradients are finite at a lower scale;
            `range_too_wide`: gradients do not fit float16 at any scale;
            `backward`: a finite loss has non-finite gradients, and no loss scale helps;
            `reduction`: the gradients of each rank are finite, but their sum or norm is not;
            `not_repeated`: the overflow did not recur when the step was repeated.
        diagnosis: The cause and its location, as text.
        advice: What to do, as text.
        ranks: Ranks with the overflow.
        world_size: Number of ranks.
        microbatch: Index of the first such microbatch on the first of these ranks; None if unknown.
        module: Name of the first module with the overflow; None if unknown.
        parameters: Parameters with a non-finite gradient, those nearest to the loss first; at most
            8 per rank.
        parameters_total: Number of parameters with a non-finite gradient on any rank.
        fitting_scale: Highest power of two at which the gradients of parameters fit float16; None
            if it was not measured.
        lost_share: Share of the gradient values that are zero at `fitting_scale`, from 0 to 1; None
            if it was not measured.
        exact: Whether the step was repeated with exactly the same weights.

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
    ranks: tuple[int, ...] = ()
    microbatch: int | None = None
    module: str | None = None
    world_size: int = 1
    parameters: tuple[ParameterOverflow, ...] = ()
    parameters_total: int = 0
    fitting_scale: float | None = None
    lost_share: float | None = None
    exact: bool = True

    def to_record(self) -> dict[str, Any]:
        """Return the report as JSON values, except for infinities and NaN."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return diagnosis and advice on one line."""
        return f"{self.diagnosis}; {self.advice}"


def diagnose(evidence: Evidence, context: OverflowContext) -> OverflowReport:
    """Determine the cause of an overflow.

    Args:
        evidence: Statistics of each rank, in rank order.
        context: Properties of the step.
    """
    fitting = _fitting_scale(evidence, context)
    lost = None if fitting is None else _lost_share(evidence, context.scale, fitting)
    found = (
        _bad_input(evidence)
        or _bad_weight(evidence, context)
        or _bad_parameter(evidence)
        or _forward(evidence, context)
        or _other_loss(evidence, context)
        or _backward(evidence, context, fitting, lost)
        or _reduction(evidence, context)
        or _not_repeated(context)
    )
    parameters = [entry for rank in evidence for entry in rank.parameters[:PARAMETERS_NAMED]]
    return dataclasses.replace(
        found,
        diagnosis=found.diagnosis + _where(found, len(evidence)),
        world_size=len(evidence),
        parameters=tuple(parameters),
        parameters_total=len({entry.name for rank in evidence for entry in rank.parameters}),
        fitting_scale=fitting,
        lost_share=lost,
        exact=context.exact,
    )


def _where(found: OverflowReport, world_size: int) -> str:
    """Return a location such as " on rank 1 of 4 only, microbatch 0", as far as it is known."""
    if not found.ranks:
        return ""
    if world_size == 1:
        text = ""
    elif len(found.ranks) == world_size:
        text = f" on all {world_size} ranks"
    else:
        only = " only" if len(found.ranks) == 1 else ""
        text = f" on {rank_names(found.ranks)} of {world_size}{only}"
    return text if found.microbatch is None else f"{text}, microbatch {found.microbatch}"


def _first(
    evidence: Evidence, marks: Callable[[RankOverflowStats], Iterable[bool]]
) -> dict[int, int]:
    """Return the first microbatch of each rank that is marked.

    Args:
        evidence: Statistics of each rank, in rank order.
        marks: Returns a mark for each microbatch of a rank.
    """
    marked = {rank: [*marks(stats)] for rank, stats in enumerate(evidence)}
    return {rank: found.index(True) for rank, found in marked.items() if True in found}


def _bad_input(evidence: Evidence) -> OverflowReport | None:
    bad = _first(evidence, lambda stats: map(bool, stats.bad_inputs))
    if not bad:
        return None
    count = sum(sum(stats.bad_inputs) for stats in evidence)
    rank, microbatch = next(iter(bad.items()))
    rows = ", ".join(map(str, evidence[rank].bad_rows[microbatch]))
    first = f": on rank {rank} in microbatch {microbatch}, first rows {rows}" if rows else ""
    text = f"bad input: {count} inf or NaN among the floating-point values of the batch"
    advice = f"check the data of these samples{first}"
    return OverflowReport("bad_input", text, advice, tuple(bad), microbatch)


def _bad_weight(evidence: Evidence, context: OverflowContext) -> OverflowReport | None:
    if 0 <= context.weight < math.inf:
        return None
    bad = _first(evidence, lambda stats: (not 0 <= each < math.inf for each in stats.loss_weights))
    return OverflowReport(
        "bad_weight",
        f"the weights that the loss function returned add up to {context.weight:g}; a weight is "
        "negative or not finite",
        "return the number of samples or tokens that the loss was summed over",
        tuple(bad),
        next(iter(bad.values()), None),
    )


def _bad_parameter(evidence: Evidence) -> OverflowReport | None:
    bad = {
        rank: stats.bad_parameters for rank, stats in enumerate(evidence) if stats.bad_parameters
    }
    if not bad:
        return None
    name = next(iter(bad.values()))[0]
    module = name.rpartition(".")[0]
    if holders := _ranks_with(name, [stats.bad_weights for stats in evidence]):
        text = f"parameter {name!r} itself holds inf or NaN"
        advice = "continue from an earlier checkpoint; check what else writes to the weights"
        return OverflowReport("bad_parameter", text, advice, holders, module=module)
    if holders := _ranks_with(name, [stats.overflowing_weights for stats in evidence]):
        text = f"parameter {name!r} is inf: its FP32 master weight is beyond the range of float16"
        advice = f"{_USE_BF16}, or keep that module in FP32 (keep_fp32)"
        return OverflowReport("bad_parameter", text, advice, holders, module=module)
    text = f"the FP32 master weight of {name!r} is finite, but the parameter holds inf or NaN"
    advice = (
        "it is copied from its FP32 master weight after every step; check what else writes to it, "
        "and the memory of that machine"
    )
    return OverflowReport("bad_parameter", text, advice, tuple(bad), module=module)


def _ranks_with(name: str, names: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return tuple(rank for rank, held in enumerate(names) if name in held)


def _forward(evidence: Evidence, context: OverflowContext) -> OverflowReport | None:
    bad = _first_losses(evidence, lambda finite, finite_again: not (finite or finite_again))
    if not bad:
        return None
    rank, microbatch = next(iter(bad.items()))
    origin = evidence[rank].forward[microbatch]
    text = f"overflow in the forward pass: the loss itself is not finite{_origin(origin)}"
    advice, module = _forward_advice(origin, context), None if origin is None else origin.module
    return OverflowReport("forward", text, advice, tuple(bad), microbatch, module)


def _first_losses(evidence: Evidence, matches: Callable[[bool, bool], bool]) -> dict[int, int]:
    """Return the first microbatch of each rank whose loss matches a condition.

    Args:
        evidence: Statistics of each rank, in rank order.
        matches: Called with whether the loss is finite in the step, and in its repetition.
    """

    def marks(stats: RankOverflowStats) -> Iterator[bool]:
        for loss, again in zip(stats.losses, stats.repeated_losses, strict=True):
            yield matches(math.isfinite(loss), math.isfinite(again))

    return _first(evidence, marks)


def _forward_advice(origin: ForwardOverflow | None, context: OverflowContext) -> str:
    if origin is None:
        return f"{_IF_DIVERGING}look for an overflow or a division by zero in the loss function"
    if context.is_fp16:
        return f"{_IF_DIVERGING}{_USE_BF16}: no loss scale widens the range of activations"
    return "lower the learning rate or max_norm, or look for a division by zero in that module"


def _origin(origin: ForwardOverflow | None) -> str:
    """Return the first module with a non-finite value in forward, as the end of a clause."""
    if origin is None:
        return ", but the outputs of all modules are"
    module = repr(origin.module) if origin.module else "the model"
    return f", first at the {origin.side} of {module}"


def _other_loss(evidence: Evidence, context: OverflowContext) -> OverflowReport | None:
    """Return the diagnosis if a loss is finite only in the step, or only in its repetition."""
    first = _first_losses(evidence, operator.ne)
    if not first:
        return None
    rank, microbatch = next(iter(first.items()))
    loss = evidence[rank].losses[microbatch]
    again = evidence[rank].repeated_losses[microbatch]
    text = _did_not_recur(context) if math.isfinite(again) else "the step and its repetition differ"
    text += f": the loss was {loss:.4g}, and {again:.4g} in the repetition"
    advice = f"look for {_suspects(context)}"
    return OverflowReport("not_repeated", text, advice, tuple(first), microbatch)


def _backward(
    evidence: Evidence,
    context: OverflowContext,
    fitting: float | None,
    lost: float | None,
) -> OverflowReport | None:
    bad = {rank: stats.parameters for rank, stats in enumerate(evidence) if stats.parameters}
    if not bad:
        return None
    first, *_ = next(iter(bad.values()))
    has_inf = any(entry.inf for entries in bad.values() for entry in entries)
    cause, text, advice = _backward_cause(context, fitting, lost, has_inf=has_inf)
    finite = f", largest finite {first.largest_finite:.3g}" if first.largest_finite else ""
    place = f"; first in the gradient of {first.name!r} ({first.inf} inf, {first.nan} NaN{finite})"
    return OverflowReport(cause, text + place, advice, tuple(bad), first.microbatch, first.module)


def _backward_cause(
    context: OverflowContext, fitting: float | None, lost: float | None, *, has_inf: bool
) -> tuple[Cause, str, str]:
    """Return cause, text and advice for a finite loss with non-finite gradients."""
    # The loss may be normal while weights are so large that a gradient overflows.
    first = "lower the learning rate; if that does not help, " if context.has_updates else ""
    if not context.is_fp16:
        text = "the loss is finite, but its gradient is not, and there is no loss scale to lower"
        return "backward", text, f"{first}{_LOOK_FOR_DIVISION}"
    wide, lowest = "the range of the gradients is too wide for float16", scale_text(context.lowest)
    if fitting is None and not has_inf:
        text = f"the loss is finite, but its gradient is NaN, even at loss scale {lowest}"
        return "backward", text, f"{first}{_LOOK_FOR_DIVISION}; without one, {_USE_BF16}"
    if fitting is None:
        text = f"{wide}: they overflow even at loss scale {lowest}"
        advice = f"{_IF_DIVERGING}{_USE_BF16}; if that overflows as well, {_LOOK_FOR_DIVISION}"
        return "range_too_wide", text, advice
    if lost is not None and lost > MOST:
        text = f"{wide}: they fit at loss scale {scale_text(fitting)}, where {lost:.0%} become zero"
        return "range_too_wide", text, f"{_IF_DIVERGING}{_USE_BF16}"
    text = (
        f"loss scale {scale_text(context.scale)} was too high: the parameters' gradients fit at "
        f"{scale_text(fitting)}"
    )
    return "scale_too_high", text, _how_to_lower(context.floor, fitting)


_USE_BF16 = "use a bf16 policy"
_IF_DIVERGING = "if the loss was rising, lower the learning rate; otherwise "
_LOOK_FOR_DIVISION = "look for a division by zero or the root of zero in that module"


def _how_to_lower(floor: float | None, fitting: float) -> str:
    if floor is None:
        return "lower the loss scale (init), or make it dynamic"
    if fitting < floor:
        return f"{_IF_DIVERGING}lower min_scale = {floor:g}, or {_USE_BF16}"
    return "nothing to do: the loss scale is lowered automatically"


def _reduction(evidence: Evidence, context: OverflowContext) -> OverflowReport | None:
    largest = max(stats.largest for stats in evidence)
    if sum(stats.largest for stats in evidence) < torch.finfo(context.reduce_dtype).max:
        return None
    ranks = tuple(rank for rank, stats in enumerate(evidence) if stats.largest == largest)
    text = (
        f"the gradients of each rank are finite, up to {largest:.3g}, but their sum is beyond "
        f"{dtype_name(context.reduce_dtype)}"
    )
    advice = "lower the learning rate, or a loss scale that is set too high"
    return OverflowReport("reduction", text, advice, ranks)


def _not_repeated(context: OverflowContext) -> OverflowReport:
    advice = f"if it recurs, look for {_suspects(context)}"
    if context.scale > context.lowest:
        scale = scale_text(context.scale)
        advice = f"loss scale {scale} may be close to the largest at which gradients fit; {advice}"
    return OverflowReport("not_repeated", _did_not_recur(context), advice)


def _did_not_recur(context: OverflowContext) -> str:
    moved = "" if context.exact else " (one update has changed the weights since then)"
    return f"an overflow that did not recur when the step was repeated{moved}"


def _suspects(context: OverflowContext) -> str:
    """Return possible reasons for a difference between a step and its repetition."""
    copies = (
        "a value written to a 16-bit parameter (overwritten by now, because parameters are copied "
        "from FP32 master weights after every step), "
        if context.has_masters
        else ""
    )
    return (
        f"a batch that is changed in place after the step, {copies}a race or a non-deterministic "
        "operation, and faulty memory or hardware"
    )


def _fitting_scale(evidence: Evidence, context: OverflowContext) -> float | None:
    """Return the highest power of two at which the gradients of all ranks fit; None if unknown."""
    largest = [stats.largest_at_lowest for stats in evidence]
    measured = [value for value in largest if value is not None and math.isfinite(value)]
    if not context.is_fp16 or len(measured) < len(largest):
        return None
    # The gradient of an activation may have overflowed, so the scale of the step is too high.
    limit = math.log2(context.scale) - 1
    if max(measured) > 0:
        limit = min(limit, math.log2(FP16_LARGEST / max(measured) * context.lowest))
    return max(2.0 ** math.floor(limit), context.lowest)


def _lost_share(evidence: Evidence, scale: float, fitting: float) -> float:
    """Return the share of the finite nonzero values that become zero at the scale `fitting`."""
    total = reduce(operator.add, (stats.histogram for stats in evidence))
    return total.shares(round(math.log2(fitting / scale))).zero
