"""The arguments of an engine: one frozen dataclass, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TypedDict

from distmp.engine.settings import DivergenceConfig, PrecisionPhase, check_order
from distmp.errors import ConfigError, nearest, require
from distmp.parallel.settings import AccumulationSettings, OnNonfinite, ParallelConfig
from distmp.precision import PolicyLike
from distmp.scaling.settings import LossScaleConfig
from distmp.utils.annotations import check_types
from distmp.utils.settings import flat


@dataclass(frozen=True)
class EngineConfig(AccumulationSettings):
    """The settings of an engine, the same on every rank.

    Raises:
        ConfigError: For a value of the wrong type or out of range.

    Example:
        >>> EngineConfig(policy="bf16", max_norm=1.0).strategy
        'auto'
    """

    policy: PolicyLike = "auto"
    """A `PrecisionPolicy`, the name of a preset, a text or mapping for `distmp.policy`, or "auto"
    for the best preset that the device supports."""

    strategy: str = "auto"
    """"single", "ddp", "fsdp", "hsdp", or "auto": "ddp" for several ranks, else "single"."""

    parallel: ParallelConfig | None = None
    """How the model is sharded, checkpointed and compiled."""

    max_norm: float | None = None
    """Clip the norm of the global gradient to this; None disables clipping."""

    loss_scale: LossScaleConfig | None = None
    """Rules of the loss scale, for policies that have one; None uses the policy's defaults."""

    max_consecutive_skips: int = 50
    """Number of skipped steps in a row after which `Engine.check` raises, or `Engine.step` if a
    loop has no `check`."""

    attribution: bool = True
    """Keep the microbatches of the last two steps, so that `Engine.explain` can replay a step that
    overflowed."""

    divergence: DivergenceConfig | None = None
    """Check loss and norm for spikes and the loss for non-finite values, and skip such steps as
    configured. Other reactions are up to the caller: the numbers of a step contain `spike`, `loss`
    and the limits. None disables the check."""

    nominal_weight: float | None = None
    """Typical global weight of a step, a constant that keeps gradients at the magnitude of a mean.
    None uses the global weight of the first step."""

    precision_phases: tuple[PrecisionPhase, ...] = ()
    """Policies until numbers of tokens, in the order in which they end; `policy` follows."""

    first_step_checks: bool = True
    """Check the first step for likely mistakes: a loss that is a mean or depends on parameters
    outside of the model, the same data or different weights on ranks, training in evaluation mode;
    the first 16 for a second optimizer; and the first four for writes through `.data` to 16-bit
    parameters."""

    def __post_init__(self) -> None:
        check_types(self, skip=("policy",))  # `resolve` checks the policy
        check_max_norm(self.max_norm)
        skips, weight = self.max_consecutive_skips, self.nominal_weight
        require(skips >= 1, "max_consecutive_skips", skips, "use 1 or more steps")
        valid = weight is None or 0 < weight < math.inf
        require(valid, "nominal_weight", weight, "use a finite number above 0, or None")
        check_order(self.precision_phases)

    def describe(self) -> dict[str, str]:
        """Return the settings as text by dotted name, for a comparison between ranks."""
        values = flat(asdict(self))
        return {name: repr(value).removeprefix("torch.") for name, value in values.items()}


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineConfig` as keyword arguments of `Engine`."""

    policy: PolicyLike
    strategy: str
    parallel: ParallelConfig | None
    max_norm: float | None
    loss_scale: LossScaleConfig | None
    max_consecutive_skips: int
    attribution: bool
    shard_optimizer: bool
    reproducible: bool
    on_nonfinite: OnNonfinite
    divergence: DivergenceConfig | None
    nominal_weight: float | None
    precision_phases: tuple[PrecisionPhase, ...]
    first_step_checks: bool


# What to use in place of the arguments of other libraries.
_INSTEAD_OF = {
    **dict.fromkeys(("clip_grad_norm", "gradient_clip_val", "gradient_clipping"), "use max_norm"),
    **dict.fromkeys(("mixed_precision", "precision"), "use policy, such as 'bf16-autocast'"),
    "gradient_accumulation_steps": "pass the microbatches of a step: engine.step([batch, batch])",
}


def with_settings(config: EngineConfig | None, settings: EngineSettings) -> EngineConfig:
    """Return a configuration with some settings replaced.

    Raises:
        ConfigError: For a value of the wrong type or out of range.
        TypeError: For an unknown name.
    """
    names = [field.name for field in fields(EngineConfig)]
    if unknown := [name for name in settings if name not in names]:
        advice = _INSTEAD_OF.get(unknown[0]) or nearest(unknown[0], names)
        raise TypeError(f"Engine() got an unexpected keyword argument {unknown[0]!r}: {advice}")
    problem = "is not a distmp.EngineConfig; pass Engine(..., **settings)"
    require(isinstance(config, EngineConfig | None), "config", type(config).__name__, problem)
    return replace(config or EngineConfig(), **settings)


def check_max_norm(max_norm: object) -> None:
    """Refuse a value that gradients cannot be clipped to.

    Raises:
        ConfigError: If `max_norm` is neither None nor a number above 0.
    """
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if max_norm is not None and not (is_number and max_norm > 0):  # type: ignore[operator]
        raise ConfigError("max_norm", max_norm, "use a number above 0, or None for no clipping")
