"""The gradient scaler for frameworks that call `update` after the step of each optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from distmp.scaling.grad_scaler import DistributedGradScaler, SkipCounts
from distmp.scaling.settings import LossScaleConfig


class DeferredGradScaler(DistributedGradScaler):
    """A scaler whose `update` takes effect when the next backward starts.

    accelerate and Lightning call `update` after the step of each optimizer. If the scale changed
    immediately, gradients of the same backward in the next optimizer would be divided by the wrong
    scale.

    Args:
        device: Device type of the scale.
        rules: Rules of the loss scale.
        most_skips: Raise an error after this many skipped steps in a row; None never raises.

    Attributes:
        has_scaled_gradients: Whether `scale` was called since the last finished iteration.
    """

    def __init__(self, device: str, rules: LossScaleConfig, most_skips: int | None) -> None:
        self._due = self.has_scaled_gradients = False
        numbers = asdict(rules)
        super().__init__(
            device,
            init_scale=numbers.pop("init"),
            static=not numbers.pop("dynamic"),
            max_consecutive_skips=most_skips,
            **numbers,
        )

    def register(self, *optimizers: torch.optim.Optimizer) -> None:
        """Register optimizers, also those in wrappers of accelerate or Lightning."""
        super().register(*map(unwrapped, optimizers))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step or skip, and let `zero_grad` free the gradients before the next backward starts."""
        output = super().step(optimizer, *args, **kwargs)
        self._inspected[id(optimizer)].checked = None
        return output

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale when the next backward starts; set `new_scale` immediately."""
        self._due = True
        if new_scale is not None:
            self._finish_iteration(new_scale)

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """Finish the last iteration, and multiply tensors by the scale."""
        self._finish_iteration()
        self.has_scaled_gradients = True
        return super().scale(outputs)

    def will_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Decide now; return whether all ranks will skip the step. Waits for the device."""
        return bool(self._decide_for(optimizer).item())

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether all ranks skipped the latest step. Waits for the device."""
        return bool(self._flags.get(id(optimizer), False))

    def get_scale(self) -> float:
        """Return the scale of the next backward."""
        return self._updated().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the next backward."""
        return self._updated().state_dict()

    def _counts(self) -> SkipCounts:
        return self._updated()._counts()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Finish the last iteration, and load a state."""
        self._finish_iteration()
        super().load_state_dict(state_dict)

    def _updated(self) -> DistributedGradScaler:
        """Return a copy after the update that is due.

        This scaler itself stays, because gradients of other optimizers may still have its scale.
        """
        updated = object.__new__(DistributedGradScaler)
        vars(updated).update(vars(self))
        if self._due and self._totals:
            updated._loss_scale = copy.copy(self._loss_scale)
            updated._update_scale(dynamic=True)
        return updated

    def _finish_iteration(self, new_scale: float | Tensor | None = None) -> None:
        if self._due:
            self._due = self.has_scaled_gradients = False
            super().update(new_scale)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper of accelerate or Lightning."""
    # Lightning's `LightningOptimizer` and `_FabricOptimizer` have `_strategy`.
    is_wrapper = hasattr(optimizer, "accelerator_state") or hasattr(optimizer, "_strategy")
    return optimizer.optimizer if is_wrapper else optimizer
