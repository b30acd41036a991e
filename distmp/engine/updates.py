"""Builds the optimizer and its learning rates, and applies or skips its updates."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from distmp.errors import TrainingError
from distmp.optim.factories import OptimizerFactory, ScheduleFactory
from distmp.optim.learning_rates import LearningRates
from distmp.optim.optimizer_tensors import OptimizerTensors, set_rounding
from distmp.optim.state import prepare_for_device_skip
from distmp.parallel.matrices import place_matrices, place_shards
from distmp.parallel.strategy import Strategy
from distmp.precision import PrecisionPolicy
from distmp.scaling.step_decision import PRESCALE, StepDecision, divisor_fits
from distmp.utils.host_copy import cpu_number

HALF_WAY = (
    "the last engine.step failed in optimizer.step, so some weights may be updated and others not; "
    "continue from a checkpoint (engine.load)"
)


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
        is_complete: Whether the last update has ended, or a state was loaded since.
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
        set_rounding(self.optimizer, policy)
        place_matrices(self.optimizer, strategy, self.names, device)
        place_shards(self.optimizer, strategy, self.names)
        self.skips_on_device = prepare_for_device_skip(self.optimizer)
        self.tensors = OptimizerTensors(self.optimizer, parameters, strategy.module)
        self.learning_rates = LearningRates(
            self.optimizer, schedule, device, on_device=self.skips_on_device
        )
        self.max_applied = 0
        self.is_complete = True
        self._options = self._unsaved_options()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse changes of the optimizer that would have no effect.

        Args:
            optimizer: The attribute `optimizer` of the engine.

        Raises:
            ConfigError: If it was replaced, or has other tensors.
            TrainingError: After an update that has failed.
        """
        if not self.is_complete:
            raise TrainingError(HALF_WAY)
        self.tensors.check(optimizer)

    def _unsaved_options(self) -> dict[str, float]:
        """Return the numbers in parameter groups that no state of the engine contains."""
        return {
            f"param_groups[{index}][{key!r}]": value
            for index, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, int | float) and key != "lr"
        }

    def warn_about_unsaved_options(self) -> None:
        """Warn about numbers in parameter groups that have changed: a load does not set them."""
        now, before = self._unsaved_options(), self._options
        changed = [name for name in now if now[name] != before.get(name, now[name])]
        if changed:
            name = changed[0]
            warnings.warn(
                f"{name} has changed from {before[name]} to {now[name]}, and is not saved: set it "
                "again after load; an optimizer that counts in its groups does not resume exactly",
                RuntimeWarning,
                stacklevel=2,
            )

    def apply(self, decision: StepDecision) -> None:
        """Step the optimizer, or leave weights and state unchanged, according to the decision."""
        self.is_complete = False
        decision = self._fit_divisor(decision)
        if self.skips_on_device:
            self.max_applied += 1
            # Read by torch's fused optimizers: they divide by grad_scale and skip on found_inf.
            self.optimizer.grad_scale = decision.grad_scale  # type: ignore[attr-defined]
            # Without it, a kernel less for each step count. On CPUs the host knows it.
            known = decision.found_inf.device.type == "cpu" and not cpu_number(decision.found_inf)
            self.optimizer.found_inf = None if known else decision.found_inf  # type: ignore[attr-defined]
            self._strategy.prepare_optimizer_grads()
            self.tensors.step()
        elif decision.found_inf.item() == 0:
            self.max_applied += 1
            for part in self._strategy.gradients():
                if part.tensors:
                    divisor = decision.grad_scale.to(part.tensors[0].device)
                    torch._foreach_div_(part.tensors, divisor)
            self._strategy.prepare_optimizer_grads()
            self.tensors.step_in_place()
        self._strategy.check_copies()
        self._strategy.publish_weights()
        self.is_complete = True

    def _fit_divisor(self, decision: StepDecision) -> StepDecision:
        """Multiply gradients by a power of two first if FP32 does not represent their divisor."""
        if divisor_fits(decision.divisor):
            return decision
        for part in self._strategy.gradients():
            torch._foreach_mul_(part.tensors, PRESCALE)
        return replace(decision, grad_scale=(decision.divisor * PRESCALE).to(torch.float32))
