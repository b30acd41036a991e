"""What every strategy provides: how parameters and gradients are spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distmp.distributed.world import World
from distmp.errors import ConfigError, nearest
from distmp.optim import OptimizerFactory
from distmp.optim.stepped import build_on
from distmp.precision.policy import PrecisionPolicy, dtype_word
from distmp.scaling import GradientPart
from distmp.utils.dtypes import dtype_name

STRATEGIES = ("auto", "single", "ddp", "fsdp", "hsdp", "fsdp1")
# Names of the release before, and the strategy with the same numbers that they select now.
FORMER_STRATEGIES = {"ddp-torch": "ddp"}
REBUILD = "unlike when the engine was built; change a model before that, or build another engine"
ON_NONFINITE = ("skip_step", "drop_microbatch")


@dataclass(frozen=True)
class AccumulationSettings:
    """How gradients of whole models are accumulated, reduced and stepped.

    Attributes:
        shard_optimizer: Every rank keeps and steps only its share of FP32 weights and optimizer
            state.
        reproducible: The same bits at every power-of-two number of ranks.
        on_nonfinite: "skip_step", or "drop_microbatch" to leave out a microbatch whose gradients
            are not finite.

    Raises:
        ConfigError: If `on_nonfinite` is something else.
    """

    shard_optimizer: bool = False
    reproducible: bool = False
    on_nonfinite: str = "skip_step"

    def __post_init__(self) -> None:
        for name in ("shard_optimizer", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be True or False")
        if self.on_nonfinite not in ON_NONFINITE:
            raise ConfigError(
                "precision.on_nonfinite",
                self.on_nonfinite,
                nearest(self.on_nonfinite, ON_NONFINITE),
            )

    @property
    def drop_non_finite(self) -> bool:
        """Whether a microbatch can be left out."""
        return self.on_nonfinite == "drop_microbatch"

    def refuse_for(self, strategy: str) -> None:
        """Refuse what a strategy that shards the model itself does not do.

        Raises:
            ConfigError: Naming the first setting that does not fit.
        """
        problems = {
            "shard_optimizer": "shards the optimizer by itself",
            "reproducible": "leaves the order of its sums to torch",
            "on_nonfinite": "reduces a gradient before anybody can look at it",
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                section = "precision." if field.name == "on_nonfinite" else ""
                raise ConfigError(
                    f"{section}{field.name}",
                    value,
                    f"needs strategy single or ddp; {strategy} {problems[field.name]}",
                )


class Strategy(ABC):
    """Prepares a module for distributed training and carries its gradients through one step.

    A step calls, in this order: `announce`; `begin_step`; for every microbatch `begin_microbatch`,
    forward, backward and `end_microbatch`; `finish_gradients`; `prepare_optimizer_grads`; the
    optimizer; `copy_master_to_model`; `end_step`.

    Attributes:
        module: The prepared module; forward goes through it.
        reason: What was chosen and why, in words; empty if there was nothing to choose.
    """

    module: nn.Module
    reason: str = ""

    @property
    def model(self) -> nn.Module:
        """The model inside `module`, which names parameters as the user does."""
        return self.module

    @abstractmethod
    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the FP32 tensors that the optimizer steps, named as in the model."""

    def unfrozen(self) -> list[tuple[str, nn.Parameter]]:
        """Return parameters that require gradients and are not trained yet."""
        return []

    def adopt(self, unfrozen: list[tuple[str, nn.Parameter]]) -> list[tuple[str, Tensor]]:
        """Start to train what `unfrozen` has returned; all ranks must have the same ones.

        Returns:
            What the optimizer is to step from now on in addition, see `optimizer_parameters`.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no more parameters")

    def check_model(self) -> None:  # noqa: B027 - not all can tell
        """Refuse a model whose parameters are no longer those that are trained.

        Raises:
            ConfigError: Naming the first parameter that was replaced, removed, converted, moved, or
                written to where its value comes from elsewhere.
        """

    def build_optimizer(
        self, factory: OptimizerFactory, parameters: Sequence[tuple[str, Tensor]]
    ) -> torch.optim.Optimizer:
        """Build an optimizer on some of `optimizer_parameters`."""
        return build_on(factory, parameters)

    def announce(self, microbatches: int) -> None:  # noqa: B027 - most need not agree on it
        """Say how many microbatches the next step has on this rank.

        Raises:
            TrainingError: If the strategy needs as many on every rank, and another rank has others.
        """

    @abstractmethod
    def begin_step(self) -> None:
        """Start from zero gradients, whatever the step before left behind."""

    @abstractmethod
    def begin_microbatch(self, *, last: bool) -> None:
        """Announce the forward and backward of one microbatch."""

    def end_microbatch(self) -> Tensor | None:
        """Take note of the end of backward; return whether the microbatch counts, if that is open.

        Returns:
            0-dim bool on the device, or None where every microbatch counts.
        """
        return None

    @abstractmethod
    def finish_gradients(self) -> None:
        """Wait until gradients are the sum over all microbatches and ranks."""

    @abstractmethod
    def gradients(self) -> list[GradientPart]:
        """Return this rank's part of the reduced gradients, FP32."""

    def gradient_memory(self) -> list[Tensor]:
        """Return all memory in which gradients wait for the end of the step, FP32."""
        return [tensor for part in self.gradients() for tensor in part.tensors]

    def partial_sums(self) -> list[Tensor]:
        """Return what is held besides where microbatches are kept apart, FP32."""
        return []

    def gradient_shards(self) -> list[Tensor]:
        """Return this rank's shard of every bucket, for measurements in a fixed order."""
        raise NotImplementedError(f"{type(self).__name__} has no buckets")

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of a parameter's state as checkpoints know it: as a part of the whole."""
        return tensor

    def prepare_optimizer_grads(self) -> None:  # noqa: B027 - most have nothing to do
        """Give the optimizer the final gradients, where it steps weights in 16 bits."""

    @abstractmethod
    def copy_master_to_model(self) -> None:
        """Make what the optimizer stepped visible to the next forward."""

    @abstractmethod
    def end_step(self, skipped: Tensor) -> None:
        """Take note of whether the step, 0-dim and not 0, was skipped; the host does not wait."""

    @property
    @abstractmethod
    def unused(self) -> list[str]:
        """Names of parameters that no rank has ever used, see `UsedParameters`; may be set."""

    @unused.setter
    @abstractmethod
    def unused(self, names: Iterable[str]) -> None: ...

    def units(self) -> list[tuple[str, nn.Module]]:
        """Return the modules, by name, on whose entry parameters become whole, the root first."""
        return [("", self.model)]

    def untrained(self) -> dict[str, Tensor]:
        """Return frozen parameters and buffers under the names of the model, each once."""
        # By identity, not by name: a tied weight has several names.
        seen = {id(value) for value in self.module.parameters() if value.requires_grad}
        found = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                found[parameter_name(name)] = value
        return found


def check_parameters(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Refuse parameters that the policy cannot store without changing what the model means.

    Raises:
        ConfigError: For an integer parameter under a policy with 16-bit parameters, and for a
            trainable parameter that is not FP32 or 16-bit floating point.
    """
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() and policy.casts_parameters:
            raise ConfigError(
                "precision.policy",
                policy.name,
                f"holds parameters in {dtype_name(policy.compute_dtype)}, but parameter {name!r} "
                f"is {dtype_name(parameter.dtype)}; register it as a buffer, or use "
                f"{dtype_word(policy.compute_dtype)}-autocast",
            )
        if parameter.requires_grad and parameter.dtype not in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            raise ConfigError(
                "precision.policy",
                policy.name,
                f"trains FP32 weights, but parameter {name!r} is {dtype_name(parameter.dtype)}; "
                "convert the model with .float() first",
            )


def check_model(model: object) -> None:
    """Refuse what is no model, or one that is wrapped or sharded already.

    Raises:
        ConfigError: Naming what came in its place.
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            raise ConfigError("model", model.__name__, f"is a class; pass {model.__name__}(...)")
        raise ConfigError("model", kind, "is no torch.nn.Module; pass the model itself")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigError(
            "model",
            kind,
            "reduces gradients by itself; pass the model inside, model.module, and choose a "
            "strategy",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "model", kind, "has no parameter to train; requires_grad is False for all"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            problem = "has no shape yet; run a batch through the model first"
        elif tensor.is_meta:
            problem = "is on the meta device, without data; use model.to_empty() and initialize it"
        elif tensor.is_inference():
            problem = "was made in inference mode; build the model outside of it"
        elif is_sharded(tensor):
            problem = "is sharded already; build the model anew for another engine"
        else:
            continue
        raise ConfigError("model", name, problem)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without an import of that class."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def group_of(world: World, strategy: str) -> dist.ProcessGroup:
    """Return the ranks' process group.

    Raises:
        ConfigError: If the process runs alone.
    """
    if world.group is None:
        raise ConfigError(
            "strategy", strategy, "needs a process group; start the run with torchrun"
        )
    return world.group


class KnownParameters:
    """Watches that a model keeps the parameters that are trained, and that none are added.

    Args:
        model: It.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {parameter_name(name) for name, _ in model.named_parameters()}
        self._trained = {
            name: (parameter, parameter.dtype, parameter.device.type)
            for name, parameter in trainable(model)
        }

    def check(self, model: nn.Module) -> None:
        """Refuse a model with other parameters.

        Raises:
            ConfigError: Naming the first one that was replaced, removed, converted, moved or added.
        """
        found = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
        for name, (known, dtype, device) in self._trained.items():
            parameter = found.get(name)
            if parameter is None:
                problem = "is no longer in the model"
            elif parameter is not known:
                problem = "is another tensor now"
            elif parameter.dtype != dtype:
                problem = f"was {dtype_name(dtype)} and is {dtype_name(parameter.dtype)} now"
            elif parameter.device.type != device:
                problem = f"was on {device} and is on {parameter.device.type} now"
            else:
                continue
            raise ConfigError("model", name, f"{problem}, {REBUILD}")
        for name, parameter in found.items():
            if parameter.requires_grad and name not in self._names:
                raise ConfigError("model", name, f"is new, {REBUILD}")


@torch.no_grad()
def store_parameters_in_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Widen trainable 16-bit parameters to FP32, in place; nothing is lost."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@torch.no_grad()
def narrow_parameters(
    module: nn.Module, dtype: torch.dtype, except_for: Iterable[nn.Module]
) -> None:
    """Round trainable parameters to the type that the optimizer steps, in place."""
    kept = {id(parameter) for part in except_for for parameter in part.parameters()}
    for parameter in module.parameters():
        if parameter.requires_grad and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def broadcast_from_rank_zero(module: nn.Module, world: World) -> None:
    """Make parameters and buffers of every rank those of rank 0, bit by bit."""
    if world.group is None:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0, group=world.group)


def parameter_name(name: str) -> str:
    """Return the name in the model, without what `torch.compile` and FSDP1 put into it."""
    return name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "")


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, with their names, in order of registration."""
    return [
        (parameter_name(name), parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
