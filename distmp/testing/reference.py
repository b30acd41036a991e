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
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.testing.gradients import full_state, named_parameters, plain_copy, plain_name, unwrapped
from distmp.utils.tensor_trees import floating_point_cast, map_tensors

# Returns the sum of the losses of a microbatch, and its weight: its tokens or samples.
LossSum = Callable[[nn.Module, Any], tuple[Tensor, Any]]
IGNORED = -100
_PASS = "pass loss_sum=..., which returns the sum of the losses of a microbatch and its weight"


class DefaultLoss:
    """The sum of the cross entropy over labels other than -100, and their number.

    A microbatch is a mapping with `labels`, which the model takes as keywords, or a pair of inputs
    and integer labels. Whether a model shifts its labels, as causal language models do, is found
    from the loss that it returns.
    """

    def __init__(self) -> None:
        self._form: int | None = None

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return loss sum and weight of a microbatch."""
        if isinstance(batch, Mapping) and "labels" in batch:
            # With it, models of transformers divide by the tokens of a step.
            inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
            return self._of_output(model(**inputs), batch["labels"])
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return _cross_entropy(model(batch[0]), labels)
        problem = f"neither a mapping with labels nor inputs and integer labels; {_PASS}"
        raise ConfigError("samples", type(batch).__name__, problem)

    def _of_output(self, output: Any, labels: Tensor) -> tuple[Tensor, int]:
        found = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        if "logits" not in found:
            problem = f"has no logits; {_PASS}"
            raise ConfigError("the output of the model", type(output).__name__, problem)
        logits, mean = found["logits"], found.get("loss")
        forms = [_cross_entropy(logits, labels)]
        if logits.dim() == 3:
            forms.append(_cross_entropy(logits[:, :-1], labels[:, 1:]))
        if self._form is None and mean is not None and all(weight for _, weight in forms):
            errors = [abs(float((total / weight - mean).detach())) for total, weight in forms]
            self._form = errors.index(min(errors))
            if not min(errors) <= 0.02 * abs(float(mean.detach())):
                problem = f"is not the mean of the cross entropy over labels; {_PASS}"
                raise ConfigError("the loss that the model returns", mean.item(), problem)
        return forms[self._form or 0]


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    if logits.dim() == labels.dim() + 1 and labels.dim() > 1:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total, int((labels != IGNORED).sum())


@dataclass
class ForwardRecord:
    """What the forwards of a training step used on this rank.

    Attributes:
        generators: State of the random generators before each forward.
        autocast: Dtype of autocast; None without autocast.
        compute: Dtype of the first parameter that a module used.
    """

    generators: list[dict[str, Tensor]] = field(default_factory=list)
    autocast: torch.dtype | None = None
    compute: torch.dtype | None = None


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


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().cpu()
    return states


def _restore(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


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
        self, by_rank: Sequence[tuple[Sequence[Any], Sequence[Any]]], record: ForwardRecord
    ) -> tuple[Gradients, Gradients]:
        """Return gradients in the dtypes of the recorded forwards, and in float64.

        Args:
            by_rank: Microbatches of each rank, and the states of generators of its forwards.
            record: What the forwards used.
        """
        count = max(len(batches) for batches, _ in by_rank)
        batches = [each for found, _ in by_rank for each in _padded(found, count)]
        # With another number of forwards, it is unknown which belongs to which microbatch.
        used = [states if len(states) == len(found) else () for found, states in by_rank]
        generators = [each for states in used for each in _padded(states, count)]
        self._record = record
        own = self.own(batches, generators)
        self._fill(self._exact)
        doubles = [_cast(each, torch.float64) for each in batches]
        return own, self._of(self._exact, doubles, generators)

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
                    stacked[name].append(gradient.double().flatten() * weights[-1])
        model.zero_grad()
        if any(weights) and not any(each.any() for found in stacked.values() for each in found):
            problem = "does not depend on the parameters of the model it is called with"
            raise ConfigError("loss_sum", type(self._loss_sum).__name__, problem)
        return Gradients(weights, {name: torch.stack(each) for name, each in stacked.items()})

    def _backward(self, model: nn.Module, batch: Any) -> float:
        model.zero_grad()
        if batch is None:  # a rank with fewer microbatches than another
            return 0.0
        total, weight = self._loss_sum(model, batch)
        weight = float(weight)
        if weight:
            # Of the mean, as most training code: 16-bit backward rounds it in the same way.
            (total / weight).backward()
        return weight


def _padded(values: Sequence[Any], count: int) -> list[Any]:
    return [*values, *[None] * (count - len(values))]


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(floating_point_cast(dtype), batch)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss sums of microbatches.

    Attributes:
        weights: Weight of each microbatch.
        stacked: By parameter, float64, of shape (microbatches, elements).
    """

    weights: list[float]
    stacked: dict[str, Tensor]

    def summed(self, factors: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """Return sums of gradients with factors of shape (sums, microbatches)."""
        return {name: torch.from_numpy(factors).to(g) @ g for name, g in self.stacked.items()}
