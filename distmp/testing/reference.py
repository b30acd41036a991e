"""Gradients of single microbatches, in float64 and in the dtypes of the run.

Every gradient that a training step can compute from its microbatches is a weighted sum of theirs.
The weights show what the step has done, see `classify`. They are found from gradients in the dtypes
of the run, so that 16-bit arithmetic in forward neither hides a difference nor causes one; the
gradients in float64 show how much of a difference that arithmetic explains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from distmp.distributed.failing_together import Ranks
from distmp.errors import require
from distmp.testing.classify import Array, GradientMismatch, SplitResult, mismatch
from distmp.testing.gradients import plain_model, unwrapped
from distmp.testing.recording import PASS, Draws, Forward, Step, replaced_outputs
from distmp.utils.generators import generators_kept
from distmp.utils.tensor_trees import floating_point_cast, map_tensors, parameter_name

# Returns the sum of the losses of a microbatch, and its weight: its tokens or samples.
LossSum = Callable[[nn.Module, Any], tuple[Tensor, Any]]
Cast = Callable[[Tensor], Tensor]
# Rows that fit into the cache, and elements that show the factors of shards.
_CHUNK, _SHOWN = 2**16, 1024
# Error of the dtypes of the run, relative to the whole gradient, that is more than rounding, unless
# gradients of microbatches cancel. The tolerance, twice the error, would hide wrong gradients.
_LARGE = 0.1
_REPEATED = (
    "has another output when it is repeated; draw random numbers only from default generators, and "
    "change no attribute that it depends on"
)
# Reductions of more than 16 elements.
_IN_16_BITS = re.compile(r".*reduce.*float16, (?!\d bytes|[12]\d bytes|3[0-2] bytes)")


class Reference:
    """Computes gradients of single microbatches; every rank has to call its methods.

    Args:
        model: The model.
        loss_sum: Returns loss sum and weight of a microbatch. By default, losses as recorded.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum | None) -> None:
        self._model = unwrapped(model)
        self._loss_sum: Any = loss_sum
        self._device = next(self._model.parameters()).device
        self._draws = Draws()

    def compared(self, name: str, step: Step, extra: str, *, exact: bool) -> SplitResult:
        """Compare what a step has measured with the gradients of its microbatches.

        Args:
            name: As of `SplitResult`.
            step: What its forwards used. Gradients are computed in the same dtypes.
            extra: As of `SplitResult`.
            exact: Whether they are computed in float64, too, which shows their rounding errors.
        """
        numbers, stacked = self._of_all_ranks(step)
        ideal = self._of_all_ranks(replace(step, compute=torch.float64))[1] if exact else {}
        weights, others = numbers.unbind(-1)
        split = SplitResult(name, Ranks(None).rank, weights.numpy(), step.max_norm, extra)
        split.norm = step.norm
        split.is_sum = all(loss.is_sum for each in step.forwards for loss in each.losses)
        split.others = {*stacked} - step.gradients.keys()
        split.reduction = next(filter(_IN_16_BITS.match, step.collectives), "")
        ratios = others[weights > 0]
        # Only a sharded model reduces so; parts of other gradients are not clipped apart.
        shards = len(weights) if any("scatter" in each for each in step.collectives) else 1
        split.is_unlike = not bool(ratios.isclose(ratios[:1], rtol=0.01).all())
        for name, each in stacked.items():
            wanted, measured = _mean(each, weights), step.gradients.get(name)
            flat, added = (_flat(g, wanted) for g in (measured, step.former.get(name)))
            if measured is not None and measured.itemsize == 2:
                split.in_16_bits.add(name)
            split.products[name] = _products([*each.flatten(0, 1), added, flat])
            split.shard_factors = split.shard_factors or _shard_factors(flat, wanted, shards)
            if name in ideal:
                split.noise[name] = _noise(each - ideal[name], ideal[name].double().sum((0, 1)))
        norms = {name: float(each.double().sum((0, 1)).norm()) for name, each in ideal.items()}
        errors = [norm * split.noise[name] for name, norm in norms.items()]
        noise = math.hypot(*errors) / (math.hypot(*norms.values()) or 1.0)
        problem = (
            "is too large to check them; draw random numbers only from default generators, without "
            "dropout in fused kernels, and use microbatches whose gradients do not cancel"
        )
        valid = noise <= _LARGE or not math.isfinite(noise)
        require(valid, "error of the gradients against float64", f"{noise:.0%}", problem)
        return split

    def mean(self, step: Step) -> dict[str, Tensor]:
        """Return the gradients of the mean over all microbatches of a step."""
        numbers, stacked = self._of_all_ranks(step)
        return {name: _mean(each, numbers[..., 0]) for name, each in stacked.items()}

    def _of_all_ranks(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Return numbers and gradients of the microbatches of all ranks, as `_own` does.

        Ranks with fewer microbatches get empty ones.
        """
        ranks = Ranks(None)
        numbers, own = ranks.all_or_none(lambda: self._own(step), catch=Exception)
        sizes = ranks.gather({name: each.shape[1] for name, each in own.items()})
        problem = "have other names or shapes on other ranks; audit one model on all ranks"
        require(all(each == sizes[0] for each in sizes), "trained parameters", len(own), problem)
        stacked = {n: pad_sequence(ranks.gather(each), True) for n, each in own.items()}
        return pad_sequence(ranks.gather(numbers), True), stacked

    def _own(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weight and other losses, and FP32 gradients of loss sums of own microbatches."""
        problem = "it was not called; pass the part of the model that is, such as model.net"
        require(bool(step.state), "forward of the audited model", None, problem)
        require(bool(step.forwards), "microbatches", 0, "no forward has a backward")
        tensors, cast = self._tensors(step)
        trained = {parameter_name(n): t for n, t in tensors.items() if t.requires_grad}
        problem = "cannot be compared; train it as two real ones, with torch.view_as_complex"
        for name, tensor in trained.items():
            require(not tensor.is_complex(), f"parameter {name!r}", "complex", problem)
        numbers = torch.zeros(len(step.forwards), 2, dtype=torch.float64)
        stacked = {
            name: numbers.new_zeros(len(numbers), tensor.numel(), dtype=torch.float32)
            for name, tensor in trained.items()
        }
        exact = step.compute is torch.float64
        plain = plain_model(self._model, tensors, step.training, casts=not exact)
        draws = self._draws = Draws(self._draws if exact else None)
        with generators_kept(self._device), torch.enable_grad(), plain, draws:
            for index, each in enumerate(step.forwards):
                weight, factor, others = self._backward(each, cast, exact)
                numbers[index] = numbers.new_tensor([weight, others])
                for name, tensor in trained.items():
                    if tensor.grad is not None:
                        stacked[name][index] = tensor.grad.to_dense().float().ravel().cpu() * factor
                        tensor.grad = None
        problem = "does not depend on the parameters of the model it is called with"
        depends = any(each.any() for each in stacked.values()) or not numbers.any()
        require(depends, "loss_sum", type(self._loss_sum).__name__, problem)
        return numbers, stacked

    def _backward(self, forward: Forward, cast: Cast, exact: bool) -> tuple[float, float, float]:
        """Compute the gradients that training has.

        Returns:
            The weight, what makes the gradients those of the loss sum, and the scale of others.
        """
        for part in forward.parts or [forward]:
            for restore in part.generators:
                restore()
            dtype = None if exact else part.autocast
            with torch.autocast(self._device.type, dtype, dtype is not None, False):
                if self._loss_sum is None:
                    weight, scale, others = forward.weight_and_scales()
                    args, kwargs = map_tensors(cast, [part.args, part.kwargs])
                    outputs: list[Tensor] = []
                    replaced_outputs(outputs.append, self._model(*args, **kwargs))
                    for index in () if exact else part.gradients:
                        norm = part.norms[index]
                        again = float(outputs[index].detach().norm())
                        same = math.isclose(again, norm, rel_tol=_LARGE) or not math.isfinite(norm)
                        require(same, "forward", f"norm {again:.3g} after {norm:.3g}", _REPEATED)
                    used = [(outputs[i], g.to(outputs[i])) for i, g in part.gradients.items()]
                else:
                    batch = map_tensors(cast, part.batch)
                    total, weight = loss_and_weight(self._loss_sum, self._model, batch)
                    # Of the mean, as most training code: 16-bit backward rounds it in the same way.
                    scale, others = 1 / (weight or 1.0), 0.0
                    used = [(total, torch.full_like(total, scale))]
            if weight:
                torch.autograd.backward([each for each, _ in used], [each for _, each in used])
        return weight, 1 / (scale or 1.0), others

    def _tensors(self, step: Step) -> tuple[dict[str, Tensor], Cast]:
        """Return parameters and buffers in a dtype, and a function for inputs."""
        parameters = dict(self._model.named_parameters())
        # Buffers that the first forward has registered are not in the state before it.
        now = {**dict(self._model.named_buffers()), **parameters}
        held = {name: step.state.get(parameter_name(name), tensor) for name, tensor in now.items()}
        device = next(iter(held.values())).device
        # FSDP casts parameters and inputs.
        compute = step.compute if step.compute not in {held[n].dtype for n in parameters} else None
        cast = floating_point_cast(compute) if compute else lambda tensor: tensor
        copies = {n: cast(t).clone().requires_grad_(now[n].requires_grad) for n, t in held.items()}

        def moved(tensor: Tensor) -> Tensor:
            target = "cpu" if getattr(tensor, "stays", False) else device
            return cast(tensor.to(target, copy=True))  # `loss_sum` may change it in place

        return copies, moved


def loss_and_weight(loss_sum: LossSum, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Return the loss sum of a microbatch, and its weight.

    Raises:
        ConfigError: If they are not a loss and a number.
    """
    found: Any = loss_sum(model, batch)
    try:
        total, weight = found[0], float(found[1])
        valid = 0 < weight < math.inf or (weight == 0 and not total.any())
    except (TypeError, ValueError, RuntimeError, IndexError):
        valid = False
    problem = f"{PASS}, as a pair; a weight of 0 only with a loss of 0"
    require(valid, "what loss_sum returns", found, problem)
    return total, weight


def different_weights(sums: Mapping[str, object]) -> list[GradientMismatch]:
    """Return which weights differ from those of rank 0; every rank has to call it.

    Args:
        sums: Checksums of the weights before each step, by name.
    """
    first, *_ = Ranks(None).gather(sums)
    differ = [name for name in sums if sums[name] != first[name]]
    return [mismatch("different_weights", differ)] if differ else []


def _mean(stacked: Tensor, weights: Tensor) -> Tensor:
    return stacked.sum((0, 1)) / float(weights.sum() or 1.0)


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.flatten().to(like)


def _products(vectors: Sequence[Tensor]) -> Array:
    """Return the inner products of rows in float64, part by part, which stay in the cache."""
    parts = zip(*(vector.split(_CHUNK) for vector in vectors), strict=True)
    chunks = (torch.stack(part).double() for part in parts)
    return sum((chunk @ chunk.T for chunk in chunks), torch.zeros(())).numpy()


def _noise(errors: Tensor, total: Tensor) -> float:
    """Return the relative error that another run of the same arithmetic may have.

    Args:
        errors: Those of single microbatches, which are independent. A few of them, as of a bias,
            show their size only roughly.
        total: The sum of the gradients.
    """
    share = float(errors.double().norm() / total.norm()) if total.any() else 0.0
    return share * (1 + 8 / errors.numel() ** 0.5)


def _shard_factors(gradient: Tensor, wanted: Tensor, shards: int) -> tuple[float, ...]:
    """Return the factors between parts of a gradient and the wanted one, if there are several."""
    gradient, wanted = (each[:: 1 + len(each) // _SHOWN] for each in (gradient, wanted))
    shown = wanted.abs() > 0.05 * wanted.abs().max()
    ratios = (gradient[shown] / wanted[shown]).sort().values
    gaps = ratios.diff()
    apart = gaps > 5e-4 * ratios[1:].abs()
    factors = [*ratios[:1].tolist(), *ratios[1:][apart].tolist()]
    are_clips = 1 < len(factors) <= shards and factors[0] > 0 and factors[-1] < 1 + 1e-3
    # Ratios of a shard are equal but for rounding errors; those of another loss differ gradually.
    are_equal = len(ratios) >= 4 * shards and gaps[~apart].sum() < 5e-5 * ratios[0]
    return tuple(factors) if are_clips and are_equal else ()
