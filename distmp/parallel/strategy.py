"""Base class of all strategies, which distribute parameters and gradients over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distmp.buckets.used_parameters import UsedParameters
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.optim.factories import OptimizerFactory
from distmp.optim.optimizer_tensors import build_on
from distmp.optim.owners import ShardedMatrix
from distmp.parallel.collective_order import CollectiveOrder
from distmp.parallel.module_buffers import ModuleTree, repeats_elements
from distmp.precision.keep import is_prepared
from distmp.precision.policy import DTYPES, PrecisionPolicy, dtype_word
from distmp.quantization.layers import LowPrecisionLayers
from distmp.scaling.step_decision import GradientPart
from distmp.utils.dtypes import as_sent, dtype_name, is_dtensor
from distmp.utils.tensor_trees import parameter_name

REBUILD = (
    "unlike when the engine was built; change a model before you build the engine, or build a new "
    "engine"
)

UNFROZEN = (
    "was unfrozen, but was frozen when the engine was built, so the optimizer does not step it; "
    "leave it trainable until the engine is built, then freeze it"
)

USED_DIRECTLY = (
    "the loss uses a parameter outside of the module for which FSDP gathers it (a penalty, a call "
    "of a submodule, a weight kept in FP32); use weight_decay, call the module, or use 'ddp'"
)


class Strategy(ABC):
    """Prepares a module for distributed training and processes its gradients in each step.

    A step calls, in this order: `compare_microbatches`; `begin_step`; for every microbatch
    `begin_microbatch`, forward, backward in `backward_context`, and `end_microbatch`;
    `finish_gradients`; `prepare_optimizer_grads`; the optimizer; `publish_weights`;
    `used.end_step`.

    Attributes:
        module: The prepared module; call it for forward.
        reason: What was chosen automatically and why, as text; empty if there was no choice.
        low_precision_layers: The linear layers with low-precision matmuls; None if the policy has
            none.
        used: Tracks which parameters have ever had a gradient, on any rank.
    """

    module: nn.Module
    used: UsedParameters
    reason: str = ""
    low_precision_layers: LowPrecisionLayers | None = None
    # None if the strategy allows ranks to run different numbers of microbatches.
    _order: CollectiveOrder | None = None

    @abstractmethod
    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the optimizer updates, with their parameter names."""

    def check_model(self) -> None:  # noqa: B027 - optional
        """Refuse a model whose parameters are no longer those that are trained.

        Raises:
            ConfigError: Naming the first parameter that was replaced, removed, converted, moved or
                unfrozen, or written to although its value is copied from a master weight.
        """

    def check_copies(self) -> None:  # noqa: B027 - optional
        """Refuse parameters that were written to although they are copied from master weights.

        Raises:
            ConfigError: Naming the first one.
        """

    def watch_copies(self) -> None:  # noqa: B027 - optional
        """Also refuse writes of the model to copies of its weights, in the next steps."""

    def build_optimizer(
        self, factory: OptimizerFactory, parameters: Sequence[tuple[str, Tensor]]
    ) -> torch.optim.Optimizer:
        """Build an optimizer on some of `optimizer_parameters`."""
        return build_on(factory, parameters)

    def compare_microbatches(self, microbatches: int) -> None:
        """Compare the number of microbatches of the next step between ranks, if it has changed.

        Raises:
            TrainingError: If the strategy needs the same number on every rank, and ranks differ.
        """
        if self._order is not None:
            self._order.compare_microbatches(microbatches)

    def compare_next(self, has_next: bool) -> None:
        """Compare between ranks whether an evaluation has another microbatch.

        Raises:
            TrainingError: If the strategy needs the same number on every rank, and ranks differ.
        """
        if self._order is not None:
            self._order.compare_next(has_next)

    @abstractmethod
    def begin_step(self) -> None:
        """Start from zero gradients; gradients of an unfinished step are discarded."""

    @abstractmethod
    def begin_microbatch(self, *, last: bool) -> None:
        """Announce the forward and backward of one microbatch."""

    def backward_context(self, loss: Tensor) -> AbstractContextManager[None]:
        """Return the context of the backward of a microbatch.

        Args:
            loss: The tensor whose `backward` is called in the context.
        """
        return nullcontext()

    def end_microbatch(self) -> Tensor | None:
        """End a microbatch after its backward; return whether it counts.

        Returns:
            0-dim bool on the device, or None if every microbatch counts.
        """
        return None

    @abstractmethod
    def finish_gradients(self) -> None:
        """Wait until gradients are the sum over all microbatches and ranks."""

    @abstractmethod
    def gradients(self) -> list[GradientPart]:
        """Return the reduced gradients that this rank holds, FP32."""

    @abstractmethod
    def gradient_memory(self) -> dict[str, list[Tensor]]:
        """Return the tensors that hold gradients of the current step, FP32, by their use."""

    def gradient_shards(self) -> list[Tensor]:
        """Return this rank's shard of every bucket, for norms in a fixed order of additions."""
        raise NotImplementedError(f"{type(self).__name__} has no buckets")

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a state tensor of a parameter as checkpoints store it, shards as `FlatShard`."""
        return tensor

    def sharded_matrix(self, name: str) -> ShardedMatrix | None:
        """Return how `shard_group` divides a matrix; None if every rank updates all of it."""
        return None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one copy of the optimizer's tensors."""
        return None

    def prepare_optimizer_grads(self) -> None:  # noqa: B027 - optional
        """Convert the reduced gradients to the dtype of 16-bit weights."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Copy the optimizer's weights to the parameters of the module, for the next forward."""

    def units(self) -> list[tuple[str, nn.Module]]:
        """Return the modules, by name, that gather their parameters before forward, root first."""
        return [("", self.module)]

    def frozen_and_buffers(self) -> dict[str, Tensor]:
        """Return frozen parameters and buffers by name, each tensor once."""
        # By identity, not by name: a tied weight has several names.
        seen = {id(value) for value in self.module.parameters() if value.requires_grad}
        found = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                found[parameter_name(name)] = value
        return found


def check_parameters(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Refuse parameters that the policy cannot convert.

    Raises:
        ConfigError: For an integer parameter under a policy with 16-bit parameters, and for a
            trainable parameter that is not FP32 or 16-bit floating point.
    """
    error = partial(ConfigError, "precision.policy", policy.name)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise error(
                f"trains FP32 weights, but parameter {name!r} is {dtype_name(parameter.dtype)}; "
                "convert it with .float() first, or a complex one with torch.view_as_real",
            )
        if not parameter.is_floating_point() and policy.casts_parameters:
            raise error(
                f"converts parameters to {dtype_name(policy.compute_dtype)}, but parameter "
                f"{name!r} is {dtype_name(parameter.dtype)}; register it as a buffer, or use "
                f"{dtype_word(policy.compute_dtype)}-autocast",
            )


def check_model(model: object) -> None:
    """Refuse an object that is not a model, and a model that is already wrapped or sharded.

    Raises:
        ConfigError: Naming the object or the parameter.
    """
    kind = type(model).__name__
    error = partial(ConfigError, "model", kind)
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            raise ConfigError("model", model.__name__, f"is a class; pass {model.__name__}(...)")
        raise error("is not a torch.nn.Module; pass the model itself")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise error(
            "reduces gradients itself; pass the wrapped model (model.module) and choose a strategy"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise error("is scripted and takes no hooks; pass the plain module")
    if is_prepared(model):
        raise error(
            "has the dtypes and hooks of another engine, perhaps of one that was refused; build a "
            "new model for each engine"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise error("has no parameter to train; requires_grad is False for all")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            problem = (
                "has no shape yet; give its layer all sizes, or run a batch through the model first"
            )
        elif tensor.is_inference() or torch.is_inference_mode_enabled():
            problem = "would train in inference mode; build model and engine outside of it"
        elif is_dtensor(tensor):
            problem = "is already sharded; build a new model for another engine"
        elif tensor.layout != torch.strided:
            problem = "is sparse; use a dense tensor, such as tensor.to_dense()"
        elif repeats_elements(tensor):  # a collective would write behind its memory
            problem = "has several elements in one place, as expand() leaves it; use .contiguous()"
        else:
            continue
        raise ConfigError("model", name, problem)


# Faster than a loop in Python.
_KIND = attrgetter("dtype", "device")


class KnownParameters:
    """Detects trained parameters that were replaced, removed or added.

    Args:
        model: The model with its final parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {parameter_name(name) for name, _ in model.named_parameters()}
        self._trained = dict(trainable(model))
        self._frozen = [each for each in model.parameters() if not each.requires_grad]
        self._tree = ModuleTree(model)
        self._kinds = self._current_kinds()

    def _current_kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        return list(map(_KIND, self._trained.values()))

    def _is_unchanged(self) -> bool:
        return (
            self._current_kinds() == self._kinds
            and not any(parameter.requires_grad for parameter in self._frozen)
            and self._tree.is_unchanged()
        )

    def check(self, model: nn.Module) -> None:
        """Refuse a model with different parameters.

        Raises:
            ConfigError: Naming the first parameter that was replaced, removed, converted, moved,
                unfrozen or added.
        """
        if self._is_unchanged():
            return
        current = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
        for (name, known), (dtype, device) in zip(self._trained.items(), self._kinds, strict=True):
            parameter = current.get(name)
            if parameter is None:
                problem = "is no longer in the model"
            elif parameter is not known:
                problem = "is a different tensor now"
            elif parameter.dtype != dtype:
                problem = f"was {dtype_name(dtype)} and is {dtype_name(parameter.dtype)} now"
            elif parameter.device.type != device.type:
                problem = f"was on {device.type} and is on {parameter.device.type} now"
            else:
                continue
            raise ConfigError("model", name, f"{problem}, {REBUILD}")
        for name, parameter in current.items():
            if parameter.requires_grad and name not in self._trained:
                problem = UNFROZEN if name in self._names else f"is new, {REBUILD}"
                raise ConfigError("model", name, problem)


@torch.no_grad()
def make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters memory in row-major order, in which their shards are ranges."""
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers; those on the meta device stay there."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


@torch.no_grad()
def store_parameters(
    module: nn.Module, dtype: torch.dtype = torch.float32, except_for: Iterable[nn.Module] = ()
) -> None:
    """Convert trainable parameters in place to `dtype`, in which the optimizer updates them."""
    kept = {id(parameter) for part in except_for for parameter in part.parameters()}
    for parameter in module.parameters():
        if parameter.requires_grad and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def broadcast_from_rank_zero(module: nn.Module, world: World) -> None:
    """Copy parameters and buffers of rank 0 to all ranks, except those on the meta device."""
    if world.group is None:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            sent = tensor.contiguous()  # a broadcast ignores strides
            dist.broadcast(as_sent(sent.detach()), src=0, group=world.group)
            tensor.copy_(sent)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return trainable parameters with their names, in order of registration."""
    return [
        (parameter_name(name), parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
