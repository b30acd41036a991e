"""Loss scaling: the scale, and the verdict by which all ranks apply or skip a step together."""

from distmp.scaling.grad_scaler import DistributedGradScaler
from distmp.scaling.loss_scale import LossScale, LossScaleConfig, loss_scale_rules, unused_rules
from distmp.scaling.ordered import ordered_total
from distmp.scaling.verdict import GradientPart, Verdict, agree, decide, measure, pack

__all__ = [
    "DistributedGradScaler",
    "GradientPart",
    "LossScale",
    "LossScaleConfig",
    "Verdict",
    "agree",
    "decide",
    "loss_scale_rules",
    "measure",
    "ordered_total",
    "pack",
    "unused_rules",
]
