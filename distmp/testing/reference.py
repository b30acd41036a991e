"""Gradients of single microbatches, in float64 and in the dtypes of the run.

Every gradient that a training step can compute from its microbatches is a weighted sum of theirs.
The weights show what the step has done, see `classify`. They are found from gradients in the dtypes
of the run, so that 16-bit arithmetic in forward neither hides a difference nor causes one; the
gradients in float64 show how much of a difference that arithmetic explains.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distmp.distributed.ranks import Ranks
from distmp.errors import ConfigError, listed, require
from distmp.testing.classify import Array, Projection, SplitResult
from distmp.testing.gradients import is_fsdp1, plain_model, plain_name, unwrapped
from distmp.testing.samples import LossSum, loss_and_weight
from distmp.utils.tensor_trees import floating_point_cast, map_tensors

# Elements that several microbatches must have before rounding shows anything, how many show it, and
# how many are searched for those.
_FEWEST, _MOST, _SEARCHED = 16, 1024, 2**16
# Significant bits of bfloat16 and float16.
_BITS = (8, 11)
# Gradients by name of parameter.
ByName = Mapping[str, Tensor | None]


@dataclass
class Forward:
    """A forward of the model on this rank.

    Attributes:
        batch: The arguments: keywords, or a tuple, or the only one.
        generators: State of the random generators before it; may be empty.
        is_used: Whether its output got a gradient.
    """

    batch: Any = None
    generators: Sequence[Tensor] = ()
    is_used: bool = False


@dataclass
class ForwardRecord:
    """What the forwards of a training step used on this rank.

    Attributes:
        forwards: The forwards.
        state: Full parameters and buffers before the first one.
        training: Whether modules were in training mode, by name.
        autocast: Dtype of autocast; None without autocast.
        compute: Dtype of the first parameter that a module used.
    """

    forwards: list[Forward] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    compute: torch.dtype | None = None


@contextlib.contextmanager
def recorded_forwards(model: nn.Module, current: Callable[[], ForwardRecord]) -> Iterator[None]:
    """Record the forwards of a model; its hooks are removed at the end.

    Args:
        model: The model.
        current: Returns the record, before each forward, and before FSDP gathers parameters.
    """
    model = unwrapped(model)
    device = next(model.parameters()).device.type

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            record = current()
            batch = kwargs if not args else args if len(args) > 1 or kwargs else args[0]
            copied = map_tensors(lambda t: t.detach().to("cpu", copy=True), batch)
            record.forwards.append(Forward(copied, _generators()))
            record.training = {plain_name(n): part.training for n, part in model.named_modules()}
            if torch.is_autocast_enabled(device):
                record.autocast = torch.get_autocast_dtype(device)

    def leaf(module: nn.Module, _: Any) -> None:
        dtypes = [p.dtype for p in module._parameters.values() if p is not None]
        if torch.is_grad_enabled() and dtypes and dtypes[0].is_floating_point:
            current().compute = current().compute or dtypes[0]

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            forward, tensors = current().forwards[-1], list[Tensor]()
            map_tensors(tensors.append, [output, getattr(output, "__dict__", None)])
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            forward.is_used = not trained  # an output of another class is unknown
            for tensor in trained:
                tensor.register_hook(lambda _: setattr(forward, "is_used", True))

    handles = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
    handles += [m.register_forward_pre_hook(leaf) for m in model.modules() if m._parameters]
    handles += [model.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> list[Tensor]:
    on_gpu = torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _restore(states: Sequence[Tensor]) -> None:
    setters = torch.set_rng_state, torch.cuda.set_rng_state
    for state, setter in zip(states, setters, strict=False):
        setter(state)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss sums of the microbatches of all ranks.

    Attributes:
        weights: Weight of each microbatch, of shape (ranks, microbatches).
        stacked: By parameter, FP32, of shape (ranks, microbatches, elements).
        ideal: Their sums in float64; may be empty.
        noise: Norms of the errors that the sums may have, relative to those; may be empty.
    """

    weights: Array
    stacked: dict[str, Tensor]
    ideal: dict[str, Tensor] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    def mean(self) -> dict[str, Tensor]:
        """Return the gradients of the mean."""
        total = self.weights.sum() or 1.0
        return {name: each.sum((0, 1)) / total for name, each in self.stacked.items()}

    def compared(
        self, name: str, max_norm: float | None, measured: ByName, extra: str, term: ByName
    ) -> SplitResult:
        """Compare measured gradients with those of microbatches.

        Args:
            name: As of `SplitResult`.
            max_norm: As of `SplitResult`.
            measured: The measured gradients of trained parameters.
            extra: As of `SplitResult`.
            term: The gradients that `extra` says, if there are any.
        """
        split = SplitResult(name, Ranks(None).rank, self.weights, max_norm, extra)
        has_term = any(each is not None for each in term.values())
        for name, wanted in self.mean().items():
            gradient, other = (each.get(name) for each in (measured, term))
            if gradient is not None and not gradient.isfinite().all():
                split.not_finite.add(name)
                continue
            zeros, parts = torch.zeros_like(wanted), self.stacked[name].flatten(0, 1)
            flat = zeros if gradient is None else gradient.flatten().to(zeros)
            split.missing.update([name] if wanted.any() and not flat.any() else [])
            split.unused.update([name] if gradient is None and not wanted.any() else [])
            shards = _shard_factors(flat, wanted, len(self.weights))
            split.shard_factors = split.shard_factors or shards
            if _is_rounded(flat, parts, self.ideal.get(name, wanted), self.weights):
                split.rounded.add(name)
            added = zeros if other is None else other.flatten().to(zeros)
            every = [*parts, *([added] if has_term else []), flat]
            split.parameters[name] = Projection(_products(every), self.noise.get(name, 0.0))
        return split


def _products(vectors: Sequence[Tensor]) -> Array:
    """Return the inner products of rows in float64, part by part, which stay in the cache."""
    chunks = torch.stack([*vectors]).split(_SEARCHED, 1)
    return torch.stack([c.double() @ c.double().T for c in chunks]).sum(0).numpy()


class Reference:
    """Computes gradients of single microbatches.

    Args:
        model: The model, or one with the same names of parameters that is not sharded by FSDP1.
        loss_sum: Returns loss sum and weight of a microbatch.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum) -> None:
        problem = "cannot be computed with while it is sharded; pass a plain model as reference=..."
        require(not is_fsdp1(model), "model", type(model).__name__, problem)
        self._model = unwrapped(model)
        self._loss_sum = loss_sum

    def replay(self, record: ForwardRecord, *, exact: bool = False) -> Gradients:
        """Return the gradients of the microbatches of all ranks; every rank has to call it.

        Args:
            record: What the forwards of this rank used. Gradients are computed in the same dtypes.
            exact: Whether they are computed in float64, too, which shows their rounding errors.
        """
        weights, stacked = self._gathered(record)
        if not exact:
            return Gradients(weights, stacked)
        _, found = self._gathered(replace(record, compute=torch.float64, autocast=None))
        ideal = {name: each.double().sum((0, 1)) for name, each in found.items()}
        noise = {name: _noise(stacked[name] - found[name], ideal[name]) for name in found}
        return Gradients(weights, stacked, ideal, noise)

    def _gathered(self, record: ForwardRecord) -> tuple[Array, dict[str, Tensor]]:
        ranks = Ranks(None)
        # Ranks with fewer microbatches than others get empty ones.
        missing = max(ranks.gather(len(record.forwards))) - len(record.forwards)
        padded = replace(record, forwards=[*record.forwards, *[Forward()] * missing])
        mine = ranks.all_or_none(lambda: self.own(padded), catch=Exception)
        weights, stacked = zip(*ranks.gather(mine), strict=True)
        return np.stack(weights), {n: torch.stack([each[n] for each in stacked]) for n in mine[1]}

    def own(self, record: ForwardRecord) -> tuple[Array, dict[str, Tensor]]:
        """Return weights and FP32 gradients of the loss sums of microbatches of this rank."""
        tensors, cast = self._tensors(record)
        trained = {plain_name(n): t for n, t in tensors.items() if t.requires_grad}
        weights, stacked = [], {name: list[Tensor]() for name in trained}
        device = next(iter(tensors.values())).device.type
        autocast = torch.autocast(device, record.autocast, record.autocast is not None, False)
        plain = plain_model(self._model, tensors, record.training)
        with torch.random.fork_rng(), torch.enable_grad(), autocast, plain:
            for forward in record.forwards:
                _restore(forward.generators)
                weight = 0.0
                if forward.batch is not None:  # a rank with fewer microbatches than another
                    batch = map_tensors(cast, forward.batch)
                    total, weight = loss_and_weight(self._loss_sum, self._model, batch)
                if weight:
                    # Of the mean, as most training code: 16-bit backward rounds it in the same way.
                    (total / weight).backward()
                weights.append(weight)
                for name, tensor in trained.items():
                    found = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                    stacked[name].append(found.to_dense().float().flatten().cpu() * weight)
                    tensor.grad = None
        if any(weights) and not any(each.any() for found in stacked.values() for each in found):
            problem = "does not depend on the parameters of the model it is called with"
            raise ConfigError("loss_sum", type(self._loss_sum).__name__, problem)
        return np.array(weights), {name: torch.stack(each) for name, each in stacked.items()}

    def _tensors(
        self, record: ForwardRecord
    ) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]:
        """Return parameters and buffers in the dtype of a record, and a cast of inputs."""
        trained = {name: p.requires_grad for name, p in self._model.named_parameters()}
        names = {**dict.fromkeys(dict(self._model.named_buffers()), False), **trained}
        absent = [name for name in names if plain_name(name) not in record.state]
        require(
            not absent, "reference", listed(absent), "has parameters that the model does not have"
        )
        held = {name: record.state[plain_name(name)] for name in names}
        device = next(iter(held.values())).device
        dtypes = {tensor.dtype for name, tensor in held.items() if name in trained}
        # FSDP casts parameters and inputs.
        other = record.compute if record.compute not in dtypes else None
        cast = (lambda t: t) if other is None else floating_point_cast(other)
        copies = {n: cast(t).clone().requires_grad_(names[n]) for n, t in held.items()}
        return copies, lambda tensor: cast(tensor.to(device))


def _noise(errors: Tensor, total: Tensor) -> float:
    """Return the relative error that another run of the same arithmetic may have.

    Args:
        errors: Those of single microbatches, which are independent. A few of them, as of a bias,
            show their size only roughly.
        total: The sum of the gradients.
    """
    share = float(errors.double().norm() / total.norm()) if total.any() else 0.0
    return share * (1 + 8 / errors.numel() ** 0.5)


def _is_rounded(gradient: Tensor, terms: Tensor, ideal: Tensor, weights: Array) -> bool:
    """Return whether a sum of several microbatches has the few significant bits of a 16-bit dtype.

    The sum may have been multiplied by a number of ranks, microbatches or tokens afterwards.
    """
    step = 1 + len(gradient) // _SEARCHED
    gradient, terms, ideal = gradient[::step], terms[:, ::step], ideal[::step]
    several = ((terms != 0).sum(0) > 1).nonzero()[:_MOST, 0]
    if len(several) < _FEWEST:
        return False
    ranks, count = weights.shape
    scales = {1.0, ranks, count, ranks * count, weights.sum(), weights.sum() / ranks}
    # As they are added: of the means of microbatches. What is short already has a short sum.
    means = terms[:, several] / torch.tensor(weights.ravel()).clamp(min=1e-30)[:, None]
    single = max(_share(means.flatten(), bits) for bits in _BITS)
    possible = [bits for bits in _BITS if bits == _BITS[0] or single < 0.5]
    pairs = itertools.product(scales, possible)
    return any(_share(gradient[several] * scale, bits) > 0.99 for scale, bits in pairs) and all(
        _share(ideal[several] * scale, _BITS[1]) < 0.5 for scale in scales
    )


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
    apart = ratios.diff() > 5e-4 * ratios[1:].abs()
    factors = [*ratios[:1].tolist(), *ratios[1:][apart].tolist()]
    return tuple(factors) if 1 < len(factors) <= ranks and factors[-1] < 1 + 1e-3 else ()
