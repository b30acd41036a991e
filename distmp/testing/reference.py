"""Gradients of single microbatches, in float64 and in the dtypes of the run.

Every gradient that a training step can compute from its microbatches is a weighted sum of theirs.
The weights show what the step has done, see `classify`. They are found from gradients in the dtypes
of the run, so that 16-bit arithmetic in forward neither hides a difference nor causes one; the
gradients in float64 show how much of a difference that arithmetic explains.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distmp.distributed.collectives import all_gather, device_of_host_values
from distmp.distributed.failing_together import Ranks
from distmp.errors import ConfigError, require
from distmp.testing.classify import Array, SplitResult
from distmp.testing.gradients import plain_model, plain_name, unwrapped
from distmp.testing.losses import LossSum, loss_and_weight
from distmp.testing.microbatches import Microbatch, microbatches
from distmp.testing.recording import ByName, Forward, ForwardRecord, output_tensors
from distmp.utils.tensor_trees import floating_point_cast, map_tensors

# Elements that several microbatches must have before rounding shows anything, how many show it, and
# how many are searched for those.
_FEWEST, _MOST, _SEARCHED = 16, 1024, 2**16
# Significant bits of bfloat16 and float16.
_BITS = (8, 11)
Cast = Callable[[Tensor], Tensor]
# Least relative error of a gradient that was rounded to 16 bits.
_LEAST = 2e-5


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss sums of the microbatches of all ranks.

    Attributes:
        weights: Weight of each microbatch, of shape (ranks, microbatches).
        factors: What the gradients that training computes are multiplied by.
        stacked: By parameter, FP32, of shape (ranks, microbatches, elements).
        exact: The same, computed in float64; may be empty.
    """

    weights: Array
    factors: Array
    stacked: Mapping[str, Tensor]
    exact: Mapping[str, Tensor] = field(default_factory=dict)

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
        for name, wanted in self.mean().items():
            gradient, parts = measured.get(name), self.stacked[name].flatten(0, 1)
            flat, added = (_flat(each.get(name), wanted) for each in (measured, term))
            if not flat.isfinite().all():
                split.not_finite.add(name)
                continue
            split.missing.update([name] if wanted.any() and not flat.any() else [])
            split.unused.update([name] if gradient is None and not wanted.any() else [])
            shards = _shard_factors(flat, wanted, len(self.weights))
            split.shard_factors = split.shard_factors or shards
            split.products[name] = _products([*parts, added, flat])
            ideal = wanted
            if name in self.exact:
                ideal = self.exact[name].double().sum((0, 1))
                split.noise[name] = _noise(self.stacked[name] - self.exact[name], ideal)
            # 16 bits cause larger differences; the search for them takes time.
            differs = (flat - wanted).norm() > _LEAST * wanted.norm()
            if differs and _is_rounded(flat, parts, ideal, self.weights, self.factors):
                split.rounded.add(name)
        return split


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.flatten().to(like)


def _products(vectors: Sequence[Tensor]) -> Array:
    """Return the inner products of rows in float64, part by part, which stay in the cache."""
    parts = zip(*(vector.split(_SEARCHED) for vector in vectors), strict=True)
    chunks = (torch.stack(part).double() for part in parts)
    return sum((chunk @ chunk.T for chunk in chunks), torch.zeros(())).numpy()


def _autocast(model: nn.Module, forward: Forward, *, exact: bool) -> torch.autocast:
    device = next(model.parameters()).device.type
    dtype = None if exact else forward.autocast
    return torch.autocast(device, dtype, dtype is not None, False)


def _restore(states: Sequence[Tensor]) -> None:
    setters = torch.set_rng_state, torch.cuda.set_rng_state
    for state, setter in zip(states, setters, strict=False):
        setter(state)


class Reference:
    """Computes gradients of single microbatches.

    Args:
        model: The model.
        loss_sum: Returns loss sum and weight of a microbatch. By default, losses as recorded.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum | None) -> None:
        self._model = unwrapped(model)
        self._loss_sum: Any = loss_sum

    def replay(self, record: ForwardRecord, *, exact: bool = False) -> Gradients:
        """Return the gradients of the microbatches of all ranks; every rank has to call it.

        Args:
            record: What the forwards of this rank used. Gradients are computed in the same dtypes.
            exact: Whether they are computed in float64, too, which shows their rounding errors.
        """
        numbers, stacked = self._gathered(record, exact=False)
        in_float64 = self._gathered(record, exact=True)[1] if exact else {}
        return Gradients(numbers[:, 0], numbers[:, 1], stacked, in_float64)

    def _gathered(self, record: ForwardRecord, *, exact: bool) -> tuple[Array, dict[str, Tensor]]:
        ranks = Ranks(None)
        all_or_none = functools.partial(ranks.all_or_none, catch=Exception)
        parts: Sequence[Forward | Microbatch] = record.forwards
        if self._loss_sum is None:
            parts = all_or_none(lambda: microbatches(record))
        most = max(ranks.gather(len(parts)))
        own, stacked = all_or_none(lambda: self._own(record, parts, most, exact=exact))
        shapes = [(name, each.shape) for name, each in stacked.items()]
        by_rank = ranks.gather((own, shapes))
        problem = "have other names or shapes on other ranks; audit one model on all ranks"
        same = all(other == by_rank[0][1] for _, other in by_rank)
        require(same, "trained parameters", len(shapes), problem)
        numbers = np.stack([each for each, _ in by_rank])
        return numbers, {name: _of_all_ranks(each) for name, each in stacked.items()}

    def _own(
        self,
        record: ForwardRecord,
        parts: Sequence[Forward | Microbatch],
        most: int,
        *,
        exact: bool,
    ) -> tuple[Array, dict[str, Tensor]]:
        """Return weights and factors, and FP32 gradients of loss sums of own microbatches.

        Args:
            record: What its forwards used.
            parts: What each microbatch used.
            most: Number of microbatches of the rank with most; others get empty ones.
            exact: Whether it is computed in float64.
        """
        tensors, cast = self._tensors(record, torch.float64 if exact else record.compute)
        trained = {plain_name(n): t for n, t in tensors.items() if t.requires_grad}
        numbers = np.zeros((2, most))
        stacked = {name: torch.zeros(most, t.numel()) for name, t in trained.items()}
        plain = plain_model(self._model, tensors, record.training)
        with torch.random.fork_rng(), torch.enable_grad(), plain:
            for index, part in enumerate(parts):
                if isinstance(part, Microbatch):
                    weight, factor = part.weight, self._backward(part, cast, exact=exact)
                else:
                    weight = factor = self._backward_of_sum(part, cast, exact=exact)
                numbers[:, index] = weight, factor
                for name, tensor in trained.items():
                    if tensor.grad is not None:
                        found = tensor.grad.to_dense().float().flatten().cpu()
                        torch.mul(found, factor, out=stacked[name][index])
                        tensor.grad = None
        if numbers.any() and not any(each.any() for each in stacked.values()):
            problem = "does not depend on the parameters of the model it is called with"
            raise ConfigError("loss_sum", type(self._loss_sum).__name__, problem)
        return numbers, stacked

    def _backward_of_sum(self, forward: Forward, cast: Cast, *, exact: bool) -> float:
        """Compute the gradients of a mean; return its weight."""
        _restore(forward.generators)
        with _autocast(self._model, forward, exact=exact):
            batch = map_tensors(cast, forward.batch)
            total, weight = loss_and_weight(self._loss_sum, self._model, batch)
        if weight:
            # Of the mean, as most training code: 16-bit backward rounds it in the same way.
            (total / weight).backward()
        return weight

    def _backward(self, microbatch: Microbatch, cast: Cast, *, exact: bool) -> float:
        """Compute the gradients that training has; return what makes them those of the sum."""
        for forward in microbatch.forwards if microbatch.weight else ():
            _restore(forward.generators)
            args, kwargs = map_tensors(cast, [forward.args, forward.kwargs])
            with _autocast(self._model, forward, exact=exact):
                output = self._model(*args, **kwargs)
            outputs = output_tensors(output)
            used = {index: outputs[index] for index in forward.gradients}
            found = [forward.gradients[i].to(tensor) for i, tensor in used.items()]
            torch.autograd.backward([*used.values()], found)
        return 1 / (microbatch.scale or 1.0)

    def _tensors(
        self, record: ForwardRecord, compute: torch.dtype | None
    ) -> tuple[dict[str, Tensor], Cast]:
        """Return parameters and buffers in a dtype, and a function for inputs."""
        trained = {name: p.requires_grad for name, p in self._model.named_parameters()}
        names = {**dict.fromkeys(dict(self._model.named_buffers()), False), **trained}
        held = {name: record.state[plain_name(name)] for name in names}
        device = next(iter(held.values())).device
        dtypes = {tensor.dtype for name, tensor in held.items() if name in trained}
        # FSDP casts parameters and inputs.
        other = compute if compute not in dtypes else None
        cast = (lambda t: t) if other is None else floating_point_cast(other)
        copies = {n: cast(t).clone().requires_grad_(names[n]) for n, t in held.items()}
        # `loss_sum` may change its inputs in place.
        return copies, lambda tensor: cast(tensor.to(device, copy=True))


def _of_all_ranks(tensor: Tensor) -> Tensor:
    """Return the matrices of all ranks, which have the same shape, stacked on the CPU."""
    ranks = Ranks(None)
    if not ranks.distributed:
        return tensor[None]
    own = tensor.to(device_of_host_values(None))
    found = own.new_empty(ranks.world_size * len(own), own.shape[1])
    all_gather(found, own, None).wait()
    return found.view(ranks.world_size, *own.shape).cpu()


def _noise(errors: Tensor, total: Tensor) -> float:
    """Return the relative error that another run of the same arithmetic may have.

    Args:
        errors: Those of single microbatches, which are independent. A few of them, as of a bias,
            show their size only roughly.
        total: The sum of the gradients.
    """
    share = float(errors.double().norm() / total.norm()) if total.any() else 0.0
    return share * (1 + 8 / errors.numel() ** 0.5)


def _is_rounded(
    gradient: Tensor, terms: Tensor, ideal: Tensor, weights: Array, factors: Array
) -> bool:
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
    # As training adds them. What is short already has a short sum.
    added = terms[:, several] / torch.tensor(factors.ravel()).clamp(min=1e-30)[:, None]
    single = max(_share(added.flatten(), bits) for bits in _BITS)
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
