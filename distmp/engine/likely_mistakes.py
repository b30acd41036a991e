"""Checks steps for likely mistakes of the caller, without changing their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distmp.data import IGNORED
from distmp.engine.outcome import MicrobatchStats
from distmp.engine.setup import EngineSetup
from distmp.engine.step_checks import check_weight
from distmp.errors import listed, require
from distmp.parallel.global_mean import COARSE, is_coarse, is_mean
from distmp.precision.policy import dtype_word
from distmp.utils.autograd import other_parameters
from distmp.utils.dtypes import dtype_name
from distmp.utils.tensor_trees import checksum, parameter_name


class FirstStep:
    """Checks the first step, in which the host may wait to read values.

    It also checks later steps until a parameter has a gradient. Every hook may raise an error,
    which ends the step.

    Args:
        setup: The model and the ranks; all of them make the same calls.

    Attributes:
        is_done: Whether all checks are complete, so that later steps need none.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.is_done = False
        self._setup = setup
        self._has_gradient = False
        # Whether likely mistakes are still to be found.
        self._warns = setup.config.first_step_checks
        # One of each kind, by its beginning: numbers in it differ between microbatches.
        self._warnings: dict[str, str] = {}

    def before(self, batch: Any) -> None:
        """Compare the first microbatches of ranks; all ranks call it."""
        world = self._setup.world
        compares = self._warns and world.world_size > 1
        if compares and len({*world.ranks.gather(checksum(batch))}) == 1:
            self._warnings["same batch"] = (
                f"all {world.world_size} ranks were given the same first microbatch, so "
                "further ranks do not help; give each rank its own samples (DistributedSampler, or "
                "a seed that depends on the rank)"
            )

    def after_forward(self, batch: Any, loss: Tensor, weight: Tensor | float) -> None:
        """Refuse a negative weight, and find mistakes in the result of the loss function."""
        if not self._warns:
            return
        check_weight(float(weight))
        found = [*_loss_warnings(batch, loss, weight)]
        # Under a sharded strategy the graph has the gathered parameters, which are other tensors.
        if not self._setup.is_sharded:
            found += _outside_of(self._setup.strategy.module, loss)
        self._warnings |= {text.partition(",")[0]: text for text in found}

    def after_gradients(self, stats: MicrobatchStats) -> None:
        """Look for a gradient.

        Raises:
            ConfigError: If no trained parameter has had a gradient so far.
        """
        strategy, loss = self._setup.strategy, self._setup.loss
        trained = [tensor for _, tensor in strategy.optimizer_parameters()]
        self._has_gradient = any(
            tensor.grad is not None for tensor in (*trained, *strategy.module.parameters())
        )
        # A dropped microbatch does not count. Only this check reads the flags: the host waits.
        trains = self._has_gradient or any(bool(flag) for flag in stats.dropped)
        problem = (
            f"gives none of the {len(trained)} trained parameters a gradient; run the module "
            "that is passed to it, not another one, and return a loss of its output"
        )
        require(trains, "loss", getattr(loss, "__name__", type(loss).__name__), problem)

    def after(self) -> list[str]:
        """End the step, and return warnings about likely mistakes."""
        self._warns, self.is_done = False, self._has_gradient
        warned, self._warnings = self._warnings, {}
        return [*warned.values()]


MEAN = (
    "{} looks like a mean, and its weight is {:g}, so {} is divided by the weight twice; return "
    "the sum (reduction='sum', or mean * weight)"
)
# Functions of torch whose result is the number in their first argument.
_COPIES = ("item", "tolist", "__float__", "numpy", "detach", "cpu", "to", "float", "double")


class Means(TorchFunctionMode):
    """Records means in a `with` block. Most metrics have no autograd graph that shows one."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[Any] = []

    def include(self, values: Iterable[Any]) -> bool:
        """Return whether one of the values is a mean, or the same number as one."""
        return any(value is mean for value in values for mean in self._results)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        is_mean = "mean" in (name, (kwargs or {}).get("reduction"))
        if is_mean or (name in _COPIES and self.include(args[:1])):
            self._results.append(result)
        return result


# Several, because another optimizer may accumulate gradients.
_WATCHED_STEPS = 16
TRAINED_TWICE = (
    "weights were written to before several of the first steps, as by another optimizer's step(), "
    "which trains them twice: remove it and its zero_grad(), which engine.step replaces; "
    "after other changes between steps, call engine.publish_weights()"
)


class OtherOptimizer:
    """Finds a second optimizer that updates the weights between steps of the engine.

    Args:
        versions: Returns how often weights were written to, by any code.
        is_active: Whether to watch the first steps.
    """

    def __init__(self, versions: Callable[[], int], *, is_active: bool) -> None:
        self._versions = versions
        self._left = _WATCHED_STEPS if is_active else 0
        self._writes = 0
        self._version: int | None = None

    def accept_writes(self) -> None:
        """Accept the current weights, after a step and after writes that are intended."""
        self._version = self._versions() if self._left else None

    def before_step(self) -> list[str]:
        """Return a warning if other code has written to the weights before three steps."""
        if self._version is None:
            return []
        is_written = self._versions() != self._version
        self._left, self._writes = self._left - 1, self._writes + is_written
        return [TRAINED_TWICE] if is_written and self._writes == 3 else []


class EvaluationMode:
    """Finds training in evaluation mode, which changes dropout and BatchNorm without an error.

    Args:
        model: The model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {parameter_name(name): part for name, part in model.named_modules()}
        self._checked: list[str] = []
        self._is_done = False

    def evaluating(self) -> list[str]:
        """Return the names of the modules in evaluation mode, which ranks have to share."""
        return [name for name, part in self._modules.items() if not part.training]

    def warning(self) -> str:
        """Return a warning about the latest step, once; "" if there is none.

        A module without submodules, such as a frozen BatchNorm, may be in evaluation mode, unless
        it drops values.
        """
        if self._is_done:
            return ""
        evaluating = self.evaluating()
        changed, self._checked = evaluating != self._checked, evaluating
        if not (changed and (found := self._trained_in_evaluation())):
            return ""
        self._is_done = True
        return (
            f"trained in evaluation mode: {listed(found)} (as from_pretrained and eval() leave "
            "it), so dropout drops nothing, and BatchNorm uses its running statistics; call "
            "engine.model.train(), or, if it is intended, "
            'warnings.filterwarnings("ignore", "trained in evaluation mode")'
        )

    def _trained_in_evaluation(self) -> list[str]:
        """Return the outermost modules that are trained in evaluation mode."""
        found: list[str] = []
        for name, part in self._modules.items():
            if part.training or any(not outer or name.startswith(f"{outer}.") for outer in found):
                continue
            parent = self._modules[name.rpartition(".")[0]]
            holds_parts = not name or any(True for _ in part.children())
            drops = parent.training and _has_disabled_dropout(part) and _is_trained(parent)
            if drops or (holds_parts and _is_trained(part)):
                found.append(name)
        return [
            f"{name!r} ({type(self._modules[name]).__name__})" if name else "the model"
            for name in found
        ]


def _has_disabled_dropout(module: nn.Module) -> bool:
    """Return whether a module has dropout that only its evaluation mode disables."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and _is_trained(module)
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _loss_warnings(batch: Any, loss: Tensor, weight: Tensor | float) -> Iterator[str]:
    if isinstance(weight, Tensor) and is_coarse(weight):
        yield f"the weight is counted in {dtype_name(weight.dtype)}, which {COARSE}"
    weight = float(weight)
    if dtype := _low_precision_dtype(loss):
        yield (
            f"the loss is computed in {dtype_name(dtype)}, too coarse for a sum over "
            "many samples; compute it outside of the model from FP32 logits (logits.float()), or "
            f"use the policy {dtype_word(dtype)}-autocast"
        )
    if _reads_two_rows(batch, weight):
        yield (
            f"the weight of a microbatch, a tensor of shape {tuple(batch.shape)}, is that of one "
            "row, as if its first two rows were inputs and targets; if the list given to "
            "engine.step is one batch, such as [inputs, targets], pass engine.step([batch])"
        )
    elif weight > 1 and is_mean(loss, weight, host_waits=True):
        yield MEAN.format("the loss", weight, "the gradient")


def _outside_of(module: nn.Module, loss: Tensor) -> Iterator[str]:
    outside = other_parameters(loss, {*module.parameters()})
    if outside:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in outside[:3])
        yield (
            f"the loss depends on parameters outside of the model, of shape {shapes}, which the "
            "engine does not train, and their gradients have its scale; put their module and the "
            "model into one torch.nn.ModuleDict, or freeze them with requires_grad_(False)"
        )


def _low_precision_dtype(loss: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype of a loss, or of the scalar that it was cast or scaled from."""
    if loss.dtype.itemsize < 4:
        return loss.dtype
    node = loss.grad_fn
    while node is not None:
        (output, *others) = node._input_metadata
        if others or len(output.shape):
            return None
        if output.dtype.itemsize < 4:
            return output.dtype
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _reads_two_rows(batch: Any, weight: float) -> bool:
    """Return whether the weight is the number of targets in the second row of three or more."""
    if not isinstance(batch, Tensor) or batch.dim() < 2 or len(batch) < 3 or weight == len(batch):
        return False
    targets = batch[1]
    return targets.numel() > 1 and weight == int((targets != IGNORED).sum())
