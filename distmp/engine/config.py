"""The settings of an engine: one frozen dataclass, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypedDict

from distmp.engine.spike_check import DivergenceConfig
from distmp.errors import ConfigError, nearest
from distmp.parallel import AccumulationSettings, ParallelConfig
from distmp.precision import PolicyLike
from distmp.scaling import LossScaleConfig
from distmp.utils.annotations import check_types


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine, the same on every rank.

    Raises:
        ConfigError: For a value of another type, or one that cannot work.

    Example:
        >>> EngineConfig(policy="bf16", max_norm=1.0).strategy
        'auto'
    """

    policy: PolicyLike = "auto"
    """A preset's name, text, a mapping (see `distmp.policy`), a `PrecisionPolicy`, or "auto" for
    what the device supports."""

    strategy: str = "auto"
    """"single", "ddp", "fsdp", "hsdp", "fsdp1", or "auto": "ddp" with several ranks."""

    parallel: ParallelConfig | None = None
    """How the model is sharded, checkpointed and compiled."""

    max_norm: float | None = None
    """Clip the norm of the global gradient to this; None disables clipping."""

    loss_scale: LossScaleConfig | None = None
    """Rules of the loss scale, for policies that have one; None uses the policy's defaults."""

    max_consecutive_skips: int = 50
    """`Engine.check` raises after this many skipped steps in a row."""

    attribution: bool = True
    """Keep the microbatches of the last two steps, so that `Engine.explain` can replay a step that
    overflowed."""

    shard_optimizer: bool = False
    """Every rank keeps and steps only its shard of FP32 weights and optimizer state (`single` and
    `ddp`)."""

    reproducible: bool = False
    """Compute the same bits however the microbatches of the global batch are spread over 1, 2, 4,
    8 ... ranks (`single` and `ddp`). Random numbers are drawn per microbatch from torch's
    generator, whose seed must be equal on all ranks. Sets one CPU thread and
    `torch.use_deterministic_algorithms` for the whole process."""

    on_nonfinite: str = "skip_step"
    """"skip_step" skips a step with a non-finite gradient; "drop_microbatch" leaves out the
    microbatch and averages over the others (`single` and `ddp`)."""

    divergence: DivergenceConfig | None = None
    """Check loss and norm for spikes and the loss for non-finite values, and skip the updates of
    such steps where the rules say so. Any other reaction is the caller's: the numbers of a step
    hold `spike`, `loss` and the limits."""

    nominal_weight: float | None = None
    """Typical global weight of a step, a constant that keeps gradients at the magnitude of a mean.
    None uses that of the first step, equal on all ranks."""

    first_step_checks: bool = True
    """Check the values of the first step for likely mistakes: ids above the vocabulary, a loss that
    is a mean, equal data on all ranks. Under `single` and `ddp` this runs the loss function on two
    synthetic batches."""

    def __post_init__(self) -> None:
        check_types(self, skip=("policy",))  # `resolve` explains what a policy can be
        check_max_norm(self.max_norm)
        if self.max_consecutive_skips < 1:
            raise ConfigError(
                "max_consecutive_skips", self.max_consecutive_skips, "use 1 or more steps"
            )
        if self.nominal_weight is not None and not 0 < self.nominal_weight < math.inf:
            raise ConfigError(
                "nominal_weight", self.nominal_weight, "use a finite number above 0, or None"
            )

    @property
    def accumulation(self) -> AccumulationSettings:
        """How gradients of whole models are accumulated and stepped."""
        return AccumulationSettings(self.shard_optimizer, self.reproducible, self.on_nonfinite)

    def described(self) -> dict[str, str]:
        """Return the settings as text by dotted name, for a comparison between ranks."""
        return dict(_described("", self))


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
    on_nonfinite: str
    divergence: DivergenceConfig | None
    nominal_weight: float | None
    first_step_checks: bool


def with_settings(config: EngineConfig | None, settings: EngineSettings) -> EngineConfig:
    """Return a configuration with some settings replaced.

    Raises:
        ConfigError: For a name that is no setting, or a value that cannot work.
    """
    known = [field.name for field in fields(EngineConfig)]
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(name, value, f"is no setting of an engine; {nearest(name, known)}")
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError("config", type(config).__name__, "must be an EngineConfig, or None")
    return replace(config or EngineConfig(), **settings)


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
    prefix = f"{name}." if name else ""
    return [
        entry
        for field in fields(value)
        for entry in _described(f"{prefix}{field.name}", getattr(value, field.name))
    ]
