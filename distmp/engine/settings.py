"""What an engine is set to, apart from the model and the functions it is built with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from distmp.engine.spike_check import DivergenceConfig
from distmp.errors import ConfigError
from distmp.parallel import AccumulationSettings, ParallelConfig
from distmp.precision import PrecisionPolicy
from distmp.scaling import LossScaleConfig
from distmp.utils.annotations import check_types


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine, the same on every rank; see `distmp.Engine` for what they mean.

    Raises:
        ConfigError: For a value of another type, or one that cannot work.
    """

    policy: PrecisionPolicy
    strategy: str
    parallel: ParallelConfig
    accumulation: AccumulationSettings
    max_norm: float | None
    loss_scale: LossScaleConfig | None
    max_consecutive_skips: int
    attribution: bool
    divergence: DivergenceConfig | None
    nominal_weight: float | None
    first_step_checks: bool

    def __post_init__(self) -> None:
        check_types(self)
        check_max_norm(self.max_norm)
        if self.max_consecutive_skips < 1:
            raise ConfigError(
                "max_consecutive_skips", self.max_consecutive_skips, "use 1 or more steps"
            )
        if self.nominal_weight is not None and not 0 < self.nominal_weight < math.inf:
            raise ConfigError(
                "nominal_weight", self.nominal_weight, "use a finite number above 0, or None"
            )

    def described(self) -> dict[str, str]:
        """Return the settings in words by dotted name, for a comparison between ranks."""
        return dict(_described("", self))


def check_max_norm(max_norm: object) -> None:
    """Refuse a norm that gradients cannot be clipped to.

    Raises:
        ConfigError: If it is neither None nor a number above 0.
    """
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if max_norm is not None and not (is_number and max_norm > 0):  # type: ignore[operator]
        raise ConfigError("max_norm", max_norm, "use a number above 0, or None for no clipping")


def _described(name: str, value: Any) -> list[tuple[str, str]]:
    if not is_dataclass(value):
        return [(name, repr(value).removeprefix("torch."))]
    prefix = f"{name}." if name and name != "accumulation" else ""
    return [
        entry
        for field in fields(value)
        for entry in _described(f"{prefix}{field.name}", getattr(value, field.name))
    ]
