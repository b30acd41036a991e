"""What every strategy provides: how parameters and gradients are spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.parallel.world import World
from distmp.precision.policy import PrecisionPolicy, dtype_name
from distmp.scaling import GradientPart

STRATEGIES = ("auto", "single", "ddp", "fsdp", "hsdp", "fsdp1")


class Strategy(ABC):
    """Prepares a module for distributed training and carries its gradients through one step.

    A step calls, in this order: `begin_step`; for every microbatch `begin_microbatch`, forward and
    backward; `finish_gradients`; the optimizer; `publish_parameters`.

    Attributes:
        module: The prepared module; forward goes through it.
        reason: What was chosen and why, in words; empty if there was nothing to choose.
    """

    module: nn.Module
    reason: str = ""

    @abstractmethod
    def optimizer_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the FP32 tensors that the optimizer steps, named as in the model."""

    @abstractmethod
    def begin_step(self) -> None:
        """Start from zero gradients, whatever the step before left behind."""

    @abstractmethod
    def begin_microbatch(self, *, last: bool) -> None:
        """Announce the forward and backward of one microbatch."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Wait until gradients are the sum over all microbatches and ranks."""

    @abstractmethod
    def gradients(self) -> list[GradientPart]:
        """Return this rank's part of the reduced gradients, FP32."""

    @abstractmethod
    def publish_parameters(self) -> None:
        """Make what the optimizer stepped visible to the next forward."""

    def units(self) -> list[tuple[str, nn.Module]]:
        """Return the modules, by name, on whose entry parameters become whole, the root first."""
        return [("", self.module)]

    def untrained(self) -> dict[str, Tensor]:
        """Return frozen parameters and buffers under the names of the model."""
        # By identity, not by name: a tied weight has several names.
        trained = {id(value) for value in self.module.parameters() if value.requires_grad}
        state = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if id(value) not in trained}

    def whole_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint can hold in place of this rank's tensors.

        These are DTensors, and tensors that are the same on all ranks. Every rank has to call it.

        Args:
            state: As `Engine.state_dict` names it; what the optimizer steps, and its state.
        """
        return state

    def local_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of what `whole_state` has under `name`."""
        return whole

    def local_shape(self, name: str, whole: torch.Size) -> torch.Size:
        """Return the shape of this rank's part of what has the shape `whole`."""
        return self.local_part(name, torch.empty(whole, device="meta")).shape


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
                f"{policy.name}-autocast",
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
