"""One optimizer step over all ranks, in the order of execution."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distmp.distributed.compare_ranks import Fingerprint
from distmp.distributed.progress import DECISION, UPDATE, current_phase
from distmp.engine.divergence_guard import SpikeCheck
from distmp.engine.microbatches import MicrobatchStats, moved
from distmp.engine.observers import StepObserver
from distmp.engine.outcome import StepOutcome
from distmp.engine.parts import EngineParts
from distmp.engine.setup import Setup
from distmp.engine.state import EngineState, agree_on_nominal_weight
from distmp.engine.step_checks import check_loss, explain_graph_errors
from distmp.parallel import Strategy
from distmp.precision.builders import autocast_of_dtypes
from distmp.precision.keep import product_switches
from distmp.scaling.step_decision import (
    SUMS,
    StepDecision,
    all_reduce_stats,
    decide_step,
    local_stats,
    ordered_total,
    pack,
)
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.host_copy import to_device


def take_step(
    parts: EngineParts,
    microbatches: Sequence[Any],
    observers: Sequence[StepObserver],
    *,
    stop: bool,
) -> tuple[StepOutcome, MicrobatchStats]:
    """Take a step together with all ranks; the host does not wait for the device.

    Args:
        parts: The parts of the engine.
        microbatches: The microbatches of this rank.
        observers: Look at the step; empty after the first steps.
        stop: Whether this rank requests to stop.

    Returns:
        The outcome, and the statistics of this rank's microbatches.
    """
    current_phase.enter("beginning of the step")
    setup, state = parts.setup, parts.state
    updates, products = setup.updates, setup.low_precision_matmuls
    rate = updates.learning_rates.set(state.counts[0], updates.max_applied)
    scale = state.loss_scale.value
    setup.buffers.begin_step()
    stats = _accumulate(setup, state, microbatches, scale, observers)
    current_phase.enter(DECISION)
    setup.clock.end()
    total, differ, of_products = _sum_over_ranks(parts, stats, stop=stop)
    setup.clock.begin()
    decision = decide_step(total, scale, state.nominal_weight or 1.0, state.max_norm)
    spike_check = state.divergence.check(decision)
    decision = decision.skipping(spike_check.skip | differ)
    current_phase.enter(UPDATE)
    updates.apply(decision)
    setup.buffers.end_step(decision.found_inf, differ)
    setup.strategy.end_step(decision.found_inf)
    exhausted = state.loss_scale.update(decision.overflow | (decision.dropped > 0), decision.empty)
    state.divergence.remember(decision)
    products.end_step(of_products, decision)
    exhausted = exhausted & decision.overflow
    outcome = _outcome(state.counts, decision, spike_check, differ, rate, scale, exhausted)
    outcome.matmul_statistics = products.statistics
    outcome.formats = products.formats
    return outcome, stats


def _accumulate(
    setup: Setup,
    state: EngineState,
    microbatches: Sequence[Any],
    scale: Tensor,
    observers: Sequence[StepObserver],
) -> MicrobatchStats:
    """Run forward and backward of the microbatches, and reduce the gradients."""
    strategy, products = setup.strategy, setup.low_precision_matmuls
    reproducible = setup.config.reproducible
    count = len(microbatches)
    strategy.compare_microbatches(count)
    strategy.begin_step()
    products.begin_step()
    stats = MicrobatchStats()
    # With reproducible, random numbers belong to the position in the global batch, not to the rank.
    stream = random_stream(setup, state, "step", rank=0 if reproducible else None)
    first = setup.world.rank * count if reproducible else 0
    # Once per step: setting and restoring the switches takes as long as 20 small kernels.
    with product_switches(setup.policy), generators_kept(setup.device):
        for index, batch in enumerate(microbatches):
            if reproducible:
                setup.buffers.begin_microbatch(index)
            strategy.begin_microbatch(last=index == count - 1)
            products.begin_microbatch(index, count)
            stats.streams.append(f"{stream} {first + index}")
            current_phase.enter("forward of microbatch", index + 1)
            seed_generators(stats.streams[-1], setup.device)
            loss, weight = forward(setup, batch, observers)
            if index == 0:
                factor = _backward_factor(setup, state, scale, weight, count)
            current_phase.enter("backward of microbatch", index + 1)
            backward(strategy, loss, factor)
            # Copied: torch's mse_loss keeps the memory of all terms of its sum alive.
            stats.add(loss.detach().clone(), weight, strategy.end_microbatch())
    current_phase.enter("reduction of the gradients")
    strategy.finish_gradients()
    for observer in observers:
        observer.after_gradients(stats)
    return stats


def random_stream(setup: Setup, state: EngineState, use: str, rank: int | None = None) -> str:
    """Return the key of a rank's random numbers in a step, see `seed_generators`."""
    rank = setup.world.rank if rank is None else rank
    return f"{use} {state.seed} {setup.low_precision_matmuls.step} {rank}"


def forward(
    setup: Setup, batch: Any, observers: Sequence[StepObserver] = ()
) -> tuple[Tensor, Tensor]:
    """Return the loss sum and the weight of a microbatch, 0-dim on the device."""
    batch = moved(batch, setup.device)
    strategy = setup.strategy
    with (
        autocast_of_dtypes(setup.policy, setup.device, sharded=setup.is_sharded),
        explain_graph_errors(),
    ):
        strategy.computing_loss(computing=True)
        try:
            loss_sum, weight = check_loss(setup.loss(strategy.module, batch))
        finally:
            strategy.computing_loss(computing=False)
    for observer in observers:
        observer.after_forward(batch, loss_sum, weight)
    return loss_sum, _scalar(weight, setup.device)


def backward(strategy: Strategy, loss: Tensor, factor: Tensor) -> None:
    """Accumulate the gradients of `loss * factor`, without the kernels of the product."""
    loss = loss.float()
    with explain_graph_errors(), strategy.backward_context(loss):
        loss.backward(factor)


def _backward_factor(
    setup: Setup, state: EngineState, scale: Tensor, weight: Tensor, microbatches: int
) -> Tensor:
    """Return S / n0; the first step determines n0 from the weight of its first microbatch."""
    if state.nominal_weight is None:
        state.nominal_weight = agree_on_nominal_weight(
            weight, microbatches, setup.world, reproducible=setup.config.reproducible
        )
    return scale / (state.nominal_weight or 1.0)


def _sum_over_ranks(
    parts: EngineParts, stats: MicrobatchStats, *, stop: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the statistics of a step over ranks, in one all-reduce; the host does not wait.

    Args:
        parts: The parts of the engine; the strategy holds the gradients of the step.
        stats: Losses and weights of the microbatches of this rank.
        stop: Whether this rank requests to stop.

    Returns:
        The first argument of `decide_step`, with a weight of NaN if one is negative; whether ranks
        take the step with different settings, 0-dim bool; and the sums of
        `LowPrecisionMatmuls.terms`, FP64, empty without them.
    """
    strategy, world = parts.setup.strategy, parts.setup.world
    of_products = parts.setup.low_precision_matmuls.terms()
    fingerprint = Fingerprint.of(parts.step_settings(), world.world_size)
    dropped = sum(stats.dropped) if stats.dropped else 0.0
    # In one kernel. A sum of positive and negative weights would look plausible.
    weights = F.threshold(pack(*stats.weights, device=world.device), -sys.float_info.min, math.nan)
    if parts.setup.config.reproducible:
        total = ordered_total(
            strategy.gradient_shards(),
            stats.loss_sums,
            weights.unbind(),
            stop=stop,
            dropped=dropped,
            more=fingerprint.terms,
            exact=of_products,
            group=world.group,
            device=world.device,
        )
        total, terms, sums = total.tensor_split([SUMS, SUMS + len(fingerprint.terms)])
        return total, fingerprint.differs(terms), sums
    local = local_stats(
        strategy.gradients(),
        pack(*stats.loss_sums, device=world.device).sum(),
        weights.sum(),
        stop=stop,
        dropped=dropped,
        device=world.device,
    )
    if of_products is not None:
        local = torch.cat([local, of_products])
    total, differ = fingerprint.sum_over_ranks(
        local, lambda values: all_reduce_stats(values, world.group)
    )
    return total[:SUMS], differ, total[SUMS:]


def _outcome(
    counts: Tensor,
    decision: StepDecision,
    spike_check: SpikeCheck,
    differ: Tensor,
    rate: Tensor,
    scale: Tensor,
    exhausted: Tensor,
) -> StepOutcome:
    skipped = decision.found_inf.to(torch.int64)
    # In place: `state_dict` returns this tensor, and a checkpoint is loaded into it.
    counts += torch.stack([1 - skipped, skipped, skipped])
    counts[2] *= skipped
    return StepOutcome(
        decision._asdict()
        | spike_check._asdict()
        | {
            "learning_rate": rate,
            "loss_scale": scale,
            "skipped": skipped,
            "applied_total": counts[0],
            "skipped_total": counts[1],
            "skipped_in_a_row": counts[2],
            "scale_exhausted": exhausted,
        },
        differ,
    )


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return `value` as a 0-dim tensor on `device`; the host does not wait for the device."""
    if isinstance(value, Tensor):
        return to_device(value.detach(), device)
    return torch.scalar_tensor(value, dtype=torch.float64, device=device)
