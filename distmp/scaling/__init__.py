"""Loss scaling, and the step decision: all ranks apply or skip a step together."""

from distmp.scaling.grad_scaler import DistributedGradScaler
from distmp.scaling.loss_scale import LossScale, LossScaleConfig, loss_scale_rules, unused_rules
from distmp.scaling.ordered import ordered_total
from distmp.scaling.step_decision import (
    GradientPart,
    StepDecision,
    all_reduce_stats,
    decide_step,
    local_stats,
    pack,
)

__all__ = [
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
