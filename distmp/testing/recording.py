"""Records what a training step computes: forwards, loss functions of torch, and collectives."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.errors import require
from distmp.testing.gradients import ByName, plain_name, unwrapped
from distmp.testing.losses import PASS, bound, counted, is_loss
from distmp.utils.dtypes import dtype_name
from distmp.utils.tensor_trees import map_tensors

# Reductions of more than 16 elements.
_IN_16_BITS = re.compile(r".*reduce.*float16, (?!\d bytes|[12]\d bytes|3[0-2] bytes)")


@dataclass(eq=False)
class Forward:
    """A forward of the model on this rank.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keywords.
        generators: State of the random generators before it; may be empty.
        autocast: Dtype of autocast; None without autocast.
        gradients: Of each output that got one, by its number.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    generators: Sequence[Tensor] = ()
    autocast: torch.dtype | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> Any:
        """The keywords, or the positional arguments, or the only one."""
        is_single = len(self.args) == 1 and not self.kwargs
        return self.args[0] if is_single else self.args or self.kwargs

    def add(self, index: int, gradient: Tensor | None) -> None:
        """Add to the gradient of an output."""
        if gradient is not None:
            self.gradients[index] = gradient.cpu() + self.gradients.get(index, 0)


@dataclass(eq=False)
class Loss:
    """A call of a loss function.

    Attributes:
        function: Name of the function.
        counted: How much each of its elements counts in their mean.
        reduction: As of the function.
        gradient: What backward has multiplied its result by; None if it was not used.
    """

    function: str
    counted: Tensor
    reduction: str
    gradient: Any = None

    @property
    def is_sum(self) -> bool:
        """Whether its elements are summed, here or by the user."""
        return self.reduction in ("none", "sum")

    def weight_and_scale(self) -> tuple[float, float]:
        """Return the number of its elements, and what backward has multiplied each by.

        Raises:
            ConfigError: If it has multiplied them by several numbers.
        """
        gradient, counted = self.gradient.double().cpu(), self.counted.cpu()
        divisor = 1.0 if self.is_sum else float(counted.sum()) or 1.0
        scales = (gradient / divisor).expand(counted.shape)
        used = scales != 0  # by a mask of the user
        scales = scales[used]
        problem = f"have several weights; {PASS}"
        same = not len(scales) or bool(scales.max() - scales.min() <= 0.01 * scales.abs().max())
        require(same, "elements of the loss", used.numel(), problem)
        return float((counted * used).sum()), float(scales[:1].sum())


@dataclass(eq=False)
class Microbatch:
    """Forwards that enter the same losses.

    Attributes:
        forwards: The forwards.
        losses: The losses.
    """

    forwards: list[Forward]
    losses: list[Loss] = field(default_factory=list)

    def weight_and_scales(self) -> tuple[float, float, float]:
        """Return weight and scale of the first sum, and the scale of others relative to it."""
        problem = f"no loss function of torch was seen after one of them; {PASS}"
        require(bool(self.losses), "forwards", len(self.forwards), problem)
        (weight, scale), *left = (each.weight_and_scale() for each in self.losses)
        if all(each.is_sum for each in self.losses):  # parts of one sum
            weight += sum(count for count, each in left if each == scale)
            left = [(count, each) for count, each in left if each != scale]
        # A negative scale maximizes.
        return weight, abs(scale), sum(each for _, each in left) / (scale or 1.0)


@dataclass
class Step:
    """What was seen of one step on this rank, up to the optimizer's.

    Attributes:
        microbatches: The microbatches, in the order of their forwards.
        outputs: The microbatch of each output of a forward, by node in the graph of autograd.
        results: The nodes of losses.
        has_other_terms: Whether backward has reached parameters elsewhere than through forwards.
        state: Full parameters and buffers before the first forward.
        training: Whether modules were in training mode, by name.
        compute: Dtype of the first parameter that a module used.
        collectives: Number of calls by name, dtype and bytes.
        former: Gradients that were there before the first forward.
        gradients: Those that the optimizer got.
        max_norm: What gradients were clipped to.
        is_clipped_apart: Whether parts of them were.
    """

    microbatches: list[Microbatch] = field(default_factory=list)
    outputs: dict[Any, Microbatch] = field(default_factory=dict)
    results: set[Any] = field(default_factory=set)
    has_other_terms: bool = False
    state: dict[str, Tensor] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    compute: torch.dtype | None = None
    collectives: Counter[str] = field(default_factory=Counter)
    former: ByName = field(default_factory=dict)
    gradients: ByName = field(default_factory=dict)
    max_norm: float | None = None
    is_clipped_apart: bool = False

    @property
    def forwards(self) -> list[Forward]:
        """The forwards of all microbatches."""
        return [forward for each in self.microbatches for forward in each.forwards]

    @property
    def losses(self) -> list[Loss]:
        """The losses of all microbatches."""
        return [loss for each in self.microbatches for loss in each.losses]

    @property
    def reduction(self) -> str:
        """A collective that has reduced in 16 bits; empty without one."""
        return next(filter(_IN_16_BITS.match, self.collectives), "")

    def end(self) -> int:
        """Free the graph, and forget what backward did not use; return the number of forwards."""
        before, watched = len(self.forwards), {*self.outputs.values()}
        for each in self.microbatches:
            # Outputs of some classes cannot be watched.
            each.forwards = [f for f in each.forwards if f.gradients or each not in watched]
            each.losses = [loss for loss in each.losses if loss.gradient is not None]
        self.microbatches = [each for each in self.microbatches if each.forwards]
        self.outputs.clear()
        self.results.clear()
        return before - len(self.forwards)


class _Recorder(TorchFunctionMode):
    """Records forwards by hooks, and loss functions where they are called.

    Args:
        current: Returns the step, before each forward, and before FSDP gathers parameters.
        device: Type of the model's device.
    """

    def __init__(self, current: Callable[[], Step], device: str) -> None:
        super().__init__()
        self._current, self._device = current, device
        self._step = Step()
        self._running: Microbatch | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step, running, kwargs = self._step, self._running, kwargs or {}
        if func is Tensor.backward:
            found, has_others = _walk(args[0].grad_fn, step.outputs)
            step.has_other_terms |= bool(found) and has_others
        result = func(*args, **kwargs)
        is_used = is_loss(func, *([] if running else [args, kwargs])) and result.requires_grad
        if is_used and (microbatch := running or _joined(result.grad_fn, step)):
            arguments = bound(func, args, kwargs)
            loss = Loss(func.__name__, counted(func, arguments), arguments["reduction"])
            result.register_hook(lambda gradient: setattr(loss, "gradient", gradient))
            microbatch.losses.append(loss)
            step.results.add(result.grad_fn)
        return result

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a forward."""
        if torch.is_grad_enabled():
            step = self._step = self._current()
            if self._running in step.microbatches:  # Lightning's training step, which calls it
                step.microbatches.remove(self._running)
            enabled = torch.is_autocast_enabled(self._device)
            autocast = torch.get_autocast_dtype(self._device) if enabled else None
            args, kwargs = map_tensors(lambda t: t.detach().to("cpu", copy=True), [args, kwargs])
            on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
            forward = Forward(args, kwargs, [torch.get_rng_state(), *on_gpu], autocast)
            self._running = Microbatch([forward])
            step.microbatches.append(self._running)
            step.training = {plain_name(n): part.training for n, part in model.named_modules()}

    def leaf(self, module: nn.Module, _: Any) -> None:
        """Record the dtype that a module computes in."""
        dtypes = [p.dtype for p in module._parameters.values() if p is not None]
        if torch.is_grad_enabled() and dtypes and dtypes[0].is_floating_point:
            self._current().compute = self._current().compute or dtypes[0]

    def after(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Return copies of the outputs, whose gradients are those that come from outside."""
        microbatch, self._running = self._running, None
        if microbatch is None:
            return output
        indices = itertools.count()

        def watched(tensor: Tensor) -> Tensor:
            index = next(indices)
            if tensor.requires_grad:
                tensor = tensor.clone()
                self._step.outputs[tensor.grad_fn] = microbatch
                tensor.register_hook(functools.partial(microbatch.forwards[0].add, index))
            return tensor

        return replaced_outputs(watched, output)


class _Collectives(TorchDispatchMode):
    """Counts collectives, those of DDP and FSDP included."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            found: list[Tensor] = []
            map_tensors(found.append, args[:2])
            dtypes = ", ".join(sorted({dtype_name(tensor.dtype) for tensor in found}))
            name = func._schema.name.rpartition("::")[2].strip("_")
            self._counts[f"{name}, {dtypes}, {sum(each.nbytes for each in found)} bytes"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_steps(
    model: nn.Module, current: Callable[[], Step], collectives: Counter[str]
) -> Iterator[None]:
    """Record the forwards of a model and their losses; nothing stays installed at the end.

    Args:
        model: The model.
        current: Returns the step, before each forward, and before FSDP gathers parameters.
        collectives: Number of calls by name, dtype and bytes, which grow.
    """
    model = unwrapped(model)
    recorder = _Recorder(current, next(model.parameters()).device.type)
    eager = torch.compiler.disable  # Dynamo cannot trace them
    before, leaf, after = map(eager, (recorder.before, recorder.leaf, recorder.after))
    handles = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
    handles += [m.register_forward_pre_hook(leaf) for m in model.modules() if m._parameters]
    handles += [model.register_forward_hook(after)]
    with ExitStack() as stack, recorder, _Collectives(collectives):
        for handle in handles:
            stack.callback(handle.remove)
        yield


def replaced_outputs(function: Callable[[Tensor], Any], output: Any) -> Any:
    """Return what a model has returned with each tensor replaced, also those of attributes."""
    found = map_tensors(function, output)
    if found is output and hasattr(output, "__dict__") and not isinstance(output, Tensor):
        found = copy.copy(output)
        vars(found).update(map_tensors(function, vars(output)))
    return found


def _joined(node: Any, step: Step) -> Microbatch | None:
    """Return the microbatch that a loss depends on, after joining several.

    There is none for a loss that depends on another loss.
    """
    ends, _ = _walk(node, step.outputs.keys() | step.results)
    found = {step.outputs[end] for end in ends} if not ends & step.results else set()
    first, *others = [each for each in step.microbatches if each in found] or [None]
    for other in others:
        first.forwards += other.forwards
        first.losses += other.losses
        step.microbatches.remove(other)
        step.outputs.update({n: first for n, each in step.outputs.items() if each is other})
    return first


def _walk(node: Any, ends: Collection[Any]) -> tuple[set[Any], bool]:
    """Return which nodes a graph of autograd leads to, and whether to parameters beside them."""
    left, seen, found = [node], {None}, False
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            found |= hasattr(node, "variable") and node not in ends
            left += [] if node in ends else [each for each, _ in node.next_functions]
    return seen.intersection(ends), found
