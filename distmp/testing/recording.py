"""Records what a training step computes: forwards, and the loss functions of torch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distmp.testing.gradients import plain_name, unwrapped
from distmp.testing.losses import is_loss, number_of_losses
from distmp.utils.tensor_trees import map_tensors

# Gradients by name of parameter.
ByName = Mapping[str, Tensor | None]


@dataclass(eq=False)
class Forward:
    """A forward of the model on this rank.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keywords.
        generators: State of the random generators before it; may be empty.
        autocast: Dtype of autocast; None without autocast.
        nodes: Those of its outputs in the graph of autograd.
        gradients: Of each output that got one, by its number.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    generators: Sequence[Tensor] = ()
    autocast: torch.dtype | None = None
    nodes: set[Any] = field(default_factory=set)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> Any:
        """The keywords, or the positional arguments, or the only one."""
        is_single = len(self.args) == 1 and not self.kwargs
        return self.args[0] if is_single else self.args or self.kwargs

    @property
    def is_used(self) -> bool:
        """Whether its output got a gradient, or is of a class that cannot be watched."""
        return bool(self.gradients) or not self.nodes


@dataclass(eq=False)
class Loss:
    """A call of a loss function.

    Attributes:
        function: Name of the function.
        nodes: Its node in the graph of autograd.
        forwards: The forwards that it depends on.
        counted: How much each of its elements counts in their mean.
        reduction: As of the function.
        gradient: What backward has multiplied its result by; None if it was not used.
    """

    function: str
    nodes: set[Any]
    forwards: set[Forward]
    counted: Tensor
    reduction: str
    gradient: Any = None


@dataclass
class ForwardRecord:
    """What the forwards of a training step used on this rank.

    Attributes:
        forwards: The forwards.
        losses: The loss functions that were called.
        has_other_terms: Whether backward has reached parameters elsewhere than through forwards.
        state: Full parameters and buffers before the first one.
        training: Whether modules were in training mode, by name.
        compute: Dtype of the first parameter that a module used.
    """

    forwards: list[Forward] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    has_other_terms: bool = False
    state: dict[str, Tensor] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    compute: torch.dtype | None = None


class _Recorder(TorchFunctionMode):
    """Records forwards by hooks, and loss functions where they are called.

    Args:
        current: Returns the record, before each forward, and before FSDP gathers parameters.
        device: Type of the model's device.
    """

    def __init__(self, current: Callable[[], ForwardRecord], device: str) -> None:
        super().__init__()
        self._current, self._device = current, device
        self._record = ForwardRecord()
        self._running: Forward | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        record, kwargs = self._record, kwargs or {}
        if func is Tensor.backward:
            nodes = {node for forward in record.forwards for node in forward.nodes}
            found, has_others = _walk(args[0].grad_fn, nodes)
            record.has_other_terms |= bool(found) and has_others
        result = func(*args, **kwargs)
        running = self._running
        if is_loss(func, *([] if running else [args, kwargs])) and result.requires_grad:
            forwards = {running} if running else _forwards_before(result.grad_fn, record)
            if forwards:
                counted = number_of_losses(func, args, kwargs)
                loss = Loss(func.__name__, {result.grad_fn}, forwards, *counted)
                result.register_hook(lambda gradient: setattr(loss, "gradient", gradient))
                record.losses.append(loss)
        return result

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a forward."""
        if torch.is_grad_enabled():
            record = self._record = self._current()
            if self._running in record.forwards:  # Lightning's training step, which calls it
                record.forwards.remove(self._running)
            enabled = torch.is_autocast_enabled(self._device)
            autocast = torch.get_autocast_dtype(self._device) if enabled else None
            args, kwargs = map_tensors(lambda t: t.detach().to("cpu", copy=True), [args, kwargs])
            self._running = Forward(args, kwargs, _generators(), autocast)
            record.forwards.append(self._running)
            record.training = {plain_name(n): part.training for n, part in model.named_modules()}

    def leaf(self, module: nn.Module, _: Any) -> None:
        """Record the dtype that a module computes in."""
        dtypes = [p.dtype for p in module._parameters.values() if p is not None]
        if torch.is_grad_enabled() and dtypes and dtypes[0].is_floating_point:
            self._current().compute = self._current().compute or dtypes[0]

    def after(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Return copies of the outputs, whose gradients are those that come from outside."""
        forward, self._running = self._running, None
        if forward is None:
            return output
        outputs = itertools.count()

        def watched(tensor: Tensor) -> Tensor:
            index = next(outputs)
            if not tensor.requires_grad:
                return tensor

            def add(gradient: Tensor | None) -> None:
                if gradient is not None:
                    former = forward.gradients.get(index, 0)
                    forward.gradients[index] = gradient.cpu() + former

            tensor = tensor.clone()
            forward.nodes.add(tensor.grad_fn)
            tensor.register_hook(add)
            return tensor

        return replaced_outputs(watched, output)


@contextlib.contextmanager
def recorded_steps(model: nn.Module, current: Callable[[], ForwardRecord]) -> Iterator[None]:
    """Record the forwards of a model and their losses; nothing stays installed at the end.

    Args:
        model: The model.
        current: Returns the record, before each forward, and before FSDP gathers parameters.
    """
    model = unwrapped(model)
    recorder = _Recorder(current, next(model.parameters()).device.type)
    eager = torch.compiler.disable  # Dynamo cannot trace them
    before, leaf, after = map(eager, (recorder.before, recorder.leaf, recorder.after))
    handles = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
    handles += [m.register_forward_pre_hook(leaf) for m in model.modules() if m._parameters]
    handles += [model.register_forward_hook(after)]
    try:
        with recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()


def replaced_outputs(function: Callable[[Tensor], Any], output: Any) -> Any:
    """Return what a model has returned with each tensor replaced, also those of attributes."""
    found = map_tensors(function, output)
    if found is output and hasattr(output, "__dict__") and not isinstance(output, Tensor):
        found = copy.copy(output)
        vars(found).update(map_tensors(function, vars(output)))
    return found


def output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors that a model has returned, in the same order."""
    found = list[Tensor]()

    def kept(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replaced_outputs(kept, output)
    return found


def _forwards_before(node: Any, record: ForwardRecord) -> set[Forward]:
    """Return the forwards that a loss depends on; none for one that depends on another loss."""
    owners = {node: forward for forward in record.forwards for node in forward.nodes}
    losses = {node for loss in record.losses for node in loss.nodes}
    found, _ = _walk(node, {*owners, *losses})
    return set() if found & losses else {owners[each] for each in found}


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


def _generators() -> list[Tensor]:
    on_gpu = torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
