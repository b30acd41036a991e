"""Gradients of single microbatches, in float64 and in the dtypes of the run.

Every gradient that a training step can compute from its microbatches is a weighted sum of theirs.
The weights show what the step has done, see `classify`. They are found from gradients in the dtypes
of the run, so that 16-bit arithmetic in forward neither hides a difference nor causes one; the
gradients in float64 show how much of a difference that arithmetic explains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distmp.distributed.ranks import Ranks
from distmp.errors import ConfigError
from distmp.testing.classify import Projection, SplitResult
from distmp.testing.gradients import full_state, named_parameters, plain_copy, plain_name, unwrapped
from distmp.testing.samples import LossSum, loss_and_weight
from distmp.utils.tensor_trees import floating_point_cast, map_tensors

# Elements that several microbatches must have before rounding shows anything, and how many show it.
_FEWEST, _MOST = 16, 4096
# Significant bits of bfloat16 and float16.
_BITS = (8, 11)


@dataclass
class ForwardRecord:
    """What the forwards of a training step used on this rank.

    Attributes:
        generators: State of the random generators before each forward.
        autocast: Dtype of autocast; None without autocast.
        compute: Dtype of the first parameter that a module used.
    """

    generators: list[list[Tensor]] = field(default_factory=list)
    autocast: torch.dtype | None = None
    compute: torch.dtype | None = None

    @property
    def in_16_bits(self) -> bool:
        """Whether forwards computed in 16 bits, with errors that differ from step to step."""
        return bool({self.autocast, self.compute} & {torch.bfloat16, torch.float16})


@contextlib.contextmanager
def recorded_forwards(
    model: nn.Module, started: Callable[[Any, Any], None] = lambda args, kwargs: None
) -> Iterator[ForwardRecord]:
    """Record the forwards of a model; its hooks are removed at the end.

    Args:
        model: The model.
        started: Called with the arguments of each forward, before FSDP gathers parameters.
    """
    record = ForwardRecord()
    model = unwrapped(model)

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            started(args, kwargs)
            record.generators.append(_generators())

    def leaf(module: nn.Module, _: Any) -> None:
        weight = next((p for p in module._parameters.values() if p is not None), None)
        if weight is None or not weight.is_floating_point():
            return
        if torch.is_autocast_enabled(weight.device.type):
            record.autocast = torch.get_autocast_dtype(weight.device.type)
        record.compute = record.compute or weight.dtype

    handles = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
    handles += [m.register_forward_pre_hook(leaf) for m in model.modules() if m._parameters]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> list[Tensor]:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _restore(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss sums of microbatches.

    Attributes:
        weights: Weight of each microbatch.
        stacked: By parameter, float64, of shape (microbatches, elements).
        ideal: Sums of those that were computed in float64, in that dtype.
        noise: Norms of the errors that the same sums may have, relative to those.
    """

    weights: list[float]
    stacked: dict[str, Tensor]
    ideal: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    def summed(self, factors: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """Return sums of gradients with factors of shape (sums, microbatches)."""
        return {name: torch.from_numpy(factors).to(g) @ g for name, g in self.stacked.items()}


class Reference:
    """Copies of a model that compute gradients of single microbatches.

    Attributes:
        state: Full parameters and buffers that gradients are computed with.

    Args:
        model: The model; every rank has to build a reference at the same time.
        loss_sum: Returns loss sum and weight of a microbatch.
        plain: Model with the same names of parameters, if `model` cannot be copied.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum, plain: nn.Module | None = None) -> None:
        self._loss_sum = loss_sum
        self._own = plain_copy(model if plain is None else plain)
        self._exact = plain_copy(self._own).double()
        self.load(model)

    def load(self, model: nn.Module) -> None:
        """Take the weights and buffers of the model; every rank has to call it."""
        self.state = full_state(model)
        missing = named_parameters(self._own).keys() ^ named_parameters(model).keys()
        if missing:
            problem = "is not a parameter of both the model and its reference"
            raise ConfigError("reference", min(missing), problem)

    def set_modes(self, model: nn.Module) -> None:
        """Set training or evaluation mode as in the model."""
        training = {plain_name(name): m.training for name, m in unwrapped(model).named_modules()}
        for copied in (self._own, self._exact):
            for name, part in copied.named_modules():
                part.training = training.get(plain_name(name), part.training)

    def replay(
        self, batches: Sequence[Any], record: ForwardRecord, *, exact: int | None = None
    ) -> Gradients:
        """Return the gradients of the microbatches of all ranks, those of rank 0 first.

        Every rank has to call it. There are as many microbatches per rank as on the one with most.

        Args:
            batches: Microbatches of this rank.
            record: What their forwards used. Gradients are computed in the same dtypes.
            exact: How many of each rank are computed in float64, too; None: all. With 0, the errors
                of the last call count.
        """
        self._record, ranks = record, Ranks(None)
        # With another number of forwards, it is unknown which belongs to which microbatch.
        known = len(record.generators) == len(batches)
        states = record.generators if known else [None] * len(batches)
        padding = [None] * (max(ranks.gather(len(batches))) - len(batches))
        inputs = [*batches, *padding], [*states, *padding]
        mine = ranks.all_or_none(lambda: self.own(*inputs), catch=Exception)
        every = ranks.gather((mine.weights, mine.stacked))
        stacked = {name: torch.cat([each[name] for _, each in every]) for name in mine.stacked}
        if exact != 0:
            first = [each[:exact] for each in inputs]
            found = ranks.all_or_none(lambda: self._in_float64(*first), catch=Exception)
            sums = ranks.gather({name: each.sum(0) for name, each in found.stacked.items()})
            self._ideal = {n: torch.stack([each[n] for each in sums]).sum(0) for n in stacked}
            errors = {n: mine.stacked[n][: len(e)] - e for n, e in found.stacked.items()}
            squares = ranks.gather({n: float(each.square().sum()) for n, each in errors.items()})
            values = {n: each.numel() * ranks.world_size for n, each in errors.items()}
            self._noise = {
                n: _noise(sum(each[n] for each in squares), values[n], float(ideal.norm()))
                for n, ideal in self._ideal.items()
            }
        weights = [weight for each, _ in every for weight in each]
        return Gradients(weights, stacked, self._ideal, self._noise)

    def _in_float64(self, batches: Sequence[Any], generators: Sequence[Any]) -> Gradients:
        self._fill(self._exact)
        return self._of(self._exact, [_cast(each, torch.float64) for each in batches], generators)

    def own(self, batches: Sequence[Any], generators: Sequence[Any]) -> Gradients:
        """Return the gradients in the dtypes of the last record, as float64 tensors."""
        model, dtype, autocast = self._own, self._record.compute, self._record.autocast
        held = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if dtype is not None and dtype not in held:  # FSDP casts parameters
            model = plain_copy(model).to(dtype)
            batches = [_cast(each, dtype) for each in batches]
        self._fill(model)
        device = next(model.parameters()).device.type
        with torch.autocast(device, autocast, autocast is not None, cache_enabled=False):
            return self._of(model, batches, generators)

    def _fill(self, model: nn.Module) -> None:
        held = {**named_parameters(model), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, tensor in held.items():
                if name in self.state:
                    tensor.copy_(self.state[name])

    def _of(self, model: nn.Module, batches: Sequence[Any], generators: Sequence[Any]) -> Gradients:
        parameters = {n: p for n, p in named_parameters(model).items() if p.requires_grad}
        stacked: dict[str, list[Tensor]] = {name: [] for name in parameters}
        weights, device = [], next(model.parameters()).device
        with torch.random.fork_rng(), torch.enable_grad():
            for batch, states in zip(batches, generators, strict=True):
                if states is not None:
                    _restore(states)
                weights.append(self._backward(model, map_tensors(lambda t: t.to(device), batch)))
                for name, p in parameters.items():
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                    stacked[name].append(gradient.double().flatten().cpu() * weights[-1])
        model.zero_grad()
        if any(weights) and not any(each.any() for found in stacked.values() for each in found):
            problem = "does not depend on the parameters of the model it is called with"
            raise ConfigError("loss_sum", type(self._loss_sum).__name__, problem)
        return Gradients(weights, {name: torch.stack(each) for name, each in stacked.items()})

    def _backward(self, model: nn.Module, batch: Any) -> float:
        model.zero_grad()
        if batch is None:  # a rank with fewer microbatches than another
            return 0.0
        total, weight = loss_and_weight(self._loss_sum, model, batch)
        if weight:
            # Of the mean, as most training code: 16-bit backward rounds it in the same way.
            (total / weight).backward()
        return weight


def _noise(square: float, values: int, norm: float) -> float:
    """Return the relative error that another run of the same arithmetic may have.

    Args:
        square: Sum of the squared errors of single microbatches, which are independent.
        values: Number of the errors. A few of them, as of a bias, show their size only roughly.
        norm: Norm of the sum of the gradients.
    """
    return square**0.5 * (1 + 8 / values**0.5) / norm if norm else 0.0


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(floating_point_cast(dtype), batch)


def measured(
    split: SplitResult,
    gradients: Mapping[str, Tensor | None],
    own: Gradients,
    sample_means: Mapping[str, Tensor],
) -> SplitResult:
    """Add what was measured to the result of a division.

    Args:
        split: The result, without measurements.
        gradients: The measured gradients of trained parameters, float64.
        own: Gradients of microbatches.
        sample_means: Sums of the mean gradients of each microbatch's samples; may be empty.
    """
    total = split.weights.sum() or 1.0
    for name, gradient in gradients.items():
        parts, ideal = own.stacked[name], own.ideal[name] / total
        wanted = parts.sum(0) / total
        if gradient is not None and not gradient.isfinite().all():
            split.not_finite.add(name)
        else:
            flat = torch.zeros_like(wanted) if gradient is None else gradient.flatten().to(wanted)
            split.missing.update([name] if wanted.any() and not flat.any() else [])
            terms = torch.cat([parts, sample_means.get(name, parts[:0])])
            inner, gram = (terms @ flat).numpy(), (terms @ terms.T).numpy()
            rounded = _is_rounded(flat, parts, ideal, split)
            square = float(flat @ flat)
            split.parameters[name] = Projection(square, inner, gram, own.noise[name], rounded)
            shards = _shard_factors(flat, wanted, len(split.weights)) if wanted.any() else ()
            split.shard_factors = split.shard_factors or shards
    return split


def _is_rounded(gradient: Tensor, terms: Tensor, ideal: Tensor, split: SplitResult) -> bool:
    """Return whether a sum of several microbatches has the few significant bits of a 16-bit dtype.

    The sum may have been multiplied by a number of ranks, microbatches or tokens afterwards.
    """
    several = ((terms != 0).sum(0) > 1).nonzero()[:_MOST, 0]
    if len(several) < _FEWEST:
        return False
    ranks, count = split.weights.shape
    scales = {1.0, ranks, count, ranks * count, split.weights.sum(), split.weights.sum() / ranks}
    # As they are added: of the means of microbatches.
    means = terms[:, several] / torch.tensor(split.weights.ravel()).clamp(min=1e-30)[:, None]
    single = max(_share(means.flatten(), bits) for bits in _BITS)
    return any(
        _share(gradient[several] * scale, bits) > 0.99
        for bits in _BITS
        for scale in scales
        # What is short already has a short sum.
        if bits == _BITS[0] or single < 0.5
    ) and all(_share(ideal[several] * scale, _BITS[1]) < 0.5 for scale in scales)


def _share(values: Tensor, bits: int) -> float:
    """Return the share of nonzero values with at most so many significant bits, up to FP32's."""
    values = values[values != 0]
    mantissa = torch.frexp(values).mantissa * 2.0**bits
    short = (mantissa - mantissa.round()).abs() <= 2.0 ** (bits - 22)
    return float(short.double().mean()) if len(values) else 0.0


def _shard_factors(gradient: Tensor, wanted: Tensor, ranks: int) -> tuple[float, ...]:
    """Return the factors between parts of a gradient and the wanted one, if there are several."""
    step = 1 + len(wanted) // _MOST
    gradient, wanted = gradient[::step], wanted[::step]
    shown = wanted.abs() > 0.05 * wanted.abs().max()
    ratios = (gradient[shown] / wanted[shown]).sort().values
    apart = ratios.diff() > 5e-4 * ratios.abs().max()
    factors = [*ratios[:1].tolist(), *ratios[1:][apart].tolist()]
    return tuple(factors) if 1 < len(factors) <= ranks and factors[-1] < 1 + 1e-3 else ()
