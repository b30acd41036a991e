"""Repeating a skipped step to see what overflowed, and where.

After the reduction an overflow stands on every rank, so what caused it has to be seen before. To
look at every gradient of every step would cost a pass over them. Instead the engine keeps what a
step was made of by reference until its outcome has been read, and repeats a step that was skipped,
one microbatch at a time, with hooks that look at outputs and gradients. A clean step pays for a
copy of the random generators' states for each microbatch: microseconds, and not one tensor
operation. A skipped step
costs two more where there is a loss scale, since it is tried at the lowest scale too: that tells a
scale that is too high from a range that is too wide.

A skip leaves the weights alone, so the repetition is exact if it takes place before the next update
is applied. Where the host runs ahead of a CUDA device, the outcome is read when the next step has
been started; weights may have moved by one update then, which the report says. The losses of the
step itself are kept, and compared with those of the repetition: what does not recur is told apart.

What cannot be repeated: random numbers that a model draws from elsewhere than torch's default
generators, and batches that were written to after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.diagnosis.attribution import ParameterOverflow, RankOverflowStats
from distmp.diagnosis.histogram import ExponentHistogram
from distmp.diagnosis.probe import GradientSummary, Probe, count_non_finite
from distmp.parallel import Strategy
from distmp.parallel.module_buffers import buffers_restored
from distmp.parallel.strategy import parameter_name

# `backward(batch, scale)` runs forward and backward of one microbatch at a 0-dim loss scale, and
# returns its loss.
Backward = Callable[[Any, Tensor], Tensor]


class StepInputs(NamedTuple):
    """What a step was made of, by reference.

    Attributes:
        microbatches: What the step was called with on this rank.
        generators: States of the random generators when each of them began, see
            `generator_states`.
        losses: Loss sums of the microbatches, 0-dim, on the device.
        weights: What the loss function returned beside them, 0-dim.
    """

    microbatches: tuple[Any, ...]
    generators: list[dict[torch.device, Tensor]]
    losses: list[Tensor]
    weights: list[Tensor]


def generator_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Return the states of the default random generators of the host and of `device`."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        states[device] = torch.cuda.get_rng_state(device)
    return states


class StepReplay:
    """Repeats one step on this rank; with a sharded strategy all ranks have to do it together.

    Args:
        strategy: Whose module, parameters and gradients are used; its gradients are gone after it.
        backward: Runs forward and backward of one microbatch at a given loss scale.
        step: What the step was made of.
        rank: The rank of this process, for the report.
    """

    def __init__(self, strategy: Strategy, backward: Backward, step: StepInputs, rank: int) -> None:
        self._strategy = strategy
        self._backward = backward
        self._step = step
        self._rank = rank

    def evidence(
        self, scale: float, lowest: float, compute_dtype: torch.dtype
    ) -> RankOverflowStats:
        """Return what this rank sees at the step's scale and, if it is lower, at `lowest`."""
        probes, repeated_losses = self._run(scale)
        gradients = [probe.gradients() for probe in probes]
        losses = [float(loss) for loss in self._step.losses]
        weights = self._strategy.optimizer_parameters()
        return RankOverflowStats(
            losses=losses,
            repeated_losses=[float(loss) for loss in repeated_losses],
            loss_weights=[float(weight) for weight in self._step.weights],
            bad_inputs=[
                count_non_finite(batch, but_negative_inf=loss - loss == 0)
                for batch, loss in zip(self._step.microbatches, losses, strict=True)
            ],
            forward=[probe.forward for probe in probes],
            bad_parameters=[
                parameter_name(name) for probe in probes for name in probe.bad_parameters
            ],
            bad_weights=_non_finite(weights, torch.float32),
            wide_weights=_non_finite(weights, compute_dtype),
            parameters=first_overflows(gradients, self._rank),
            largest=max(map(_largest_finite, gradients)),
            histogram=_histogram(probes),
            largest_at_lowest=self._largest_at(lowest) if lowest < scale else None,
        )

    def _largest_at(self, scale: float) -> float:
        probes, _ = self._run(scale)
        return max(_largest(probe.gradients()) for probe in probes)

    def _run(self, scale: float) -> tuple[list[Probe], list[Tensor]]:
        """Run every microbatch as the step did, but for the reduction of replicated gradients.

        Returns:
            What was seen in each microbatch, and its loss.
        """
        strategy, device = self._strategy, self._step.losses[0].device
        probes, losses = [], []
        strategy.begin_step()
        microbatches = zip(self._step.microbatches, self._step.generators, strict=True)
        with buffers_restored(strategy.model):
            for batch, states in microbatches:
                strategy.begin_microbatch(last=False)
                with generators_as(states), Probe(strategy.model, strategy.units()) as probe:
                    losses.append(self._backward(batch, torch.tensor(scale, device=device)))
                probes.append(probe)
        strategy.begin_step()
        return probes, losses


def first_overflows(
    gradients: Sequence[dict[str, GradientSummary]], rank: int
) -> list[ParameterOverflow]:
    """Return each parameter's first microbatch with a non-finite gradient.

    Args:
        gradients: For each microbatch, the gradient of each parameter in the order of arrival.
        rank: The rank they were seen on.
    """
    found: dict[str, ParameterOverflow] = {}
    for microbatch, summaries in enumerate(gradients):
        for name, summary in summaries.items():
            if name not in found and (summary.inf or summary.nan):
                module = name.rpartition(".")[0]
                found[name] = ParameterOverflow(name, module, rank, microbatch, *summary)
    return list(found.values())


def _non_finite(weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> list[str]:
    """Return the names of weights of which this rank's part is not finite in a type."""
    return [name for name, weight in weights if count_non_finite(_local(weight).to(dtype))]


def _local(weight: Tensor) -> Tensor:
    if is_traceable_wrapper_subclass(weight):
        # Only where there are such tensors: importing this takes half a second.
        from torch.distributed.tensor import DTensor

        if isinstance(weight, DTensor):
            weight = weight.to_local()
    return weight.detach()


def _largest_finite(gradients: dict[str, GradientSummary]) -> float:
    return max((summary.largest_finite for summary in gradients.values()), default=0.0)


def _largest(gradients: dict[str, GradientSummary]) -> float:
    if any(summary.inf or summary.nan for summary in gradients.values()):
        return float("inf")
    return _largest_finite(gradients)


def _histogram(probes: Sequence[Probe]) -> ExponentHistogram:
    counts = [probe.exponents.cpu() for probe in probes]
    return ExponentHistogram(torch.stack(counts).sum(dim=0))


@contextmanager
def generators_as(states: dict[torch.device, Tensor]) -> Iterator[None]:
    """Set the default generators to `states`, and back to what they were afterwards."""
    cuda = [device for device in states if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        for device, state in states.items():
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
        yield
