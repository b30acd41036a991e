"""Settings of how a model is spread over ranks: section `sharding`, and what is done to its blocks.

A block is what is gathered, recomputed or compiled as a whole; `distmp.parallel.blocks` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from distmp.errors import ConfigError, nearest
from distmp.utils.annotations import check_types

Accumulation = Literal["auto", "sharded", "unsharded", "hybrid"]
ActivationCheckpointing = Literal["none", "blocks"]
Compilation = Literal["none", "blocks", "model"]

SHARDED_STRATEGIES = ("fsdp", "hsdp", "fsdp1")


@dataclass(frozen=True)
class ShardingConfig:
    """How the strategies fsdp, hsdp and fsdp1 divide, gather and reduce the model.

    Raises:
        ConfigError: If a value cannot be used.
    """

    accumulate: Accumulation = "auto"
    """Where gradients of microbatches are added up, always in FP32. `sharded`: reduced every
    microbatch, into this rank's shard. `unsharded`: whole on every rank, reduced once per step.
    `hybrid` (hsdp): reduced every microbatch among the ranks of a shard group, once per step across
    groups. `auto`: chosen from microbatches, memory and bytes, with its reason."""

    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after forward and gather them again for backward;
    false holds the whole model in memory in between."""

    shard_size: int | None = None
    """hsdp: ranks that share one copy of the model; null: those of one machine."""

    wrap: tuple[str, ...] = ()
    """What a block is: patterns (`*` and `?`) for class names or module names. Empty: the classes
    in the model's `_no_split_modules`, else the entries of its outermost lists of modules."""

    offload: bool = False
    """fsdp and hsdp: keep shards, gradients and optimizer state in the memory of the host."""

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
        """Refuse settings that a strategy would ignore.

        Raises:
            ConfigError: Naming the setting and the strategies that it is for.
        """
        if strategy not in SHARDED_STRATEGIES:
            if self.accumulate != "auto":
                self._is_for("accumulate", strategy, "fsdp, hsdp and fsdp1")
            if not self.reshard_after_forward:
                self._is_for("reshard_after_forward", strategy, "fsdp, hsdp and fsdp1")
        if self.shard_size is not None and strategy != "hsdp":
            self._is_for("shard_size", strategy, "hsdp")
        if self.offload and strategy not in ("fsdp", "hsdp"):
            self._is_for("offload", strategy, "fsdp and hsdp")
        if self.accumulate == "hybrid" and strategy != "hsdp":
            self._is_for("accumulate", strategy, "hsdp")
        if self.accumulate == "unsharded" and strategy == "fsdp1":
            raise ConfigError(
                "sharding.accumulate",
                self.accumulate,
                "FSDP1 adds up unsharded gradients in the type of its parameters; use 'sharded', "
                "or strategy = 'fsdp'",
            )

    def _is_for(self, name: str, strategy: str, strategies: str) -> None:
        raise ConfigError(
            f"sharding.{name}",
            getattr(self, name),
            f"is for the strategies {strategies}, and strategy is {strategy!r}",
        )


@dataclass(frozen=True)
class ParallelConfig:
    """All that a strategy does to a model, besides precision.

    Attributes:
        sharding: How the sharded strategies work.
        activation_checkpointing: "blocks" keeps only the inputs of each block for backward and
            computes the rest again; parameter names stay.
        compile: "blocks" compiles each block with `torch.compile`, "model" the whole.
        microbatches: Microbatches of a step, where that is known.
    """

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: Compilation = "none"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigError("microbatches", self.microbatches, "use 1 or more, or None")
        choices = {"activation_checkpointing": ActivationCheckpointing, "compile": Compilation}
        for setting, literal in choices.items():
            value = getattr(self, setting)
            if value not in get_args(literal):
                raise ConfigError(setting, value, nearest(str(value), get_args(literal)))
