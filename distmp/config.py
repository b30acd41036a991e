"""The configuration of a training run: one frozen dataclass, from YAML and the command line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from distmp.checkpoint.settings import CheckpointConfig
from distmp.data.order import microbatches_per_rank
from distmp.data.settings import DataConfig
from distmp.engine.settings import DivergenceConfig, EmaConfig, RankConsistencyConfig, parse_phases
from distmp.errors import ConfigError, nearest, require
from distmp.masking import is_masked
from distmp.models.settings import EMA_PREFIX, ModelConfig
from distmp.optim.settings import SHAPES, OptimizerConfig, ScheduleConfig
from distmp.parallel.settings import (
    SHARDED_STRATEGIES,
    STRATEGIES,
    AccumulationSettings,
    ActivationCheckpointing,
    Compilation,
    ParallelConfig,
    ShardingConfig,
    nearest_strategy,
)
from distmp.scaling.settings import LossScaleConfig, loss_scale_rules
from distmp.telemetry.settings import LogConfig, ProfileConfig
from distmp.utils import LARGEST_SEED
from distmp.utils.annotations import HARMLESS, IGNORED, Section, consequential, dangerous
from distmp.utils.imports import Entry, load_function, parse_entries
from distmp.utils.settings import flat
from distmp.utils.settings.command_line import command_line

if TYPE_CHECKING:
    from distmp.engine.engine_config import EngineConfig
    from distmp.precision import PrecisionPolicy

# Far above every real run, and within the types that hold these values.
_MAX_STEPS = 10**12
_MAX_TIMEOUT_MINUTES = 14 * 24 * 60

# A run ends after this many consecutive skipped steps.
MAX_CONSECUTIVE_SKIPS = 50

# Advice for names of settings in other tools, and for values in place of sections.
_ADVICE = {
    name: advice
    for names, advice in {
        "batch batch_size batchsize micro_batch_size per_device_train_batch_size": (
            "set batch.global_batch_size, the samples of a step over all ranks, and "
            "batch.microbatch_size, those of one forward on a rank"
        ),
        "epochs max_epochs num_epochs num_train_epochs": (
            "a run is as long as its number of steps; set steps to epochs x samples / "
            "batch.global_batch_size"
        ),
        "accumulate_grad_batches grad_accum_steps gradient_accumulation_steps": (
            "follows from other settings: each rank runs batch.global_batch_size / "
            "(batch.microbatch_size x ranks) microbatches per step"
        ),
        "precision bf16 fp16 dtype mixed_precision": "set precision.policy, for example to bf16",
        "devices gpus nproc_per_node": (
            "the launcher starts the ranks; run `distmp launch --nproc-per-node N -- OPTIONS`"
        ),
        "data dataset": "set data.source and data.path",
        "block_size max_length seq_len": "set data.sequence_length",
        "eval_every eval_steps": "set validation.every",
        "save_every save_steps": "set checkpoint.every",
        "scheduler lr_scheduler": "set schedule.name",
        "learning_rate": "set optim.lr",
        "optimizer": "set optim.name",
        "model": "set model.name, or model.size for another size of distmp's transformer",
        "output_dir": "set run_dir",
        "lora": "set model.peft",
        "wandb": "set log.trackers",
        "ema": "set ema.decay; 0 for no average",
    }.items()
    for name in names.split()
}

_NOTATION = "write 'module:callable', or {name: module:callable, options: {NAME: VALUE}}"
# Metrics whose best value is the smallest one.
_MINIMIZED = ("loss", "perplexity")

Config = TypeVar("Config", bound="RunConfig")


@dataclass(frozen=True)
class BatchConfig(Section, section="batch"):
    """The size of a step, in samples."""

    global_batch_size: int = field(
        default=32,
        metadata=consequential("a step has another number of samples; optim.lr is not adjusted"),
    )
    """Samples per optimizer step, over all ranks and microbatches."""

    microbatch_size: int = field(
        default=16, metadata=consequential("masks of dropout and batch statistics change")
    )
    """Samples per forward and backward on one rank."""

    def _check(self) -> None:
        microbatches_per_rank(self.global_batch_size, self.microbatch_size, world_size=1)


@dataclass(frozen=True)
class PrecisionConfig(Section, section="precision"):
    """Precision policy, loss scale, and handling of overflows."""

    # A run that resumes compares the resolved policy.
    policy: str | dict[str, Any] = field(default="auto", metadata=HARMLESS)
    """fp32, tf32, bf16, bf16-autocast, bf16-pure, fp16, fp16-autocast, fp16-static, fp8,
    fp8-rowwise, mxfp8, nvfp4, or auto for the best one that the device supports. Append changes
    after a comma: bf16,keep_fp32=norm. In a file this may be a section: 'preset: bf16', and a
    line per change."""

    loss_scale: LossScaleConfig = field(
        default_factory=LossScaleConfig,
        metadata=consequential("the loss scale follows this rule from here on"),
    )
    """Rules of the loss scale, for fp16 policies."""

    on_nonfinite: Literal["skip_step", "drop_microbatch"] = field(
        default="skip_step",
        metadata=consequential("non-finite gradients are handled differently from here on"),
    )
    """Skip a step with a non-finite gradient, or drop only the microbatch that produced it (single,
    ddp; takes 4 more bytes per parameter, and reductions wait for the end of backward)."""

    phases: tuple[dict[str, Any], ...] = field(
        default=(),
        metadata=consequential("matmuls change their formats at other tokens from here on"),
    )
    """Policies in place of `precision.policy` until numbers of tokens, such as '{until_tokens: 1e9,
    policy: bf16}', in this order. They differ only in forward, grad and wgrad."""

    def _check(self) -> None:
        parse_phases(self.phases)

    def check_names(self) -> PrecisionPolicy | None:
        """Check the policy, which imports torch, and return it; None if it is chosen later.

        Raises:
            ConfigError: If it is unknown, or does not fit the rules of the loss scale or the
                phases.
        """
        if self.policy == "auto":
            return None
        from distmp.engine.precision_phases import phase_formats
        from distmp.precision import policy

        chosen = policy(self.policy)
        loss_scale_rules(chosen.loss_scale, self.loss_scale)
        phase_formats(chosen, parse_phases(self.phases))
        return chosen


@dataclass(frozen=True)
class ValidationConfig(Section, section="validation"):
    """When to evaluate the model, and on how much held-out data."""

    every: int = 0
    """Steps between validations; 0: validate only at the end."""

    samples: int = 128
    """Samples per validation during training."""

    final_samples: int | None = None
    """Samples of the final validation; null: all held-out data."""

    metrics: dict[str, str] = field(default_factory=dict)
    """Metrics besides the loss, by name: `accuracy`, `perplexity` (with the loss next_token), or
    the import path of a function `metric(outputs, batch)` that returns a sum and its weight; see
    the page on metrics."""

    def _check(self) -> None:
        self._require(self.every >= 0, "every", "use 0 or more steps")
        hint, final = "use 1 or more samples", self.final_samples
        self._require(self.samples >= 1, "samples", hint)
        self._require(final is None or final >= 1, "final_samples", f"{hint}, or null for all")

    def check(self, is_held_out: bool, problem: str) -> None:
        """Refuse settings that have no effect without held-out data."""
        for name, unused in {"every": 0, "metrics": {}}.items():
            hint = f"{problem}; set it to {unused}, or hold out data"
            self._require(is_held_out or not getattr(self, name), name, hint)


@dataclass(frozen=True)
class EarlyStoppingConfig(Section, section="early_stopping"):
    """When a run ends because a metric on held-out data no longer improves.

    The checkpoint of the best validation is kept until the end.
    """

    patience: int = 0
    """End the run after this many validations in a row without improvement; 0: never, and the
    checkpoint of the best validation is not kept."""

    metric: str = "loss"
    """loss, or a name in validation.metrics; with the prefix ema_ computed with the average of the
    weights."""

    min_delta: float = 0.0
    """The value has to improve by more than this."""

    mode: Literal["auto", "min", "max"] = "auto"
    """Whether a smaller or a larger value is better. auto: min for loss and perplexity, max for the
    metric `accuracy`; others need min or max."""

    def _check(self) -> None:
        self._require(self.patience >= 0, "patience", "use 0 or more validations")
        self._require(0 <= self.min_delta < math.inf, "min_delta", "use a number of 0 or more")

    @property
    def maximizes(self) -> bool:
        """Whether a larger value of the metric is better.

        Raises:
            ConfigError: If `mode` is auto and the metric is not known.
        """
        name = self.metric.removeprefix(EMA_PREFIX)
        valid = self.mode != "auto" or name in (*_MINIMIZED, "accuracy")
        hint = f"does not know the metric {self.metric!r}; set min or max"
        self._require(valid, "mode", hint)
        return self.mode == "max" or (self.mode == "auto" and name == "accuracy")

    def check(self, metrics: Sequence[str], *, every: int, ema: bool) -> None:
        """Refuse settings under which a run would never stop early.

        Args:
            metrics: Names in `validation.metrics`.
            every: Setting `validation.every`.
            ema: Whether the run has an average of its weights.

        Raises:
            ConfigError: If there is no such metric, or no validation during training.
        """
        if self.patience == 0:
            hint = (
                "has no effect without early_stopping.patience; leave it out, or set patience, the "
                "number of validations without an improvement after which a run ends"
            )
            for each in fields(self):
                self._require(getattr(self, each.name) == each.default, each.name, hint)
            return
        hint = "needs validations during training; set validation.every"
        self._require(every > 0, "patience", hint)
        known = ["loss", *metrics]
        of_average = [f"{EMA_PREFIX}{name}" for name in known]
        valid = ema or self.metric not in of_average
        self._require(valid, "metric", "needs an average of the weights; set ema.decay")
        known += of_average if ema else []
        self._require(self.metric in known, "metric", nearest(self.metric, known))
        _ = self.maximizes


@dataclass(frozen=True)
class RunConfig(Section):
    """All settings of a training run."""

    advice: ClassVar[Mapping[str, str]] = _ADVICE
    """What to do, by names that are no settings and by sections, see `from_mapping`."""
    prog: ClassVar[str] = "distmp train"
    """Name of the command, for the help text."""
    description: ClassVar[str] = "Train a model on any number of ranks."
    """Description of the command, for the help text."""

    run_dir: str = field(default="runs/default", metadata=HARMLESS)
    """Directory for the resolved configuration, step records and checkpoints."""

    resume: str | None = field(default=None, metadata=IGNORED)
    """Checkpoint to resume from: a path, or auto for the latest one of the run, if there is one."""

    resume_force: bool = field(default=False, metadata=IGNORED)
    """Resume even if model, data, seed or optimizer differ from those of the checkpoint."""

    steps: int = field(
        default=1000,
        metadata=consequential("the schedule ends at another step, so learning rates may jump"),
    )
    """Number of steps, skipped ones included."""

    seed: int = field(
        default=1,
        metadata=dangerous("the order of the data changes: samples are repeated or never used"),
    )
    """Seed of the initial weights, the order of the data, and dropout."""

    strategy: str = field(default="auto", metadata=HARMLESS)
    """single, ddp, fsdp, hsdp, or auto: single on one rank, otherwise the first of ddp, hsdp and
    fsdp whose weights, gradients and optimizer state fit into half of the free memory."""

    activation_checkpointing: ActivationCheckpointing = field(default="none", metadata=HARMLESS)
    """`blocks`: store only the inputs of each block for backward, and recompute the rest."""

    compile: Compilation = field(default="none", metadata=HARMLESS)
    """Apply `torch.compile` to each of the `blocks`, or to the `model`; with `model`, reductions do
    not overlap with backward."""

    shard_optimizer: bool = field(default=False, metadata=HARMLESS)
    """Shard FP32 weights and optimizer state over ranks (ddp)."""

    reproducible: bool = field(
        default=False,
        metadata=consequential(
            "results are no longer bitwise identical to those of other numbers of ranks"
        ),
    )
    """Compute bitwise identical results on 1, 2, 4, 8 ... ranks (single, ddp). The number of
    microbatches has to be a power of two."""

    max_minutes: float | None = field(default=None, metadata=HARMLESS)
    """Time limit of the job: stop early enough to write a checkpoint within it. null: no limit."""

    timeout_minutes: float = field(default=10.0, metadata=HARMLESS)
    """Timeout of collectives."""

    watchdog_seconds: float | None = field(default=None, metadata=HARMLESS)
    """Seconds without progress after which the run ends with a report of which ranks hang, and
    where; null: half of timeout_minutes; 0: never."""

    preflight: Literal["auto", "always", "only", "never"] = field(default="auto", metadata=HARMLESS)
    """Compare and measure the ranks before the first step; auto: if there are several machines;
    only: and do not train."""

    callbacks: tuple[str | dict[str, Any], ...] = field(default=(), metadata=HARMLESS)
    """Import paths 'module:callable', or '{name: module:callable, options: {NAME: VALUE}}' for one
    with arguments; each is called to build a `distmp.training.callbacks.Callback`."""

    model: ModelConfig = field(
        default_factory=ModelConfig, metadata=dangerous("the weights belong to another model")
    )
    data: DataConfig = field(
        default_factory=DataConfig,
        metadata=dangerous("the position in the data refers to other samples"),
    )
    batch: BatchConfig = field(default_factory=BatchConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig, metadata=HARMLESS)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(
        default_factory=ScheduleConfig,
        metadata=consequential("learning rates change from here on"),
    )
    divergence: DivergenceConfig = field(
        default_factory=DivergenceConfig,
        metadata=consequential("spikes are handled differently from here on"),
    )
    rank_consistency: RankConsistencyConfig = field(
        default_factory=RankConsistencyConfig, metadata=HARMLESS
    )
    validation: ValidationConfig = field(default_factory=ValidationConfig, metadata=HARMLESS)
    ema: EmaConfig = field(
        default_factory=EmaConfig,
        metadata=consequential("the average of the weights follows this rule from here on"),
    )
    early_stopping: EarlyStoppingConfig = field(
        default_factory=EarlyStoppingConfig, metadata=HARMLESS
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=HARMLESS)
    log: LogConfig = field(default_factory=LogConfig, metadata=HARMLESS)
    profile: ProfileConfig = field(default_factory=ProfileConfig, metadata=HARMLESS)

    def _check(self) -> None:
        self._check_run()
        self._check_time()
        self._check_strategy()
        self._check_steps()
        self._check_validation()

    @classmethod
    def load(cls: type[Config], argv: Sequence[str]) -> Config:
        """Read the settings of a command, and look up what they name, see `check_names`.

        Args:
            argv: Arguments without the name of the command: `--config FILE` and overrides.

        Raises:
            ConfigError: If a name, type, value or combination is wrong.
            SystemExit: With code 0, after `--help`.
        """
        config = cls.read(argv)
        config.check_names()
        return config

    @classmethod
    def read(cls: type[Config], argv: Sequence[str]) -> Config:
        """Read the settings without `check_names`, which imports torch; see `load`."""
        config = command_line(cls, argv, cls.prog, cls.description)
        config = replace(
            config,
            run_dir=os.path.expanduser(config.run_dir),
            resume=_expanded(config.resume),
            model=replace(config.model, weights=_expanded(config.model.weights)),
            checkpoint=replace(config.checkpoint, path=_expanded(config.checkpoint.path)),
        )
        for name, value in flat(asdict(config)).items():
            if (problem := _unusable(value)) is not None:
                raise ConfigError(name, value, problem)
        return config

    def _check_run(self) -> None:
        self._require(1 <= self.steps <= _MAX_STEPS, "steps", f"use 1 to {_MAX_STEPS:,} steps")
        valid = 0 <= self.seed <= LARGEST_SEED
        self._require(valid, "seed", f"use an integer from 0 to {LARGEST_SEED}")
        valid = Path(self.run_dir).name not in ("", "..")
        self._require(valid, "run_dir", "name a directory of the run's own, such as runs/first")
        self._require(self.resume != "", "resume", "give 'auto', the path of a checkpoint, or null")

    def _check_time(self) -> None:
        minutes = self.timeout_minutes
        hint = f"use a number above 0, up to {_MAX_TIMEOUT_MINUTES:,} (two weeks)"
        self._require(0 < minutes <= _MAX_TIMEOUT_MINUTES, "timeout_minutes", hint)
        valid = self.max_minutes is None or 0 < self.max_minutes < math.inf
        self._require(valid, "max_minutes", "use a number above 0, or null")
        watched = self.watchdog_seconds
        valid = watched is None or watched == 0 or 2 <= watched < 60 * minutes
        hint = (
            f"use 0, or a number from 2, because ranks report once a second, to less than "
            f"timeout_minutes ({60 * minutes:g} s), after which a collective times out"
        )
        self._require(valid, "watchdog_seconds", hint)

    def _check_strategy(self) -> None:
        self._require(self.strategy in STRATEGIES, "strategy", nearest_strategy(self.strategy))
        if self.strategy != "auto":  # which chooses a strategy that supports the settings
            self.sharding.check(self.strategy)
        valid = self.strategy != "single" or not self.shard_optimizer
        hint = "has no effect under strategy single, which has one rank; remove it, or use ddp"
        self._require(valid, "shard_optimizer", hint)
        if self.strategy in SHARDED_STRATEGIES:
            AccumulationSettings(
                shard_optimizer=self.shard_optimizer,
                reproducible=self.reproducible,
                on_nonfinite=self.precision.on_nonfinite,
            ).refuse_for(self.strategy)

    def _check_steps(self) -> None:
        valid = self.schedule.warmup(self.steps) < self.steps
        hint = f"must be less than steps = {self.steps}, or null for 5% of them"
        require(valid, "schedule.warmup_steps", self.schedule.warmup_steps, hint)
        self.profile.check(self.steps)

    def check_names(self) -> None:
        """Look up what settings name: functions, the policy, and others.

        It imports torch.

        Commands call it after they have read all settings, so that their help and most of their
        errors do not wait for torch.

        Raises:
            ConfigError: If a name is unknown, or what it names does not take an option.
        """
        from distmp.models.metrics import find_metrics
        from distmp.optim.factories import optimizer_factory, schedule_factory

        # Without options there is nothing to compare: the ranks import the module.
        for section in (self.data, self.model):
            if section.is_import_path and section.options:
                section.function()
        policy = self.precision.check_names()
        self._check_blocks(policy)
        find_metrics(self.validation.metrics)
        for callback in parse_entries("callbacks", self.callbacks):
            find_callback(callback)
        stochastic = policy is not None and policy.stochastic_rounding
        optimizer_factory(self.optim, stochastic_rounding=stochastic, seed=self.seed)
        build = schedule_factory(self.schedule, self.steps)
        # Schedules of torch refuse options when they are built. The first optimizer of a process
        # imports torch's compiler, which takes 0.4 s.
        if self.schedule.name not in SHAPES:
            import torch

            build(torch.optim.SGD([torch.zeros(())], lr=self.optim.lr))

    def _check_blocks(self, policy: PrecisionPolicy | None) -> None:
        has_blocks = "blocks" in (self.activation_checkpointing, self.compile) or (
            policy is not None and policy.has_low_precision_matmuls
        )
        require(
            not self.sharding.wrap or has_blocks or self.strategy in ("auto", *SHARDED_STRATEGIES),
            "sharding.wrap",
            list(self.sharding.wrap),
            f"names blocks, and strategy {self.strategy!r} has none without compile = 'blocks' or "
            "activation_checkpointing = 'blocks'; remove it, or set one of them",
        )

    def _check_validation(self) -> None:
        parse_entries("callbacks", self.callbacks)
        metrics = self.validation.metrics
        require(
            "perplexity" not in metrics.values() or self.model.loss == "next_token",
            "validation.metrics",
            "perplexity",
            f"is the exponential of the loss next_token, and model.loss = {self.model.loss!r}; "
            "name a function",
        )
        data = self.data
        is_held_out = data.held_out > 0 or data.is_import_path or data.validation_path is not None
        self.validation.check(is_held_out, "has no data with data.held_out = 0")
        self.early_stopping.check([*metrics], every=self.validation.every, ema=self.ema.decay > 0)

    @property
    def hang_seconds(self) -> float:
        """Seconds without progress after which a rank counts as hanging; 0: never."""
        if self.watchdog_seconds is None:
            return 60 * self.timeout_minutes / 2
        return self.watchdog_seconds

    def engine(self, microbatches: int | None) -> EngineConfig:
        """Return the settings of an engine, for steps of `microbatches` microbatches per rank."""
        from distmp.engine.engine_config import EngineConfig

        return EngineConfig(
            policy=self.precision.policy,
            strategy=self.strategy,
            parallel=self.parallel(microbatches),
            max_norm=self.optim.max_norm,
            loss_scale=self.precision.loss_scale,
            max_consecutive_skips=MAX_CONSECUTIVE_SKIPS,
            shard_optimizer=self.shard_optimizer,
            reproducible=self.reproducible,
            on_nonfinite=self.precision.on_nonfinite,
            divergence=self.divergence,
            precision_phases=parse_phases(self.precision.phases),
        )

    def with_fixed_formats(self: Config) -> Config:
        """Return the configuration without phases, for commands that compare formats."""
        return replace(self, precision=replace(self.precision, phases=()))

    def parallel(self, microbatches: int | None) -> ParallelConfig:
        """Return the settings of a strategy, for steps of `microbatches` microbatches."""
        return ParallelConfig(
            self.sharding, self.activation_checkpointing, self.compile, microbatches
        )


def find_callback(entry: Entry) -> Any:
    """Import and return the class or function of an entry of the setting `callbacks`.

    Raises:
        ConfigError: If it does not exist, or does not take the options.
    """
    problem = f"cannot be called with the options {entry.options} ({{reason}}); {_NOTATION}"
    return load_function("callbacks", entry.name, entry.options, problem)


def _expanded(path: str | None) -> str | None:
    return None if path is None else os.path.expanduser(path)


def _unusable(value: Any) -> str | None:
    """Return why a value is invalid for every setting, or None."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_unusable, value)), None)
    if is_masked(value):
        return "is hidden in files that distmp writes; set the real value, or null"
    if isinstance(value, str) and "\0" in value:
        return "contains a NUL character; remove it"
    if isinstance(value, str) and value != value.encode(errors="replace").decode():
        return "is not valid Unicode text; correct its encoding"
    if isinstance(value, int) and abs(value) >= 2**63:
        return "is too large; use an integer of 64 bits"
    return None


load = RunConfig.load
