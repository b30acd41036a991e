"""Trains the replica of a LightningModule that a rank has, with FP32 sums and master weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distmp.distributed.world import World
from distmp.errors import ConfigError, TrainingError
from distmp.integrations.lightning.conversion import Conversion
from distmp.parallel.module_buffers import ModuleBuffers
from distmp.parallel.replicated import Replicated
from distmp.parallel.strategy import parameter_name
from distmp.precision import PrecisionPolicy


class MasterWeightsReplica:
    """A `Replicated` model in the Trainer's order of calls.

    A step is `begin_microbatch`, forward and `backward` for each microbatch, then
    `begin_optimizer_step`, the optimizer, and `end_step`. After the last backward, gradients are
    the mean over ranks, as after torch's DDP.

    Args:
        module: The LightningModule, changed in place until `conversion.undo`.
        policy: A policy with 16-bit parameters and FP32 master weights.
        world: The ranks, each of which has a replica.

    Attributes:
        conversion: The module's 16-bit form, with the master weights as its FP32 values.
    """

    def __init__(self, module: nn.Module, policy: PrecisionPolicy, world: World) -> None:
        self._module = module
        self._ranks = world.world_size
        frozen = [value for value in module.parameters() if not value.requires_grad]

        def apply() -> None:
            self._replicated = Replicated(module, policy, world)

        self.conversion = Conversion(module, policy, frozen, apply)
        self._buffers = ModuleBuffers(module, world.group)
        self._optimizers: list[Optimizer] = []
        self._no_skip = torch.zeros((), device=world.device)
        self._state: Literal["ended", "accumulating", "reduced"] = "ended"
        self._backwards = 0
        self._in_optimizer, self._forwards_in_optimizer = False, 0
        self._find_masters()

    def step_masters(self, optimizers: list[Optimizer]) -> None:
        """Let the optimizers step the master weights instead of the module's parameters.

        Args:
            optimizers: Optimizers of the module's parameters, without state.

        Raises:
            ConfigError: If an optimizer has a trainable tensor that is not in the module, or state
                of a parameter.
        """
        self._optimizers = optimizers
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # In place: an optimizer may refer to the list.
                group["params"][:] = [self._stepped(optimizer, value) for value in group["params"]]

    def begin_microbatch(self) -> None:
        """Begin a step, unless one is being accumulated; called before forward."""
        self._forwards_in_optimizer += self._in_optimizer
        if self._forwards_in_optimizer > 1:
            raise TrainingError(
                "the optimizer calls its closure several times in a step (as LBFGS does), but "
                "MasterWeightsStrategy updates the 16-bit parameters only after the step; use "
                "strategy='ddp' with an autocast policy"
            )
        if self._state == "accumulating":
            return
        if self._state == "reduced":
            # The user's hook `optimizer_step` has called the closure, but not the optimizer.
            self._buffers.end_step(self._no_skip)
        self.check_model()
        self.step_masters(self._optimizers)
        self._buffers.begin_step()
        self._replicated.begin_step()
        self._state, self._backwards = "accumulating", 0

    @contextmanager
    def backward(self, loss: Tensor, *, last: bool) -> Iterator[None]:
        """Return the context of the backward of a microbatch.

        Args:
            loss: The tensor whose `backward` is called in the context.
            last: Whether this is the last microbatch of the step; its gradients are reduced.
        """
        self._backwards += 1
        self._replicated.begin_microbatch(last=last)
        with self._replicated.backward_context(loss):
            yield
        self._replicated.end_microbatch()
        if last:
            self._replicated.finish_gradients()
            if self._ranks > 1:  # the buckets have the sum
                torch._foreach_mul_(self._replicated.gradient_memory(), 1 / self._ranks)
            self._state = "reduced"

    def begin_optimizer_step(self) -> None:
        """Announce the optimizer's step, whose closure may run the last microbatch."""
        self._in_optimizer, self._forwards_in_optimizer = True, 0

    def end_step(self, found_inf: Tensor | None) -> None:
        """Update the module's parameters after the optimizer's step.

        Args:
            found_inf: 0-dim, above 0 if the step was skipped; None for a policy without loss scale.

        Raises:
            TrainingError: If the last microbatch had no backward, so that the gradients of the
                others were not reduced.
        """
        self._in_optimizer, self._forwards_in_optimizer = False, 0
        if self._state == "accumulating" and self._backwards > 0:
            raise TrainingError(
                f"training_step returned no loss for the last of {self._backwards + 1} or more "
                "microbatches, so the gradients of the others cannot be reduced; return a loss "
                "multiplied by 0 instead of None"
            )
        skipped = self._no_skip if found_inf is None else found_inf
        self.publish()
        if self._state == "reduced":
            self._replicated.end_step(skipped)
            self._buffers.end_step(skipped)
        self._state = "ended"

    def publish(self) -> None:
        """Round the master weights to the module's parameters."""
        self._replicated.copy_master_to_model()

    def check_model(self) -> None:
        """Refuse a model whose parameters were replaced, converted, moved or written to.

        Raises:
            ConfigError: Naming the first one.
        """
        self._replicated.check_model()

    def _find_masters(self) -> None:
        parameters = {parameter_name(name): p for name, p in self._module.named_parameters()}
        for name, master in self._replicated.optimizer_parameters():
            self.conversion.values[parameters[name]] = master
        self._known = {id(value) for value in self._module.parameters()}
        self._masters = {id(master) for master in self.conversion.values.values()}

    def _stepped(self, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        if id(parameter) in self._masters or not parameter.requires_grad:
            return parameter
        name = type(optimizer).__name__
        if id(parameter) not in self._known:
            raise ConfigError(
                "optimizer",
                name,
                f"steps a tensor of shape {tuple(parameter.shape)} that is no parameter of the "
                "LightningModule, so its gradients are not reduced over ranks; assign it to the "
                "module as torch.nn.Parameter in __init__ or configure_model",
            )
        if parameter in optimizer.state:
            raise ConfigError(
                "optimizer",
                name,
                "has state of 16-bit parameters before the first step, but it has to step FP32 "
                "master weights; use an optimizer that creates its state in step(), such as AdamW",
            )
        return self.conversion.values[parameter]  # type: ignore[index]
