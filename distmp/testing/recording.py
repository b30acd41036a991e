"""Records what a training step computes: forwards, loss functions of torch, and collectives."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.errors import require
from distmp.testing.gradients import ByName, unwrapped
from distmp.utils.dtypes import dtype_name
from distmp.utils.generators import restorers
from distmp.utils.tensor_trees import floating_point_cast, map_tensors, parameter_name, tensors_in


@dataclass(eq=False, kw_only=True)
class _Watched:
    """Tensors whose gradients are recorded.

    Attributes:
        gradients: Of each tensor that got one, by its number.
        probed: Those that `torch.autograd.grad` has computed for a penalty, or for a look at them.
        backwards: Whether they were probed, and the numbers of the backwards they came from.
    """

    gradients: dict[int, Tensor] = field(default_factory=dict)
    probed: dict[int, Tensor] = field(default_factory=dict)
    backwards: set[tuple[bool, int]] = field(default_factory=set)


@dataclass(eq=False)
class Loss(_Watched):
    """A call of a loss function, whose result is watched.

    Attributes:
        function: Name of the function.
        forwards: Number of the forwards before it.
        counted: How much each of its elements counts in their mean.
        is_sum: Whether its elements are summed, here or, with the reduction `none`, by the user.
    """

    function: str
    forwards: int
    counted: Tensor
    is_sum: bool

    def weight_and_scale(self) -> tuple[float, float]:
        """Return the number of its elements, and what backward has multiplied each by.

        Raises:
            ConfigError: If it has multiplied them by several numbers.
        """
        counted = self.counted.cpu()
        divisor = 1.0 if self.is_sum else float(counted.sum()) or 1.0
        scales = (self.gradients[0].double() / divisor).expand(counted.shape)
        used = scales != 0  # by a mask of the user
        scales = scales[used]
        problem = f"have several weights; {PASS}"
        same = not len(scales) or bool(scales.max() - scales.min() <= 0.01 * scales.abs().max())
        require(same, "elements of the loss", used.numel(), problem)
        return float((counted * used).sum()), float(scales[:1].sum())


@dataclass(eq=False)
class Forward(_Watched):
    """A forward of the model on this rank: a microbatch. Its outputs are watched.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keywords.
        generators: Functions that restore the random generators before it; may be empty.
        autocast: Dtype of autocast; None without autocast.
        losses: The losses that were computed from it.
        is_watched: Whether there are outputs that can get gradients.
        norms: Norm of each of these outputs, by its number.
        parts: Itself, and former forwards without an own loss, as the first of a pair; empty for
            the latter.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    generators: Sequence[Callable[[], object]] = ()
    autocast: torch.dtype | None = None
    losses: list[Loss] = field(default_factory=list)
    is_watched: bool = False
    norms: dict[int, float] = field(default_factory=dict)
    parts: list[Forward] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        """The positional arguments, and keywords as a dict, if there are any; or the only one."""
        found = (*self.args, self.kwargs) if self.kwargs else tuple(self.args)
        return found[0] if len(found) == 1 else found

    def weight_and_scales(self) -> tuple[float, float, float]:
        """Return weight and scale of the first loss, and the scale of others relative to it."""
        problem = f"no loss function of torch was seen after one of them alone; {PASS}"
        # Several losses of several forwards may be terms, or microbatches.
        is_known = len(self.losses) == 1 or (len(self.parts) == 1 <= len(self.losses))
        require(is_known, "forwards", len(self.parts), problem)
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
        collectives: Number of calls by name, dtype and bytes.
        state: Full parameters and buffers before the first forward.
        forwards: The forwards.
        losses: The losses of all forwards.
        has_other_terms: Whether parameters were used outside of forwards, or gradients or inner
            tensors of the model in a loss.
        unseen: What the loss depends on besides calls of loss functions.
        training: Whether modules were in training mode, by name.
        compute: Dtype of the first parameter that a module used.
        former: Gradients that were there before the first forward.
        gradients: Those that the optimizer got.
        max_norm: What gradients were clipped to.
        norm: Their norm before; None if it was not seen.
        is_clipped_apart: Whether parts of them were.
        has_clamped: Whether any tensor was clamped in place.
    """

    collectives: Counter[str]
    state: dict[str, Tensor] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    has_other_terms: bool = False
    unseen: set[str] = field(default_factory=set)
    training: dict[str, bool] = field(default_factory=dict)
    compute: torch.dtype | None = None
    former: ByName = field(default_factory=dict)
    gradients: ByName = field(default_factory=dict)
    max_norm: float | None = None
    norm: float | None = None
    is_clipped_apart: bool = False
    has_clamped: bool = False

    def end(self, *, joins: bool) -> int:
        """Assign losses to forwards, and forget forwards without backward; return their number.

        Args:
            joins: Whether a forward without an own loss and a later one are one microbatch.
        """
        is_usual = any(each.gradients for each in self.forwards)  # or the script assigns them
        for watched in (*self.forwards, *self.losses):
            self.has_other_terms |= is_usual and bool(watched.probed)
            watched.gradients = watched.gradients if is_usual else watched.probed
            watched.backwards = {each for each in watched.backwards if each[0] != is_usual}
        used = [each for each in self.forwards if each.gradients or not each.is_watched]
        unused = len(self.forwards) - len(used)
        for loss in (each for each in self.losses if each.gradients):
            before = self.forwards[: loss.forwards]
            for last in [each for each in before if each.backwards & loss.backwards][-1:]:
                last.losses.append(loss)
        for number, each in reversed([*enumerate(used, 1)]):
            # A mean may be that of other losses.
            each.losses = [loss for loss in each.losses if loss.function != "mean"] or each.losses
            later = (f for f in used[number:] if f.parts and f.backwards & each.backwards)
            owner = next(later, each) if joins and not each.losses else each
            owner.parts.insert(0, each)
        self.forwards = [each for each in used if each.parts]
        return unused


# Loss functions of torch

PASS = "pass loss_sum=..., which returns the sum of the losses of a microbatch and its weight"
# Without `ctc_loss`, whose mean gives samples several weights.
_LOSSES = {f for f in vars(F).values() if "reduction" in getattr(f, "__annotations__", ())}
_LOSSES.remove(F.ctc_loss)


def loss_arguments(func: Any, args: Any, kwargs: Any, *, means: bool = False) -> dict[str, Any]:
    """Return the arguments of a loss function by name; none if it is another function.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keywords.
        means: Whether means of all elements are losses.
    """
    if func in _LOSSES:
        found = inspect.signature(func).bind(*args, **(kwargs or {}))
        found.apply_defaults()
        return found.arguments
    is_mean = means and func in (torch.mean, Tensor.mean) and len(args) == 1 and not kwargs
    # The mean of other means is none of single losses.
    is_mean = is_mean and args[0].dim() > 0 and "Stack" not in str(args[0].grad_fn)
    return {"input": args[0].flatten(), "reduction": "batchmean"} if is_mean else {}


def has_unseen_terms(loss: Tensor, known: Sequence[Loss]) -> bool:
    """Return whether a loss depends on a leaf otherwise than by known losses."""
    # A mean may be that of other losses.
    known = [each for each in known if each.function != "mean"] or known
    return any(True for _ in _leaves(loss, {"zero", *(each.function for each in known)}))


def bypasses_outputs(loss: Tensor, model: nn.Module) -> bool:
    """Return whether a loss depends on parameters of a model otherwise than by its outputs."""
    own = {*model.parameters()}
    return any(leaf in own for leaf in _leaves(loss, {"zero", "output"}))


def _leaves(loss: Tensor, stops: set[str]) -> Iterator[Tensor]:
    """Yield the leaves that a loss depends on by paths without a node with one of these marks."""
    edges: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    visited = {*edges}
    for node, index in edges:  # the loop appends to it
        if node is None or node.metadata.get("distmp") in stops:
            continue
        if node.name().endswith("AccumulateGrad"):
            yield node.variable
        following = node.next_functions
        if node.name() == "_DDPSinkBackward":  # returns its inputs
            following = following[index : index + 1]
        edges += {*following} - visited
        visited |= {*following}


@torch.no_grad()
def counted_losses(function: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    """Return how much each loss counts in their mean."""
    if arguments["reduction"] == "batchmean":
        return torch.ones(len(arguments["input"]))
    target, weight = arguments.get("target"), arguments.get("weight")
    if function in (F.mse_loss, F.l1_loss) and weight is not None:  # weights of elements
        return weight.clone()
    if target is None or "ignore_index" not in arguments or target.is_floating_point():
        return torch.ones_like(function(**{**arguments, "reduction": "none"}))
    ignored = arguments["ignore_index"]
    kept = target != (-100 if ignored is None else ignored)
    return kept if weight is None else weight[target.where(kept, 0)] * kept


# Recorders

# Functions that write to their first argument.
_WRITES = re.compile(r"(_foreach_)?(copy|add|sub|mul|div)_|__setitem__|__i(add|sub|mul|truediv)__")
_CLAMPS = re.compile(r"(_foreach_)?(clamp|clip)(_min|_max)?(_?)")


def _local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


class _Recorder(TorchFunctionMode):
    """Records forwards by hooks, and loss functions where they are called.

    Args:
        current: Returns the step, before each forward.
        model: The model, whose gradients may be clipped.
    """

    def __init__(self, current: Callable[[], Step], model: nn.Module) -> None:
        super().__init__()
        self._current, self._model = current, model
        self._device = next(model.parameters()).device.type
        self._step = Step(Counter())
        self._running: Forward | None = None
        self._is_probing = False
        self._inputs: set[Tensor] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step, running = self._step, self._running
        is_grad, is_read = func is torch.autograd.grad, func == Tensor.grad.__get__  # type: ignore[union-attr]
        of_others = is_read and args[0] in self._inputs
        of_others |= is_grad and any(not isinstance(each, nn.Parameter) for each in args[1][:1])
        step.has_other_terms |= of_others
        is_backward = func is Tensor.backward
        step.has_other_terms |= is_backward and bypasses_outputs(args[0], self._model)
        depends = is_backward and has_unseen_terms(args[0], step.losses)
        before = depends and [len(each.backwards) for each in step.forwards]
        keeps = is_grad and (kwargs["retain_graph"] or kwargs["create_graph"])
        self._is_probing = of_others or keeps
        result = func(*args, **(kwargs or {}))
        self._is_probing = False
        if depends and before != [len(each.backwards) for each in step.forwards]:
            # Otherwise it is the loss of another model.
            step.unseen.add("a term that is not a loss function of torch")
        seen = step.gradients or step.is_clipped_apart or running
        if not seen and self._may_clip(func, args):
            held = [_local(p.grad) for p in self._model.parameters() if p.grad is not None]
            pairs = itertools.product(map(_local, tensors_in(args[:1])), held)
            step.is_clipped_apart |= any(itertools.starmap(torch._C._is_alias_of, pairs))  # type: ignore[attr-defined]
        # Updates in place return parameters, too, without gradients enabled.
        tracked = [each for each in tensors_in(result) if each.requires_grad]
        if not (torch.is_grad_enabled() and tracked):
            return result
        found = (p for p in tensors_in([args, kwargs]) if isinstance(p, nn.Parameter))
        if used := [p for p in found if p.is_floating_point()]:
            step.has_other_terms |= running is None
            step.compute = step.compute or (used[0].dtype if running else None)
        # A product with 0 only connects unused parameters to the loss. Nodes are marked, because to
        # keep them would keep their tensors, and to read those would run hooks of saved tensors.
        is_product = getattr(func, "__name__", "") in ("mul", "__mul__", "__rmul__", "multiply")
        if is_product and any(not isinstance(a, Tensor) and a == 0 for a in args[:2]):
            result.grad_fn.metadata["distmp"] = "zero"
        if arguments := loss_arguments(func, args, kwargs, means=running is None):
            is_sum = arguments["reduction"] in ("none", "sum")
            counted = counted_losses(func, arguments)
            result.grad_fn.metadata["distmp"] = func.__name__
            loss = Loss(func.__name__, len(step.forwards), counted, is_sum)
            result.register_hook(functools.partial(self._receive, loss))
            step.losses.append(loss)
        return result

    def _may_clip(self, func: Any, args: Any) -> bool:
        """Return whether a function clamps its first argument, or writes what was clamped to it."""
        step, name = self._step, getattr(func, "__name__", "")
        clamp = _CLAMPS.fullmatch(name)
        step.has_clamped |= clamp is not None and clamp[4] == "_"
        assigns = name == "__set__" and isinstance(args[1], Tensor)
        step.is_clipped_apart |= step.has_clamped and assigns
        return clamp is not None or (step.has_clamped and bool(_WRITES.fullmatch(name)))

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a forward; a copy of the model has the same hooks."""
        if model is self._model and torch.is_grad_enabled():
            step = self._step = self._current()
            # Perhaps a step of another model.
            inputs = [each for each in tensors_in([args, kwargs]) if each.requires_grad]
            step.has_other_terms |= not all(each.is_leaf for each in inputs)
            self._inputs.update(each for each in inputs if each.is_leaf)
            if self._running in step.forwards:  # Lightning's training step, which calls it
                step.forwards.remove(self._running)
            enabled = torch.is_autocast_enabled(self._device)
            autocast = torch.get_autocast_dtype(self._device) if enabled else None
            args, kwargs = map_tensors(self._copied, [args, kwargs])
            generators = restorers(torch.device(self._device))
            self._running = Forward(args, kwargs, generators, autocast)
            step.forwards.append(self._running)
            step.training = {parameter_name(n): part.training for n, part in model.named_modules()}

    def _copied(self, tensor: Tensor) -> Tensor:
        found: Any = tensor.detach().to("cpu", copy=True)
        # Such as lengths of sequences. FSDP2 moves inputs to the device.
        found.stays = tensor.is_cpu and not isinstance(self._model, FSDPModule)
        return found

    def gathers(self) -> None:
        """Note a gather of matrices; between forward and backward, it is one of outputs."""
        if self._running is None and any(not each.backwards for each in self._step.forwards):
            self._step.unseen.add("outputs of other ranks")

    def _receive(self, watched: _Watched, gradient: Tensor | None, index: int = 0) -> None:
        """Add to the gradient of a tensor."""
        if gradient is not None:
            found = watched.probed if self._is_probing else watched.gradients
            found[index] = gradient.cpu() + found.get(index, 0)
            watched.backwards.add((self._is_probing, torch._C._current_graph_task_id()))

    def after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return copies of the outputs, whose gradients are those that come from outside."""
        if model is not self._model or self._running is None:
            return output
        forward, self._running = self._running, None
        indices = itertools.count()

        def watched(tensor: Tensor) -> Tensor:
            index = next(indices)
            if tensor.requires_grad:
                tensor, forward.is_watched = tensor.clone(), True
                tensor.grad_fn.metadata["distmp"] = "output"  # type: ignore[index, union-attr]
                tensor.register_hook(functools.partial(self._receive, forward, index=index))
                forward.norms[index] = float(tensor.detach().norm())
            return tensor

        return replaced_outputs(watched, output)


class _Collectives(TorchDispatchMode):
    """Counts collectives, those of DDP and FSDP included."""

    def __init__(self, counts: Counter[str], recorder: _Recorder) -> None:
        super().__init__()
        self._counts, self._recorder = counts, recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            found = [t._values() if t.is_sparse else t for t in tensors_in(args[:2])]
            dtypes = ", ".join(sorted({dtype_name(tensor.dtype) for tensor in found}))
            name = func._schema.name.rpartition("::")[2].strip("_")
            self._counts[f"{name}, {dtypes}, {sum(each.nbytes for each in found)} bytes"] += 1
            if "gather" in name and any(t.dim() > 1 and t.is_floating_point() for t in found):
                self._recorder.gathers()
        return func(*args, **(kwargs or {}))


# Functions whose random numbers depend on the dtype.
_DRAWS = re.compile(
    r"aten\.(native_dropout|randn?|normal|uniform|bernoulli|exponential)(_like)?_?\.(?!.*out).*"
)


class Draws(TorchDispatchMode):
    """Lists the dtypes in which random numbers are drawn, or draws float64 ones in those dtypes.

    A model that draws in the dtype of its activations would get other numbers in float64.

    Args:
        run: The one that has listed the dtypes; None for a new list.
    """

    def __init__(self, run: Draws | None = None) -> None:
        super().__init__()
        self._dtypes: list[torch.dtype] = run._dtypes if run else []
        self._run = iter(self._dtypes) if run else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _DRAWS.fullmatch(str(func)):
            return func(*args, **kwargs)
        if self._run is None:
            result = func(*args, **kwargs)
            drawn = result[0] if isinstance(result, tuple) else result
            self._dtypes.append(drawn.dtype if drawn.is_floating_point() else torch.float32)
            return result
        dtype = next(self._run, torch.float64)  # none are listed for a model in float64
        given, options = map_tensors(floating_point_cast(dtype), [args, kwargs])
        if func is torch.ops.aten.native_dropout.default:  # only the mask is drawn
            mask = func(*given, **options)[1]
            dropped = 0.0 if args[2] is False else args[1]
            return args[0] * (mask / (1 - dropped or 1.0)), mask
        if kwargs.get("dtype") is torch.float64:
            options["dtype"] = dtype
        drawn = floating_point_cast(torch.float64)(func(*given, **options))
        return args[0].copy_(drawn) if func._schema.is_mutable else drawn


@contextmanager
def recorded_steps(
    model: nn.Module, current: Callable[[], Step], collectives: Counter[str]
) -> Iterator[None]:
    """Record the forwards of a model and their losses; nothing stays installed at the end.

    Args:
        model: The model.
        current: Returns the step, before each forward.
        collectives: Number of calls by name, dtype and bytes, which grow.
    """
    model = unwrapped(model)
    recorder = _Recorder(current, model)
    eager = torch.compiler.disable  # Dynamo cannot trace them
    before = model.register_forward_pre_hook(eager(recorder.before), with_kwargs=True, prepend=True)
    after = model.register_forward_hook(eager(recorder.after))
    with before, after, recorder, _Collectives(collectives, recorder):
        yield


def replaced_outputs(function: Callable[[Tensor], Any], output: Any) -> Any:
    """Return what a model has returned with each tensor replaced, also those of attributes."""
    found = map_tensors(function, output)
    if found is output and hasattr(output, "__dict__") and not isinstance(output, Tensor):
        found = copy.copy(output)
        vars(found).update(map_tensors(function, vars(output)))
    return found
