"""Expected results of a case in float64, from the documentation of distmp only.

- The gradient is that of the global mean: sums over all microbatches and ranks, divided once by the
  global weight (docs/numerics.md, "The mean that is meant").
- A step is skipped on all ranks if a gradient or the weight of any rank is not finite, or the
  global weight is 0 ("The decision"). A skipped step writes nothing: no weight, moment, buffer or
  schedule.
- Clipping multiplies by min(1, max_norm / (norm + 1e-6)).
- The loss scale is updated last, by the rules of `LossScaleConfig`. A step without any weight does
  not change it.
- `drop_microbatch` drops the microbatches with non-finite gradients, with their weights, losses and
  batch statistics. For the loss scale this is an overflow.
- Buffers are those of rank 0 after each step (docs/accumulation.md). With `reproducible`, each
  microbatch begins with those of the step, and the first one's are kept.
- A parameter that no rank has ever used is not updated. From its first gradient on any rank, a step
  in which no rank uses it counts as a zero gradient. Dropped microbatches and skipped steps do not
  count (docs/numerics.md, "Parameters without a gradient").
- A frozen parameter does not change and keeps its state.
- A new engine that loads the state continues as if there was only one.

ReLU has two derivatives at its kink, and rounding decides between them. The oracle can repeat a
step with the other one (`judge`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.adversary.cases import SCALED, Case, OptimizerSpec, ScaleSpec
from tests.adversary.models import Place, Relu, build_batches, build_model, loss

Tensors = dict[str, Tensor]

# 16-bit gradients below this stay finite for any arithmetic between them and the loss; the largest
# float16 number is 65504.
SURELY_FINITE = 2.0**11


@dataclass(frozen=True)
class Expected:
    """The expected numbers of a step; the fields are those of `distmp.StepNumbers`.

    Attributes:
        other fields: None if the documentation does not define the value.
    """

    overflow: bool
    skipped: bool
    dropped: int
    weight: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    applied_total: int
    skipped_total: int
    skipped_in_a_row: int
    stop: bool
    scale_exhausted: bool | None


@dataclass
class _Sums:
    """Sums over the microbatches of all ranks."""

    gradients: Tensors
    weight: float = 0.0
    loss: float = 0.0
    dropped: int = 0
    overflow: bool = False
    largest: float = 0.0  # gradient of a microbatch


class Oracle:
    """The state of a training run on all ranks, in float64.

    Attributes:
        weights: All parameters, by name.
        buffers: All buffers, by name.
        risky: Whether 16-bit arithmetic may have overflowed without a fault in the last step, which
            only the engine's result shows.
        certain: False once results depend on which microbatches overflowed without a fault; from
            then on numbers are not compared.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._model = build_model(case).double()
        self._optimizer = _OPTIMIZERS[case.optimizer.name](case.optimizer)
        # Rates of the parameter groups.
        self._rates: Sequence[float] = case.optimizer.lr, case.optimizer.lr / 2
        self._scale = LossScale(_rules(case))
        self._used: set[str] = set()
        self._nominal = case.nominal_weight
        self._applied = self._skipped = self._in_a_row = 0
        self._relus = [b.activation for b in self._model.blocks if isinstance(b.activation, Relu)]
        self._inputs: list[list[Tensor]] = []
        self.risky = False
        self.certain = True

    @property
    def weights(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    @property
    def buffers(self) -> Tensors:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    @property
    def frozen(self) -> set[str]:
        return {name for name, p in self._model.named_parameters() if not p.requires_grad}

    def step(
        self,
        index: int,
        observed: Mapping[str, Any] | None = None,
        flipped: Sequence[tuple[int, Place]] = (),
    ) -> Expected:
        """Run a step.

        Args:
            index: Index of the step.
            observed: The numbers of the engine's step. Only its overflow is used, and only if
                16-bit arithmetic may have overflowed without a fault.
            flipped: Inputs of ReLU, as from `near_kinks`, whose other branch is taken.
        """
        step = self._case.steps[index]
        for name in step.freeze + step.thaw:
            self._model.get_parameter(name).requires_grad_(name in step.thaw)
        self._rates = step.rates or self._rates
        before = self.buffers
        for block, relu in enumerate(self._relus):
            relu.inputs, relu.flipped = [], [place for b, place in flipped if b == block]
        sums = self._sum_microbatches(index)
        self._inputs = [relu.inputs or [] for relu in self._relus]
        for relu in self._relus:
            relu.inputs = None
        overflow = sums.overflow or (sums.dropped > 0 and sums.weight == 0)
        overflow = self._natural(sums, overflow, observed)
        skipped = overflow or sums.weight == 0
        mean = {name: total / sums.weight for name, total in sums.gradients.items() if not skipped}
        norm = math.sqrt(sum(float(g.square().sum()) for g in mean.values()))
        rate, scale = self._rates[0] * self._schedule_factor(), self._scale.value
        if skipped:
            self._restore(before)
        else:
            self._apply(mean, norm)
        self._count(skipped)
        bad = overflow or sums.dropped > 0
        empty = sums.weight == 0 and sums.dropped == 0
        exhausted = self._scale.update(overflow=bad, empty=empty) and overflow
        return Expected(
            overflow=overflow,
            skipped=skipped,
            dropped=sums.dropped,
            weight=sums.weight if math.isfinite(sums.weight) else None,
            loss=None if skipped else sums.loss / sums.weight,
            grad_norm=math.nan if overflow else None if skipped else norm,
            learning_rate=rate,
            loss_scale=scale,
            applied_total=self._applied,
            skipped_total=self._skipped,
            skipped_in_a_row=self._in_a_row,
            stop=step.stop is not None,
            scale_exhausted=exhausted if self._scale.rules.dynamic else None,
        )

    def near_kinks(self, tolerance: float) -> list[tuple[int, Place]]:
        """Return the inputs of ReLU in the last step whose sign rounding may change, nearest first.

        Args:
            tolerance: Largest rounding error, relative to the root mean square of all inputs.
        """
        found = []
        for block, inputs in enumerate(self._inputs):
            for call, x in enumerate(inputs):
                distances = x.abs().flatten() / x.square().mean().sqrt()
                near = (distances <= tolerance).nonzero().flatten().tolist()
                found += [(float(distances[n]), (block, (call, n))) for n in near]
        return [place for _, place in sorted(found)]

    def evaluate(self, index: int) -> float | None:
        """Return the mean loss over the batches of a step; None if their weight is 0."""
        self._model.eval()
        with torch.no_grad():
            batches = itertools.chain.from_iterable(self._batches(index))
            results = [loss(self._model, batch) for batch in batches]
        self._model.train()
        weight = sum(float(weight) for _, weight in results)
        return sum(float(total) for total, _ in results) / weight if weight else None

    # One step

    def _batches(self, index: int) -> list[list[dict[str, Any]]]:
        batches = build_batches(self._case, index)
        for batch in itertools.chain.from_iterable(batches):
            batch.update({k: v.double() for k, v in batch.items() if _floating(v)})
        return batches

    def _sum_microbatches(self, index: int) -> _Sums:
        sums = _Sums({})
        after: Tensors | None = None
        for batches in self._batches(index):
            before = self.buffers
            for batch in batches:
                if self._case.reproducible:
                    self._restore(before)
                self._add_microbatch(sums, batch)
                if self._case.reproducible:
                    after = after or self.buffers
            # Rank 0 is the first, and all ranks get its buffers.
            after = after or self.buffers
            self._restore(before)
        self._restore(after or {})
        return sums

    def _add_microbatch(self, sums: _Sums, batch: dict[str, Any]) -> None:
        before = self.buffers
        total, weight = loss(self._model, batch)
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
        finite = all(bool(g.isfinite().all()) for g in gradients.values())
        if self._case.drops and not finite:
            self._restore(before)
            sums.dropped += 1
            return
        sums.overflow |= not finite or not math.isfinite(weight)
        sums.weight += float(weight)
        sums.loss += total.item()
        for name, gradient in gradients.items():
            sums.gradients[name] = sums.gradients.get(name, 0) + gradient
            sums.largest = max(sums.largest, float(gradient.abs().nan_to_num().amax()))

    def _natural(self, sums: _Sums, overflow: bool, observed: Mapping[str, Any] | None) -> bool:
        """Return whether the step overflows in 16 bits; if uncertain, use the engine's result."""
        if self._nominal is None and 0 < sums.weight < math.inf:
            self._nominal = sums.weight
        scaled = self._scale.value / (self._nominal or 1.0) * max(1.0, sums.largest)
        self.risky = self._case.policy in SCALED and scaled > SURELY_FINITE
        if self.risky and self._case.drops:
            # It is unknown which microbatches were dropped.
            self.certain = False
        if not self.risky or overflow or observed is None:
            return overflow
        return bool(observed["overflow"])

    def _apply(self, mean: Tensors, norm: float) -> None:
        self._used |= mean.keys()
        limit = self._case.max_norm
        clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for name, parameter in self._model.named_parameters():
            if name not in self._used or not parameter.requires_grad:
                continue
            gradient = mean.get(name, torch.zeros_like(parameter)) * clip
            rate = self._rates[self._group(name)] * self._schedule_factor()
            decay = 0.0 if self._group(name) else self._case.optimizer.weight_decay
            with torch.no_grad():
                self._optimizer.update(name, parameter, gradient, rate, decay)

    def _schedule_factor(self) -> float:
        schedule = self._case.schedule
        return schedule_factor(*schedule, self._applied) if schedule else 1.0

    def _group(self, name: str) -> int:
        return int(self._case.optimizer.groups == 2 and name.endswith("bias"))

    def _count(self, skipped: bool) -> None:
        self._applied += not skipped
        self._skipped += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0

    def _restore(self, buffers: Tensors) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.copy_(buffers[name])


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point()


# Schedules: factors of the initial rate by number of applied updates


def schedule_factor(name: str, number: float, applied: int) -> float:
    if name == "step":
        return 0.5 ** (applied // int(number))
    if name == "exponential":
        return number**applied
    if name == "warmup":
        return min(1.0, (applied + 1) / number)
    raise ValueError(name)


# Loss scale


def _rules(case: Case) -> ScaleSpec:
    if case.policy not in SCALED:
        return ScaleSpec(dynamic=False, init=1.0)
    if case.policy == "fp16-static":
        return ScaleSpec(dynamic=False, init=1024.0)
    return case.scale or ScaleSpec(init=2.0**16)


class LossScale:
    """The rules of `distmp.LossScaleConfig`."""

    def __init__(self, rules: ScaleSpec) -> None:
        self.rules = rules
        self.value = rules.init
        self._clean = self._overflows = 0

    def update(self, *, overflow: bool, empty: bool) -> bool:
        """Update after a step; return whether the scale cannot be lowered further."""
        if empty or not self.rules.dynamic:
            return False
        if not overflow:
            self._overflows = 0
            self._clean += 1
            if self._clean >= self.rules.growth_interval:
                self._clean = 0
                self._change(self.rules.growth_factor)
            return False
        self._clean = 0
        self._overflows += 1
        if self._overflows < self.rules.hysteresis:
            return False
        exhausted = self.value <= self.rules.min_scale
        self._change(self.rules.backoff_factor)
        return exhausted

    def _change(self, factor: float) -> None:
        value = float(np.float32(self.value) * np.float32(factor))
        self.value = min(max(value, self.rules.min_scale), self.rules.max_scale)


# Optimizers


class Sgd:
    """SGD with momentum as in torch: the buffer starts with the first gradient."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec
        self.state: Tensors = {}

    def update(self, name: str, weight: Tensor, g: Tensor, rate: float, decay: float) -> None:
        g = g + decay * weight
        if self._spec.momentum:
            previous = self.state.get(name)
            buffer = g if previous is None else self._spec.momentum * previous + g
            self.state[name] = buffer
            g = g + self._spec.momentum * buffer if self._spec.nesterov else buffer
        weight -= rate * g


class Adam:
    """Adam (Kingma and Ba, 2015), with weight decay added to the gradient."""

    decoupled = False

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec
        self.state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def update(self, name: str, weight: Tensor, g: Tensor, rate: float, decay: float) -> None:
        if self.decoupled:
            weight *= 1 - rate * decay
        else:
            g = g + decay * weight
        zeros = torch.zeros_like(g)
        count, first, second = self.state.get(name, (0, zeros, zeros))
        beta1, beta2 = self._spec.betas
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g * g
        count += 1
        self.state[name] = count, first, second
        mean, variance = first / (1 - beta1**count), second / (1 - beta2**count)
        weight -= rate * mean / (variance.sqrt() + self._spec.eps)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, 2019), with decoupled weight decay."""

    decoupled = True


_OPTIMIZERS: dict[str, Callable[[OptimizerSpec], Sgd | Adam]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
}
