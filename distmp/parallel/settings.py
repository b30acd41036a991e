"""Settings of parallelism: section `sharding`, activation checkpointing and compilation.

A block is a module that is gathered, recomputed or compiled as one unit; `distmp.parallel.blocks`
finds the blocks of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from distmp.errors import ConfigError, nearest
from distmp.utils.annotations import check_types

Accumulation = Literal["auto", "sharded", "unsharded", "hybrid"]
ActivationCheckpointing = Literal["none", "blocks"] | dict[str, Any]
Compilation = Literal["none", "blocks", "model"]

STRATEGIES = ("auto", "single", "ddp", "fsdp", "hsdp")
SHARDED_STRATEGIES = ("fsdp", "hsdp")
ON_NONFINITE = ("skip_step", "drop_microbatch")


@dataclass(frozen=True)
class ShardingConfig:
    """How the strategies fsdp and hsdp divide, gather and reduce the model.

    Raises:
        ConfigError: If a value cannot be used.
    """

    accumulate: Accumulation = "auto"
    """Where gradients of microbatches are accumulated, always in FP32. `sharded`: every microbatch
    is reduced and added to this rank's shard. `unsharded`: every rank accumulates full gradients,
    which are reduced once per step. `hybrid` (hsdp): every microbatch is reduced within the shard
    group, and once per step across groups. `auto`: chosen by the number of microbatches, free
    memory and communicated bytes; the reason is logged."""

    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after forward and gather them again for backward;
    false keeps the full model in memory between forward and backward."""

    shard_size: int | None = None
    """hsdp: number of ranks that share one copy of the model; null: the ranks of one machine."""

    wrap: tuple[str, ...] = ()
    """Patterns (`*` and `?`) for the class names or module names of blocks. Empty: the classes in
    the model's `_no_split_modules`, otherwise the entries of its outermost module lists."""

    offload: bool = False
    """Keep parameter shards, gradients and optimizer state in host memory."""

    quantized_gather: ClassVar[bool] = True
    """Gather the weights of linear layers with narrow products (fp8, mxfp8, nvfp4)
    in 8 bits, which does not change results."""

    def __post_init__(self) -> None:
        check_types(self, "sharding")
        if self.accumulate not in get_args(Accumulation):
            known = nearest(str(self.accumulate), get_args(Accumulation))
            raise ConfigError("sharding.accumulate", self.accumulate, known)
        if self.shard_size is not None and self.shard_size < 1:
            raise ConfigError("sharding.shard_size", self.shard_size, "use 1 or more ranks")
        if not all(self.wrap):
            raise ConfigError("sharding.wrap", self.wrap, "a pattern needs at least one character")

    def check(self, strategy: str) -> None:
        """Refuse settings that a strategy does not use.

        Raises:
            ConfigError: Naming the setting and the strategies that use it.
        """
        if strategy not in SHARDED_STRATEGIES:
            if self.accumulate != "auto":
                self._refuse("accumulate", strategy, "fsdp and hsdp")
            if not self.reshard_after_forward:
                self._refuse("reshard_after_forward", strategy, "fsdp and hsdp")
            if self.offload:
                self._refuse("offload", strategy, "fsdp and hsdp")
        if self.shard_size is not None and strategy != "hsdp":
            self._refuse("shard_size", strategy, "hsdp")
        if self.accumulate == "hybrid" and strategy != "hsdp":
            self._refuse("accumulate", strategy, "hsdp")

    def _refuse(self, name: str, strategy: str, strategies: str) -> None:
        raise ConfigError(
            f"sharding.{name}",
            getattr(self, name),
            f"applies only to {strategies}, but strategy is {strategy!r}",
        )


@dataclass(frozen=True)
class Recomputation:
    """Which activations backward recomputes; see `distmp.parallel.recomputation`.

    Raises:
        ConfigError: If a value cannot be used.
    """

    every: int = 1
    """Recompute every n-th block only."""

    save: tuple[str, ...] = ()
    """Operations inside of these blocks whose results are kept: matmul, attention, or operators of
    torch, such as aten.mm."""

    def __post_init__(self) -> None:
        check_types(self, "activation_checkpointing")
        if self.save:
            from distmp.parallel.saved_operations import operators  # imports torch

            operators(self.save)
        if self.every < 1:
            raise ConfigError("activation_checkpointing.every", self.every, "use 1 or more")

    @classmethod
    def of(cls, value: ActivationCheckpointing) -> Recomputation | None:
        """Return what a value of `activation_checkpointing` means; None: nothing is recomputed.

        Raises:
            ConfigError: If it is not a value of this setting.
        """
        if value == "none":
            return None
        if isinstance(value, dict) and value:
            # Import lazily: your own loop needs neither YAML nor the command line.
            from distmp.utils.settings import from_mapping

            section = {"activation_checkpointing": value}
            return from_mapping(_Section, section).activation_checkpointing
        if value != "blocks":
            problem = nearest(str(value), ("none", "blocks"))
            raise ConfigError(
                "activation_checkpointing",
                value,
                f"{problem}, or write {{every: 2}} or {{save: [matmul, attention]}}",
            )
        return cls()


@dataclass(frozen=True)
class _Section:
    """Gives messages the name of the setting."""

    activation_checkpointing: Recomputation = field(default_factory=Recomputation)


@dataclass(frozen=True)
class ParallelConfig:
    """How a strategy changes a model, except for precision.

    Attributes:
        sharding: Settings of the sharded strategies.
        activation_checkpointing: "blocks" keeps only the inputs of each block for backward and
            recomputes its activations; parameter names do not change. The keys of a dictionary are
            the fields of `Recomputation`.
        compile: "blocks" compiles each block with `torch.compile`, "model" the full model.
        microbatches: Number of microbatches of a step on one rank; None if unknown.
    """

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: Compilation = "none"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        check_types(self, skip={"activation_checkpointing"})
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigError("microbatches", self.microbatches, "use 1 or more, or None")
        if self.compile not in get_args(Compilation):
            known = nearest(str(self.compile), get_args(Compilation))
            raise ConfigError("compile", self.compile, known)
        _ = self.recomputation

    @property
    def recomputation(self) -> Recomputation | None:
        """What `activation_checkpointing` means; None: nothing is recomputed."""
        return Recomputation.of(self.activation_checkpointing)


@dataclass(frozen=True)
class AccumulationSettings:
    """How the strategies single and ddp accumulate, reduce and step gradients.

    Attributes:
        shard_optimizer: Whether every rank keeps and steps only its shard of the FP32 weights and
            the optimizer state.
        reproducible: Whether results are bitwise equal for every power-of-two number of ranks.
        on_nonfinite: "skip_step", or "drop_microbatch" to drop only microbatches with non-finite
            gradients.

    Raises:
        ConfigError: If a value is not one of these.
    """

    shard_optimizer: bool = False
    reproducible: bool = False
    on_nonfinite: str = "skip_step"

    def __post_init__(self) -> None:
        check_types(self, skip={"on_nonfinite"})
        if self.on_nonfinite not in ON_NONFINITE:
            raise ConfigError(
                "precision.on_nonfinite",
                self.on_nonfinite,
                nearest(self.on_nonfinite, ON_NONFINITE),
            )

    @property
    def drop_non_finite(self) -> bool:
        """Whether single microbatches can be dropped."""
        return self.on_nonfinite == "drop_microbatch"

    def refuse_for(self, strategy: str) -> None:
        """Refuse settings that a sharded strategy does not implement.

        Raises:
            ConfigError: Naming the first such setting.
        """
        problems = {
            "shard_optimizer": "always shards the optimizer",
            "reproducible": "does not control the order of additions in torch",
            "on_nonfinite": "reduces gradients before they can be checked",
        }
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                section = "precision." if setting.name == "on_nonfinite" else ""
                raise ConfigError(
                    f"{section}{setting.name}",
                    value,
                    f"needs strategy single or ddp; {strategy} {problems[setting.name]}",
                )
