"""One optimizer step over all ranks, in the order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distmp.distributed.comparison import Fingerprint
from distmp.distributed.progress import DECISION, UPDATE, current_phase
from distmp.engine.likely_mistakes import FirstStep
from distmp.engine.outcome import COUNTS, MicrobatchStats, StepOutcome
from distmp.engine.parts import EngineParts
from distmp.engine.setup import EngineSetup
from distmp.engine.state import EngineState, agree_on_nominal_weight
from distmp.engine.step_checks import check_loss, explain_graph_errors
from distmp.parallel.strategy import Strategy
from distmp.precision.builders import autocast_of_dtypes
from distmp.precision.keep import product_switches
from distmp.scaling.step_decision import (
    SUMS,
    StepDecision,
    all_reduce_stats,
    decide_step,
    local_stats,
    ordered_total,
)
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.host_copy import cpu_number, moved, to_device


def take_step(
    parts: EngineParts,
    microbatches: Sequence[Any],
    first_step: FirstStep | None,
    *,
    stop: bool,
) -> tuple[StepOutcome, MicrobatchStats]:
    """Take a step together with all ranks; the host does not wait for its results.

    Args:
        parts: The parts of the engine.
        microbatches: The microbatches of this rank.
        first_step: Checks the step; None after the first steps.
        stop: Whether this rank requests to stop.

    Returns:
        The outcome, and the statistics of this rank's microbatches.
    """
    current_phase.enter("beginning of the step")
    setup, state = parts.setup, parts.state
    updates, products = setup.updates, setup.low_precision_matmuls
    rate = updates.learning_rates.set(state.counts[0], updates.max_applied)
    # A number if it is fixed, with which the decision launches fewer kernels.
    scale = 1.0 if state.loss_scale.config is None else state.loss_scale.value
    setup.buffers.begin_step()
    stats = _accumulate(parts, microbatches, first_step)
    current_phase.enter(DECISION)
    setup.clock.end()
    fingerprint = Fingerprint.of(parts.step_settings(), setup.world.world_size)
    sums = _sum_over_ranks(setup, stats, fingerprint, stop=stop)
    setup.clock.begin()
    total, terms, of_products = sums.tensor_split([SUMS, SUMS + len(fingerprint.terms)])
    decision = decide_step(total, scale, state.nominal_weight or 1.0, state.max_norm)
    spike_check = state.divergence.check(decision)
    if spike_check.skip is not None:
        decision = decision.skipping(spike_check.skip)
    differ = fingerprint.differs(terms) if fingerprint.terms else None
    if differ is not None:
        decision = decision.skipping(differ)
    current_phase.enter(UPDATE)
    updates.apply(decision)
    setup.buffers.end_step(decision.found_inf, differ)
    setup.strategy.used.end_step(decision.found_inf)
    values: dict[str, Tensor | float] = {"learning_rate": rate, "loss_scale": scale}
    values |= {name: getattr(spike_check, name) for name in ("spike", "loss_limit", "norm_limit")}
    if state.loss_scale.floor is not None:
        dropped = decision.dropped > 0
        exhausted = state.loss_scale.update(decision.overflow | dropped, decision.empty)
        values["scale_exhausted"] = exhausted & decision.overflow
    state.divergence.remember(decision)
    products.end_step(of_products, decision)
    state.steps += 1
    values["sums"] = sums[: len(sums) - len(of_products)]
    outcome = _outcome(state, decision, fingerprint, values)
    outcome.matmul_statistics = products.statistics
    outcome.formats = products.formats
    updates.is_complete = True  # last: weights belong to the counts and the loss scale
    return outcome, stats


def _accumulate(
    parts: EngineParts, microbatches: Sequence[Any], first_step: FirstStep | None
) -> MicrobatchStats:
    """Run forward and backward of the microbatches, and reduce the gradients."""
    setup, state = parts.setup, parts.state
    strategy, products = setup.strategy, setup.low_precision_matmuls
    reproducible = setup.config.reproducible
    count = len(microbatches)
    strategy.compare_microbatches(count)
    strategy.begin_step()
    products.begin_step(state.steps)
    stats = MicrobatchStats()
    # With reproducible, random numbers belong to the position in the global batch, not to the rank.
    stream = random_stream(setup, state, "step", rank=0 if reproducible else None)
    first = setup.world.rank * count if reproducible else 0
    # Once per step: setting and restoring the switches takes as long as 20 small kernels.
    with product_switches(setup.policy), generators_kept(setup.device):
        for index, batch in enumerate(microbatches):
            if reproducible:
                setup.buffers.begin_microbatch(index)
            parts.calls.is_last = index == count - 1
            strategy.begin_microbatch(last=parts.calls.is_last)
            products.begin_microbatch(state.steps, index, count)
            stats.streams.append(f"{stream} {first + index}")
            current_phase.enter("forward of microbatch", index + 1)
            seed_generators(stats.streams[-1], setup.device)
            loss, weight = forward(setup, batch, first_step)
            if index == 0:
                factor = _backward_factor(setup, state, weight, count)
            current_phase.enter("backward of microbatch", index + 1)
            backward(strategy, loss, factor)
            # A copy also if FP64: torch's mse_loss keeps the memory of all terms of its sum alive.
            loss = loss.detach().to(setup.device, torch.float64, copy=True)
            stats.add(loss, weight, strategy.end_microbatch())
    current_phase.enter("reduction of the gradients")
    strategy.finish_gradients()
    if first_step is not None:
        first_step.after_gradients(stats)
    return stats


def random_stream(setup: EngineSetup, state: EngineState, use: str, rank: int | None = None) -> str:
    """Return the key of a rank's random numbers in a step, see `seed_generators`."""
    rank = setup.world.rank if rank is None else rank
    return f"{use} {state.seed} {state.steps} {rank}"


def forward(
    setup: EngineSetup, batch: Any, first_step: FirstStep | None = None
) -> tuple[Tensor, Tensor | float]:
    """Return the loss sum and the weight of a microbatch, 0-dim on the device or a number."""
    batch = moved(batch, setup.device)
    strategy = setup.strategy
    with (
        autocast_of_dtypes(setup.policy, setup.device),
        explain_graph_errors(setup.policy),
    ):
        strategy.used.computing_loss = True
        try:
            loss_sum, weight = check_loss(setup.loss(strategy.module, batch))
        finally:
            strategy.used.computing_loss = False
            setup.buffers.batches.copy_parts_of(batch)
    if first_step is not None:
        first_step.after_forward(batch, loss_sum, weight)
    if isinstance(weight, Tensor):
        # A copy, because a loss function may fill the same tensor in each microbatch.
        weight = to_device(weight.detach(), setup.device, copy=True)
    return loss_sum, weight


def backward(strategy: Strategy, loss: Tensor, factor: Tensor) -> None:
    """Accumulate the gradients of `loss * factor`, without the kernels of the product."""
    loss = loss.float()
    with explain_graph_errors(), strategy.backward_context(loss):
        loss.backward(factor)


def _backward_factor(
    setup: EngineSetup, state: EngineState, weight: Tensor | float, microbatches: int
) -> Tensor:
    """Return S / n0; the first step determines n0 from the weight of its first microbatch."""
    if state.nominal_weight is None:
        state.nominal_weight = agree_on_nominal_weight(
            weight, microbatches, setup.world, reproducible=setup.config.reproducible
        )
    return state.backward_factor()


def _sum_over_ranks(
    setup: EngineSetup, stats: MicrobatchStats, fingerprint: Fingerprint, *, stop: bool
) -> Tensor:
    """Sum the statistics of a step over ranks, in one all-reduce; the host does not wait.

    Args:
        setup: Its strategy holds the gradients of the step.
        stats: Losses and weights of the microbatches of this rank.
        fingerprint: The settings of the step on this rank.
        stop: Whether this rank requests to stop.

    Returns:
        FP64, the first argument of `decide_step`, then the sums of the terms of `fingerprint` and
        those of `LowPrecisionMatmuls.terms`.
    """
    strategy, world = setup.strategy, setup.world
    options: dict[str, Any] = {
        "stop": stop,
        "dropped": sum(stats.dropped) if stats.dropped else 0.0,
        "more": fingerprint.terms,
        "exact": setup.low_precision_matmuls.terms(),
        "device": world.device,
    }
    batches = stats.loss_sums, stats.weights
    if setup.config.reproducible:
        shards = strategy.gradient_shards()
        return ordered_total(shards, *batches, **options, group=world.group)
    return all_reduce_stats(local_stats(strategy.gradients(), *batches, **options), world.group)


def _outcome(
    state: EngineState,
    decision: StepDecision,
    fingerprint: Fingerprint,
    values: dict[str, Tensor | float],
) -> StepOutcome:
    """Count a step, and return its outcome, which the host computes from `values` when it is read.

    Args:
        state: The numbers of the engine.
        decision: The decision on the step.
        fingerprint: The settings of the step on this rank.
        values: What was on the device, by name; "sums" are those of the decision, then of the
            fingerprint.
    """
    kept, added = decision.found_inf != state.counting
    # In place: `state_dict` returns this tensor, and a checkpoint is loaded into it.
    torch.addcmul(added, state.counts, kept, out=state.counts)
    settings = state.nominal_weight or 1.0, state.max_norm
    on_gpu = state.counts.is_cuda

    def numbers(found: dict[str, Any]) -> dict[str, Any]:
        sums = found["sums"][:SUMS]
        decided = decide_step(sums, found["loss_scale"], *settings, on_gpu=on_gpu)
        names = ("loss", "weight", "grad_norm", "overflow", "dropped", "stop")
        found |= {name: getattr(decided, name) for name in names}
        found["skipped"] = found["skipped_in_a_row"] > 0
        return found

    def ranks_differ(found: dict[str, Any]) -> bool:
        differs = fingerprint.terms and cpu_number(fingerprint.differs(found["sums"][SUMS:]))
        return bool(differs)

    counts = {COUNTS: state.counts}
    return StepOutcome({"scale_exhausted": False, **counts, **values}, numbers, ranks_differ)
