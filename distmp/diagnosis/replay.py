"""Repeats a skipped step to find out which values overflowed.

After the reduction an overflow is on every rank, so its cause has to be found before the reduction.
Checking every gradient of every step would cost a pass over them. Instead the engine keeps
references to the inputs of a step until its outcome has been read, and repeats a skipped step, one
microbatch at a time, with hooks that check outputs and gradients. A skipped step with a loss scale
is repeated a second time at the lowest scale, which distinguishes a scale that is too high from a
range that is too wide.

A skip does not change the weights, so the repetition is exact if it runs before the next update. If
the host runs ahead of a CUDA device, the outcome is read after the next step has started. Then one
update may have changed the weights, which the report states. The losses of the step are kept and
compared with those of the repetition, to detect an overflow that does not recur.

A step cannot be repeated exactly if the model draws random numbers from other generators than the
default ones of torch, numpy and Python, or if batches were written to after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distmp.diagnosis.attribution import ParameterOverflow, RankOverflowStats
from distmp.diagnosis.histogram import ExponentHistogram
from distmp.diagnosis.probe import GradientSummary, Probe, count_non_finite
from distmp.parallel import Strategy
from distmp.parallel.module_buffers import buffers_restored
from distmp.quantization import ProductFormats
from distmp.utils.dtypes import local_values
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.tensor_trees import parameter_name

# `backward(batch, scale)` runs forward and backward of one microbatch with a 0-dim loss scale, and
# returns its loss.
Backward = Callable[[Any, Tensor], Tensor]


class StepInputs(NamedTuple):
    """References to the inputs and losses of a step.

    Attributes:
        microbatches: The microbatches of the step on this rank.
        streams: Key of the random numbers of each microbatch, see `seed_generators`.
        losses: Loss sum of each microbatch, 0-dim, on the device.
        weights: Weight of each microbatch, as returned by the loss function, 0-dim.
        position: Number of the step, and index of the first microbatch in the global batch.
        formats: The formats of layers with low-precision matmuls, by name.
    """

    microbatches: tuple[Any, ...]
    streams: list[str]
    losses: list[Tensor]
    weights: list[Tensor]
    position: tuple[int, int] = (0, 0)
    formats: Mapping[str, ProductFormats] = MappingProxyType({})


class StepReplay:
    """Repeats one step on this rank; with a sharded strategy all ranks have to repeat it together.

    Args:
        strategy: The strategy with the module; its gradients are discarded.
        backward: Runs forward and backward of one microbatch with a given loss scale.
        step: The inputs of the step.
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
        """Return statistics of this rank at the step's scale and, if it is lower, at `lowest`."""
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
            overflowing_weights=_non_finite(weights, compute_dtype),
            parameters=first_overflows(gradients, self._rank),
            largest=max(map(_largest_finite, gradients)),
            histogram=_histogram(probes),
            largest_at_lowest=self._largest_at(lowest) if lowest < scale else None,
        )

    def _largest_at(self, scale: float) -> float:
        probes, _ = self._run(scale)
        return max(_largest(probe.gradients()) for probe in probes)

    def _run(self, scale: float) -> tuple[list[Probe], list[Tensor]]:
        """Run every microbatch like the step, but without reducing replicated gradients.

        Returns:
            The probe and the loss of each microbatch.
        """
        strategy, device = self._strategy, self._step.losses[0].device
        probes, losses = [], []
        strategy.begin_step()
        microbatches = zip(self._step.microbatches, self._step.streams, strict=True)
        with (
            buffers_restored(strategy.model),
            _formats_as(self._step.formats, strategy),
            generators_kept(device),
        ):
            for index, (batch, stream) in enumerate(microbatches):
                strategy.begin_microbatch(last=False)
                if strategy.low_precision_layers is not None:
                    step, first = self._step.position
                    strategy.low_precision_layers.begin_microbatch(step, first + index)
                probe = Probe(strategy.model, strategy.units())
                seed_generators(stream, device)
                with probe:
                    losses.append(self._backward(batch, torch.tensor(scale, device=device)))
                probes.append(probe)
        strategy.begin_step()
        return probes, losses


def first_overflows(
    gradients: Sequence[dict[str, GradientSummary]], rank: int
) -> list[ParameterOverflow]:
    """Return each parameter's first microbatch with a non-finite gradient.

    Args:
        gradients: For each microbatch, the gradient of each parameter in the order of backward.
        rank: The rank of the gradients.
    """
    overflows: dict[str, ParameterOverflow] = {}
    for microbatch, summaries in enumerate(gradients):
        for name, summary in summaries.items():
            if name not in overflows and (summary.inf or summary.nan):
                module = name.rpartition(".")[0]
                overflows[name] = ParameterOverflow(name, module, rank, microbatch, *summary)
    return list(overflows.values())


def _non_finite(weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> list[str]:
    """Return the names of weights whose local shard is not finite after rounding to `dtype`."""
    return [name for name, weight in weights if count_non_finite(local_values(weight).to(dtype))]


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
def _formats_as(formats: Mapping[str, ProductFormats], strategy: Strategy) -> Iterator[None]:
    """Set the formats of low-precision matmuls to those of a step, and restore them afterwards."""
    layers = strategy.low_precision_layers
    if layers is None:
        yield
        return
    current = layers.formats
    layers.set_formats(formats)
    try:
        yield
    finally:
        layers.set_formats(current)
