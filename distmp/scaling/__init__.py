"""Loss scaling: the scale, and the decision of all ranks to apply or skip a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = [
    "DistributedGradScaler",
    "GradientPart",
    "LossScaleConfig",
    "loss_scale_rules",
    "unused_rules",
]

if TYPE_CHECKING:
    from distmp.scaling.grad_scaler import DistributedGradScaler
    from distmp.scaling.settings import LossScaleConfig, loss_scale_rules, unused_rules
    from distmp.scaling.step_decision import GradientPart
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "distmp.scaling.grad_scaler": ("DistributedGradScaler",),
            "distmp.scaling.settings": ("LossScaleConfig", "loss_scale_rules", "unused_rules"),
            "distmp.scaling.step_decision": ("GradientPart",),
        },
    )
