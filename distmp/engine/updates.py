"""Builds the optimizer and its learning rates, and applies or skips its updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distmp.distributed.comparison import on_host
from distmp.errors import TrainingError
from distmp.optim.factories import OptimizerFactory, ScheduleFactory
from distmp.optim.learning_rates import LearningRates
from distmp.optim.muon import Muon
from distmp.optim.optimizer_tensors import OptimizerTensors, set_rounding
from distmp.optim.state import (
    is_number,
    number_tensor,
    prepare_for_device_skip,
    start_momentum,
    to_number,
)
from distmp.parallel.matrices import place_matrices, place_shards
from distmp.parallel.strategy import Strategy
from distmp.precision import PrecisionPolicy
from distmp.scaling.step_decision import PRESCALE, StepDecision, divisor_fits
from distmp.utils.host_copy import cpu_number
from distmp.utils.tensor_trees import checksum

HALF_WAY = (
    "the last engine.step failed during its update, or a state was loaded in part, so some weights "
    "may be changed and others not; continue from a checkpoint (engine.load)"
)

# End of the names of learning rates among the options.
RATE = "/lr"


class Updates:
    """Builds an optimizer on the tensors of a strategy, and applies or skips its updates.

    Args:
        factory: Builds the optimizer on `[(name, tensor), ...]`.
        schedule: Builds a scheduler on the optimizer; None keeps the rates.
        strategy: Holds the tensors to update and their gradients.
        policy: The precision policy.
        device: The device that computes the gradients.

    Attributes:
        optimizer: The optimizer.
        names: Name of each tensor that the optimizer updates, by its `id`.
        tensors: Checks what the optimizer updates.
        learning_rates: The learning rates.
        skips_on_device: Whether the optimizer skips on the device, so that the host need not wait.
        max_applied: Upper bound of the updates applied, known without waiting for the device.
        is_complete: Whether the last update was counted, or the last load has ended.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        schedule: ScheduleFactory | None,
        strategy: Strategy,
        policy: PrecisionPolicy,
        device: torch.device,
    ) -> None:
        parameters = strategy.optimizer_parameters()
        self.optimizer = strategy.build_optimizer(factory, parameters)
        self.names = {id(tensor): name for name, tensor in parameters}
        self._strategy = strategy
        self._rounds = any(tensor.dtype != torch.float32 for _, tensor in parameters)
        set_rounding(self.optimizer, policy)
        place_matrices(self.optimizer, strategy, self.names)
        place_shards(self.optimizer, strategy, self.names)
        self.skips_on_device = prepare_for_device_skip(self.optimizer)
        self.tensors = OptimizerTensors(self.optimizer, parameters, strategy.module)
        self.learning_rates = LearningRates(
            self.optimizer, schedule, device, on_device=self.skips_on_device
        )
        self.max_applied = 0
        self.is_complete = True
        # Does not wait for the rates of a schedule, which are on the device.
        self._scheduled = {} if schedule is None else {"lr": None}
        numbers = self._numbers().items()
        self._first = {name: value for name, value in numbers if not name.endswith(RATE)}

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse changes of the optimizer that would have no effect.

        Args:
            optimizer: The attribute `optimizer` of the engine.

        Raises:
            ConfigError: If it was replaced, or has other tensors.
            TrainingError: After an update or a load that has failed.
        """
        if not self.is_complete:
            raise TrainingError(HALF_WAY)
        self.tensors.check(optimizer)

    def options(self) -> dict[str, Tensor]:
        """Return copies of the numbers in parameter groups that a state contains, see `_numbers`.

        These are the learning rates, unless a schedule sets them, and what has changed, because
        some optimizers count in their groups. Other numbers are those of the configuration.
        """
        found = self._numbers()
        options = {name: value for name, value in found.items() if value != self._first.get(name)}
        return {name: number_tensor(value) for name, value in options.items()}

    def restore_options(self, saved: Mapping[str, Tensor]) -> None:
        """Set the numbers in parameter groups to those of a state, see `options`.

        Numbers that it lacks had not changed: they get their first value. Rates stay unchanged.
        Numbers of groups with other parameters are ignored.
        """
        values = self._first | {name: to_number(tensor) for name, tensor in saved.items()}
        groups = self.groups()
        for name, value in values.items():
            parameters, _, key = name.partition("/")
            group = groups.get(parameters, {})
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = [*value] if isinstance(group.get(key), list) else value

    def _numbers(self) -> dict[str, Any]:
        """Return the numbers in all groups by `group/key`, without the rates of a schedule."""
        return {
            f"{name}/{key}": value
            for name, group in self.groups().items()
            for key, value in on_host({**group, **self._scheduled}, waits=True)
            if is_number(value)
        }

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return the parameter groups, each by a checksum of the names of its parameters."""
        groups = {}
        for group in self.optimizer.param_groups:
            names = sorted(self.names.get(id(tensor), "") for tensor in group["params"])
            groups[f"{checksum(names):08x}"] = group
        return groups

    def apply(self, decision: StepDecision) -> None:
        """Step the optimizer, or leave weights and state unchanged, according to the decision.

        The caller counts the step, and then sets `is_complete`.
        """
        if self.skips_on_device:
            if self.max_applied == 0 or len(self.optimizer.state) < len(self.names):
                start_momentum(self.optimizer)  # users have set momentum, or cleared state
            self.max_applied += 1  # the same bound on ranks with and without hooks
        self.is_complete = False
        decision = self._fit_divisor(decision)
        if self.skips_on_device and not self.tensors.runs_other_code():
            if self._rounds:
                self._divide_gradients(decision)
            # Read by torch's fused optimizers: they divide by grad_scale and skip on found_inf.
            self.optimizer.grad_scale = None if self._rounds else decision.grad_scale  # type: ignore[attr-defined]
            # Without it, a kernel less for each step count. On CPUs the host knows it.
            known = decision.found_inf.device.type == "cpu" and not cpu_number(decision.found_inf)
            self.optimizer.found_inf = None if known else decision.found_inf  # type: ignore[attr-defined]
            self._strategy.prepare_optimizer_grads()
            self.tensors.step()
        elif decision.found_inf.item() == 0:
            # Other code sees, and may change, the gradients of the mean, and runs in no skipped
            # step.
            if self.skips_on_device:
                self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
            else:
                self.max_applied += 1
            self._divide_gradients(decision)
            self._strategy.prepare_optimizer_grads()
            self.tensors.step_in_place()
        elif self.skips_on_device and isinstance(self.optimizer, Muon) and self.optimizer.exchanges:
            # Ranks may differ in hooks, but not in the exchange of shards.
            self.optimizer.found_inf = decision.found_inf  # type: ignore[attr-defined]
            self._strategy.prepare_optimizer_grads()
            self.tensors.exchange()
        self._strategy.check_copies()
        self._strategy.publish_weights()

    def _divide_gradients(self, decision: StepDecision) -> None:
        for part in self._strategy.gradients():
            if part.tensors:
                divisor = decision.grad_scale.to(part.tensors[0].device)
                torch._foreach_div_(part.tensors, divisor)

    def _fit_divisor(self, decision: StepDecision) -> StepDecision:
        """Multiply gradients by a power of two first if FP32 does not represent their divisor."""
        if divisor_fits(decision.divisor):
            return decision
        for part in self._strategy.gradients():
            torch._foreach_mul_(part.tensors, PRESCALE)
        return replace(decision, grad_scale=(decision.divisor * PRESCALE).to(torch.float32))
