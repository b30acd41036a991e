"""Settings of the optimizer and of the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distmp.utils.annotations import Section, consequential, dangerous

# Schedules of distmp; others are import paths.
SHAPES = ("cosine", "linear", "constant", "wsd")
# The schedules that use a setting; the others refuse another value than its default.
_USED_BY = {"decay_steps": ("wsd",), "final": ("cosine", "linear", "wsd")}


@dataclass(frozen=True)
class OptimizerConfig(Section, section="optim"):
    """The optimizer of the FP32 weights."""

    name: str = field(
        default="adamw", metadata=dangerous("the saved state belongs to another optimizer")
    )
    """adamw, adam, sgd, adagrad, muon (Muon for hidden matrices, AdamW for all else), or an import
    path 'module:callable'."""
    lr: float = field(default=3e-3, metadata=consequential("learning rates change from here on"))
    """Peak learning rate."""
    weight_decay: float = field(
        default=0.1, metadata=consequential("weight decay changes from here on")
    )
    """Weight decay of matrices; biases, norms and other vectors have none."""
    max_norm: float | None = field(
        default=1.0, metadata=consequential("gradient clipping changes from here on")
    )
    """Maximum norm of the global gradient; a larger gradient is clipped to it. null: no
    clipping."""
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=consequential(
            "the optimizer keeps the state that it built up under other options, if any"
        ),
    )
    """Further arguments of the optimizer, such as betas or momentum; for muon see
    `distmp.optim.Muon`."""

    def _check(self) -> None:
        for name in ("lr", "weight_decay"):
            valid = 0 <= getattr(self, name) < math.inf
            self._require(valid, name, "use a finite number, 0 or more")
        valid = self.max_norm is None or self.max_norm > 0
        self._require(valid, "max_norm", "use a number above 0, or null for no clipping")


@dataclass(frozen=True)
class ScheduleConfig(Section, section="schedule"):
    """The learning rate as a function of the number of applied updates."""

    name: str = "cosine"
    """cosine, linear, constant, wsd (warm-up, stable, decay: constant, then linear over the last
    `decay_steps`), or the import path of a scheduler, such as torch.optim.lr_scheduler:StepLR."""
    warmup_steps: int | None = 0
    """Number of updates before that with the peak, over which the learning rate rises linearly;
    null: 5% of `steps`, rounded down, and 0 for an import path."""
    final: float = 0.1
    """Learning rate that cosine, linear and wsd reach after the last update, as a share of the peak
    from 0 to 1."""
    decay_steps: int | None = None
    """Number of updates at the end of the run in which wsd lowers the rate; null: a tenth of those
    after the warm-up, at least 1."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the scheduler of an import path."""

    def _check(self) -> None:
        for name in ("warmup_steps", "decay_steps"):
            value = getattr(self, name)
            valid = value is None or value >= 0
            self._require(valid, name, "use 0 or more updates, or null")
        self._require(0 <= self.final <= 1, "final", "use a share from 0 to 1")
        is_known = self.name in SHAPES or ":" in self.name
        for name, used_by in _USED_BY.items():
            value, default = getattr(self, name), getattr(ScheduleConfig, name)
            hint = f"does not use it; leave it out, or use {' or '.join(used_by)}"
            valid = value == default or self.name in used_by or not is_known
            self._require(valid, name, f"{self.name} {hint}")

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up updates of a run of `steps` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return steps // 20 if self.name in SHAPES else 0
