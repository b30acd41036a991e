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

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.diagnosis import attribution
from distmp.diagnosis.histogram import ExponentHistogram, count_exponents
from distmp.parallel.module_buffers import buffers_restored
from distmp.parallel.strategy import Strategy
from distmp.quantization.linear import ProductFormats
from distmp.utils.dtypes import local_values
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.tensor_trees import parameter_name, tensors_in

# Largest number of rows of a microbatch that a report names.
ROWS_NAMED = 3


class GradientSummary(NamedTuple):
    """Statistics of a gradient.

    Attributes:
        inf: Number of infinite values.
        nan: Number of NaN values.
        largest_finite: Largest magnitude of the finite values; 0 if there are none.
    """

    inf: int
    nan: int
    largest_finite: float


@dataclass(eq=False)
class Probe:
    """Checks values and gradients of one forward and backward in a `with` block.

    It checks gradients before they are added to those of other microbatches and reduced over ranks,
    for sharded parameters too.

    Args:
        module: The model.
        units: Names and modules that gather their parameters before forward; the model itself if
            parameters are not sharded.
        activations: Whether `exponents` also counts the gradients of the outputs of modules.

    Attributes:
        forward: The first module that returned a non-finite value; None if none did.
        bad_parameters: Names of trainable parameters that hold non-finite values, when they are
            gathered or when a module returns a non-finite value for the first time.
        exponents: Counts of the exponents of all gradients, see `count_exponents`.
    """

    module: nn.Module
    units: Sequence[tuple[str, nn.Module]]
    activations: bool = False

    def __post_init__(self) -> None:
        self.forward: attribution.ForwardOverflow | None = None
        self.bad_parameters: list[str] = []
        self.exponents = count_exponents(torch.zeros(0))
        self._summaries: dict[str, Tensor] = {}
        # By id; the reference makes sure that the id is not reused by another tensor.
        self._watched: dict[int, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Probe:
        for name, module in self.units:
            self._watch_parameters(name, module)
            self._keep(module.register_forward_pre_hook(partial(self._watch_parameters, name)))
        for name, module in self.module.named_modules():
            hook = partial(self._check_output, parameter_name(f"{name}.").rstrip("."))
            self._keep(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()
        self._watched.clear()

    def gradients(self) -> dict[str, GradientSummary]:
        """Return statistics of each gradient by the parameter's name, in the order of backward."""
        if not self._summaries:
            return {}
        rows = torch.stack(list(self._summaries.values())).tolist()
        return {
            name: GradientSummary(int(inf), int(nan), largest)
            for name, (inf, nan, largest) in zip(self._summaries, rows, strict=True)
        }

    def _keep(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _watch_parameters(self, unit: str, module: nn.Module, *_: object) -> None:
        """Add hooks to the parameters that are gathered now and have none yet."""
        for local_name, parameter in module.named_parameters():
            sharded = is_traceable_wrapper_subclass(parameter)
            if sharded or not parameter.requires_grad or id(parameter) in self._watched:
                continue
            self._watched[id(parameter)] = parameter
            name = parameter_name(f"{unit}.{local_name}".lstrip("."))
            self._check_finite(name, parameter)
            self._keep(parameter.register_hook(partial(self._check_gradient, name)))

    def _check_finite(self, name: str, parameter: Tensor) -> None:
        if name not in self.bad_parameters and count_non_finite(parameter.detach()):
            self.bad_parameters.append(name)

    @torch.no_grad()
    def _check_gradient(self, name: str, gradient: Tensor) -> None:
        if gradient.numel():
            self._summaries[name] = _summary(gradient)
            self._count(gradient)

    def _count(self, gradient: Tensor) -> None:
        self.exponents = self.exponents.to(gradient.device) + count_exponents(gradient)

    def _watch_outputs(self, output: Any) -> None:
        for tensor in tensors_in(output):
            # A container returns outputs of its modules, which have the hook.
            hooks = (tensor._backward_hooks or {}).values()
            if tensor.requires_grad and self._count not in hooks:
                tensor.register_hook(self._count)

    @torch.no_grad()
    def _check_output(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if self.activations:
            self._watch_outputs(output)
        if self.forward is None and count_non_finite(output):
            bad_input = count_non_finite((args, kwargs), but_negative_inf=True)
            self.forward = attribution.ForwardOverflow(name, "input" if bad_input else "output")
            for local_name, parameter in module.named_parameters(recurse=False):
                # The parameter may have been written to since the beginning of forward.
                if parameter.requires_grad and not is_traceable_wrapper_subclass(parameter):
                    self._check_finite(f"{name}.{local_name}".lstrip("."), parameter)


def count_non_finite(value: Any, *, but_negative_inf: bool = False) -> int:
    """Count inf and NaN in the floating-point tensors of any nesting of containers.

    Args:
        value: A tensor, or containers of tensors and other objects.
        but_negative_inf: Do not count -inf, which additive attention masks contain.
    """
    return sum(int(bad.sum()) for bad in _non_finite_in(value, but_negative_inf=but_negative_inf))


def non_finite_rows(value: Any, *, but_negative_inf: bool = False) -> list[int]:
    """Return the first rows with inf or NaN of the first tensor that has any.

    Args:
        value: A tensor, or containers of tensors and other objects.
        but_negative_inf: Ignore -inf.
    """
    for bad in _non_finite_in(value, but_negative_inf=but_negative_inf):
        rows: list[int] = bad.nonzero()[:, 0].unique()[:ROWS_NAMED].tolist() if bad.dim() else []
        if rows:
            return rows
    return []


def _non_finite_in(value: Any, *, but_negative_inf: bool) -> Iterator[Tensor]:
    """Yield where each floating-point tensor in containers is inf or NaN.

    Of sparse and nested tensors, whose values are not in rows, it yields the number.
    """
    for leaf in tensors_in(value):
        if leaf.is_floating_point():
            has_rows = leaf.layout == torch.strided and not leaf.is_nested
            values = leaf if has_rows else _stored_values(leaf)
            values = values.float() if values.itemsize == 1 else values  # FP8 has no `isfinite`
            bad = ~values.isfinite()
            bad = bad & ~values.isneginf() if but_negative_inf else bad
            yield bad if has_rows else bad.sum()


def _stored_values(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def _summary(gradient: Tensor) -> Tensor:
    """Return number of inf, number of NaN and largest finite magnitude, FP64 of shape (3,)."""
    finite = torch.where(gradient.isfinite(), gradient.abs(), 0)
    parts = (gradient.isinf().sum(), gradient.isnan().sum(), finite.max())
    return torch.stack([part.to(torch.float64) for part in parts])


# `backward(batch, scale)` runs forward and backward of one microbatch with a 0-dim loss scale, and
# returns its loss.
Backward = Callable[[Any, Tensor], Tensor]


class StepInputs(NamedTuple):
    """References to the inputs and losses of a step.

    Attributes:
        microbatches: The microbatches of the step on this rank.
        streams: Key of the random numbers of each microbatch, see `seed_generators`.
        losses: Loss sum of each microbatch, 0-dim, on the device.
        weights: Weight of each microbatch; 0 if the step dropped it.
        position: Number of the step, and index of the first microbatch in the global batch.
        formats: The formats of layers with low-precision matmuls; None without such layers.
    """

    microbatches: tuple[Any, ...]
    streams: list[str]
    losses: list[Tensor]
    weights: Sequence[Tensor | float]
    position: tuple[int, int] = (0, 0)
    formats: ProductFormats | None = None


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
    ) -> attribution.RankOverflowStats:
        """Return statistics of this rank at the step's scale and, if it is lower, at `lowest`."""
        probes, repeated_losses = self._run(scale)
        gradients = [probe.gradients() for probe in probes]
        counts = [probe.exponents.cpu() for probe in probes]
        losses = [float(loss) for loss in self._step.losses]
        weights = self._strategy.optimizer_parameters()
        # An attention mask with -inf is no bad input if the loss is finite.
        batches = [
            (batch, loss - loss == 0)
            for batch, loss in zip(self._step.microbatches, losses, strict=True)
        ]
        return attribution.RankOverflowStats(
            losses=losses,
            repeated_losses=[float(loss) for loss in repeated_losses],
            loss_weights=[float(weight) for weight in self._step.weights],
            bad_inputs=[
                count_non_finite(batch, but_negative_inf=finite) for batch, finite in batches
            ],
            bad_rows=[non_finite_rows(batch, but_negative_inf=finite) for batch, finite in batches],
            forward=[probe.forward for probe in probes],
            bad_parameters=[name for probe in probes for name in probe.bad_parameters],
            bad_weights=_non_finite(weights, torch.float32),
            overflowing_weights=_non_finite(weights, compute_dtype),
            parameters=first_overflows(gradients, self._rank),
            largest=max(map(_largest_finite, gradients)),
            histogram=ExponentHistogram(torch.stack(counts).sum(dim=0)),
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
            buffers_restored(strategy.module),
            _formats_as(self._step.formats, strategy),
            generators_kept(device),
        ):
            for index, (batch, stream) in enumerate(microbatches):
                strategy.begin_microbatch(last=False)
                if strategy.low_precision_layers is not None:
                    step, first = self._step.position
                    strategy.low_precision_layers.begin_microbatch(step, first + index)
                probe = Probe(strategy.module, strategy.units())
                seed_generators(stream, device)
                with probe:
                    losses.append(self._backward(batch, torch.tensor(scale, device=device)))
                strategy.end_microbatch()
                probes.append(probe)
        strategy.begin_step()
        return probes, losses


def first_overflows(
    gradients: Sequence[dict[str, GradientSummary]], rank: int
) -> list[attribution.ParameterOverflow]:
    """Return each parameter's first microbatch with a non-finite gradient.

    Args:
        gradients: For each microbatch, the gradient of each parameter in the order of backward.
        rank: The rank of the gradients.
    """
    overflows: dict[str, attribution.ParameterOverflow] = {}
    for microbatch, summaries in enumerate(gradients):
        for name, summary in summaries.items():
            if name not in overflows and (summary.inf or summary.nan):
                module = name.rpartition(".")[0]
                overflows[name] = attribution.ParameterOverflow(
                    name, module, rank, microbatch, *summary
                )
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


def _formats_as(formats: ProductFormats | None, strategy: Strategy) -> ExitStack:
    """Set the formats of low-precision matmuls to those of a step; the context restores them."""
    restored, layers = ExitStack(), strategy.low_precision_layers
    if layers is not None and formats is not None:
        restored.callback(layers.set_formats, layers.formats)
        layers.set_formats(formats)
    return restored
