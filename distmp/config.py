"""The configuration of a training run: one frozen dataclass, from YAML and the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from distmp.checkpoint.settings import CheckpointConfig
from distmp.data.order import microbatches_per_rank
from distmp.data.settings import DataConfig
from distmp.engine.rank_consistency import RankConsistencyConfig
from distmp.engine.spike_check import DivergenceConfig
from distmp.errors import ConfigError, nearest
from distmp.models.settings import ModelConfig
from distmp.optim.build import optimizer_factory, schedule_factory
from distmp.optim.settings import OptimizerConfig, ScheduleConfig
from distmp.parallel import STRATEGIES, AccumulationSettings
from distmp.parallel.settings import (
    SHARDED_STRATEGIES,
    ActivationCheckpointing,
    Compilation,
    ParallelConfig,
    ShardingConfig,
)
from distmp.parallel.strategy import FORMER_STRATEGIES
from distmp.precision import policy
from distmp.scaling import LossScaleConfig, loss_scale_rules
from distmp.telemetry.profiling.settings import ProfileConfig
from distmp.telemetry.settings import LogConfig
from distmp.utils.settings import command_line


@dataclass(frozen=True)
class BatchConfig:
    """How many samples make a step."""

    global_batch_size: int = 32
    """Samples of one optimizer step, over all ranks and microbatches."""

    microbatch_size: int = 16
    """Samples of one forward and backward on one rank."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "microbatch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"batch.{name}", getattr(self, name), "use 1 or more samples")
        microbatches_per_rank(self.global_batch_size, self.microbatch_size, world_size=1)


@dataclass(frozen=True)
class PrecisionConfig:
    """What is computed in which floating-point type."""

    policy: str | dict[str, Any] = "auto"
    """fp32, tf32, bf16, bf16-autocast, bf16-pure, fp16, fp16-autocast, fp16-static, or auto: what
    the device supports. Changes follow a comma, as in bf16,keep_fp32=norm|head; in the file also
    as a section, 'preset: bf16' and a line for each change."""

    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Rules of the loss scale, for the fp16 policies."""

    max_consecutive_skips: int = 50
    """Give up after so many skipped steps in a row."""

    on_nonfinite: Literal["skip_step", "drop_microbatch"] = "skip_step"
    """Skip a step with a gradient that is not finite, or leave out just that microbatch (single,
    ddp; takes 4 more bytes per parameter, and reductions wait for the end of backward)."""

    attribution: bool = True
    """Repeat a step that overflowed to say which rank, parameter and microbatch it was."""

    def __post_init__(self) -> None:
        if self.policy != "auto":
            loss_scale_rules(policy(self.policy).loss_scale, self.loss_scale)
        if self.max_consecutive_skips < 1:
            raise ConfigError(
                "precision.max_consecutive_skips", self.max_consecutive_skips, "use 1 or more steps"
            )


@dataclass(frozen=True)
class ValidationConfig:
    """When and on how much held-out data the model is measured."""

    every: int = 0
    """Steps between two validations during training; 0: only at the end."""

    samples: int = 128
    """Samples of a validation during training."""

    final_samples: int | None = None
    """Samples of the validation at the end; null: all held-out data."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("validation.every", self.every, "use 0 or more steps")
        for name in ("samples", "final_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"validation.{name}", value, "use 1 or more samples")


@dataclass(frozen=True)
class SampleConfig:
    """The text that the trained model writes at the end, where samples are text."""

    prompt: str = "def "
    """How it begins."""

    length: int = 300
    """Tokens to write; 0: none."""

    temperature: float = 0.7
    """Divides the logits; 0 always takes the likeliest token."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("sample.prompt", self.prompt, "use at least one character")
        if self.length < 0:
            raise ConfigError("sample.length", self.length, "use 0 or more tokens")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError("sample.temperature", self.temperature, "use a number of 0 or more")


@dataclass(frozen=True)
class RunConfig:
    """A whole training run."""

    run_dir: str = "runs/default"
    """Folder for the resolved configuration, records, curves and checkpoints."""

    resume: str | None = None
    """Where to go on from: "auto" for the run's latest checkpoint if there is one, or a path."""

    resume_force: bool = False
    """Go on although model, data, seed or optimizer are not those of the checkpoint."""

    steps: int = 1000
    """Steps of the run; a skipped step counts."""

    seed: int = 1
    """Seed of the initial weights, the order of the data, and dropout."""

    strategy: str = "auto"
    """single, ddp, fsdp, hsdp, fsdp1, or auto: ddp where there are several ranks."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """`blocks`: keep only the inputs of each block for backward and compute the rest again."""

    compile: Compilation = "none"
    """What `torch.compile` gets: each of the `blocks`, or the whole `model`, after which no
    reduction overlaps with backward."""

    shard_optimizer: bool = False
    """Each rank keeps and steps only its share of FP32 weights and optimizer state (ddp)."""

    reproducible: bool = False
    """The same bits at 1, 2, 4, 8 ... ranks, with a power of two of microbatches (single, ddp)."""

    max_minutes: float | None = None
    """Stop in time for the whole job to end, checkpoint included, within so many minutes."""

    timeout_minutes: float = 10.0
    """A collective operation that takes longer has failed."""

    watchdog_seconds: float | None = None
    """When no rank has got further for so long, say which ones hang and where, and end; null: half
    of timeout_minutes; 0: never."""
    preflight: Literal["auto", "always", "never"] = "auto"
    """Compare and measure the ranks before the first step; auto: with more than one machine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    rank_consistency: RankConsistencyConfig = field(
        default_factory=RankConsistencyConfig, metadata={"formerly": "lockstep"}
    )
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError("steps", self.steps, "use 1 or more steps")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "use a whole number from 0 to 2^63 - 1")
        if not self.run_dir:
            raise ConfigError("run_dir", self.run_dir, "name a folder")
        if self.resume == "":
            raise ConfigError("resume", "", "give 'auto', the path of a checkpoint, or null")
        if self.strategy not in (*STRATEGIES, *FORMER_STRATEGIES):
            raise ConfigError("strategy", self.strategy, nearest(self.strategy, STRATEGIES))
        self.sharding.check(self.strategy)
        self.parallel(microbatches=None)
        if self.rank_consistency.every and self.strategy == "fsdp1":
            raise ConfigError(
                "rank_consistency.every",
                self.rank_consistency.every,
                "FSDP1 does not tell which of its tensors ranks have in common; use strategy = "
                "'fsdp', or 0",
            )
        accumulation = AccumulationSettings(
            self.shard_optimizer, self.reproducible, self.precision.on_nonfinite
        )
        if self.strategy in SHARDED_STRATEGIES:
            accumulation.refuse_for(self.strategy)
        if not (math.isfinite(self.timeout_minutes) and self.timeout_minutes > 0):
            raise ConfigError("timeout_minutes", self.timeout_minutes, "use a number above 0")
        if self.max_minutes is not None and not (0 < self.max_minutes < math.inf):
            raise ConfigError("max_minutes", self.max_minutes, "use a number above 0, or null")
        limit = 60 * self.timeout_minutes
        if self.watchdog_seconds is not None and not 0 <= self.watchdog_seconds < limit:
            raise ConfigError(
                "watchdog_seconds",
                self.watchdog_seconds,
                f"use a number from 0 to timeout_minutes ({limit:g} s), after which a collective "
                "fails by itself",
            )
        if self.schedule.warmup_steps >= self.steps:
            raise ConfigError(
                "schedule.warmup_steps",
                self.schedule.warmup_steps,
                f"must be less than steps = {self.steps}",
            )
        self.profile.check(self.steps)
        # Looks up names and refuses options that the optimizer or schedule does not have.
        optimizer_factory(self.optim)
        schedule = schedule_factory(self.schedule, self.steps)
        schedule(torch.optim.SGD([torch.zeros(())], lr=self.optim.lr))

    @property
    def watched_seconds(self) -> float:
        """After how long without progress a rank hangs; 0: never."""
        if self.watchdog_seconds is None:
            return 60 * self.timeout_minutes / 2
        return self.watchdog_seconds

    def parallel(self, microbatches: int | None) -> ParallelConfig:
        """Return what a strategy is told, for steps of so many microbatches."""
        return ParallelConfig(
            self.sharding, self.activation_checkpointing, self.compile, microbatches
        )


def load(argv: Sequence[str]) -> RunConfig:
    """Read `--config FILE` and the overrides behind it.

    Raises:
        ConfigError: If a name, type, value or combination is wrong.
        SystemExit: With code 0, after printing the help that was asked for.
    """
    return command_line(
        RunConfig, argv, prog="distmp train", description="Train a model on any number of ranks."
    )
