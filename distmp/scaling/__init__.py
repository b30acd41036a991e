"""Loss scaling: the scale, and the decision of all ranks to apply or skip a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = [
    "SUMS",
    "DistributedGradScaler",
    "GradientPart",
    "LossScale",
    "LossScaleConfig",
    "StepDecision",
    "all_reduce_stats",
    "decide_step",
    "local_stats",
    "loss_scale_rules",
    "ordered_total",
    "pack",
    "unused_rules",
]

if TYPE_CHECKING:
    from distmp.scaling.grad_scaler import DistributedGradScaler
    from distmp.scaling.loss_scale import LossScale
    from distmp.scaling.ordered import ordered_total
    from distmp.scaling.settings import LossScaleConfig, loss_scale_rules, unused_rules
    from distmp.scaling.step_decision import (
        SUMS,
        GradientPart,
        StepDecision,
        all_reduce_stats,
        decide_step,
        local_stats,
        pack,
    )
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "distmp.scaling.grad_scaler": ("DistributedGradScaler",),
            "distmp.scaling.loss_scale": ("LossScale",),
            "distmp.scaling.ordered": ("ordered_total",),
            "distmp.scaling.settings": (
                "LossScaleConfig",
                "loss_scale_rules",
                "unused_rules",
            ),
            "distmp.scaling.step_decision": (
                "SUMS",
                "GradientPart",
                "StepDecision",
                "all_reduce_stats",
                "decide_step",
                "local_stats",
                "pack",
            ),
        },
    )
