"""Settings of parallelism: section `sharding`, activation checkpointing and compilation.

A block is a module that is gathered, recomputed or compiled as one unit; `distmp.parallel.blocks`
finds the blocks of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from distmp.errors import ConfigError, nearest, require
from distmp.utils.annotations import Section, check_types

Accumulation = Literal["auto", "sharded", "unsharded", "hybrid"]
ActivationCheckpointing = Literal["none", "blocks"]
Compilation = Literal["none", "blocks", "model"]
OnNonfinite = Literal["skip_step", "drop_microbatch"]

STRATEGIES = ("auto", "single", "ddp", "fsdp", "hsdp")
SHARDED_STRATEGIES = ("fsdp", "hsdp")
# The strategies that do what FSDP1 and DeepSpeed call this.
_SIMILAR = dict.fromkeys(("full_shard", "shard_grad_op", "zero2", "zero3"), "fsdp")


def nearest_strategy(name: str) -> str:
    """Return which strategy was probably meant by an unknown name, or the list of them."""
    return nearest(_SIMILAR.get(name, name), STRATEGIES)


@dataclass(frozen=True)
class ShardingConfig(Section, section="sharding"):
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
    the model's `_no_split_modules` or the list entries that contain them, otherwise the entries of
    its outermost module lists."""

    def _check(self) -> None:
        valid = self.shard_size is None or self.shard_size >= 1
        self._require(valid, "shard_size", "use 1 or more ranks")
        self._require(all(self.wrap), "wrap", "a pattern needs at least one character")

    def check(self, strategy: str) -> None:
        """Refuse settings that a strategy does not use.

        Raises:
            ConfigError: Naming the setting and the strategies that use it.
        """
        uses = {
            "accumulate": ("hsdp",) if self.accumulate == "hybrid" else SHARDED_STRATEGIES,
            "reshard_after_forward": SHARDED_STRATEGIES,
            "shard_size": ("hsdp",),
        }
        for setting in fields(self):
            value, strategies = getattr(self, setting.name), uses.get(setting.name, (strategy,))
            problem = f"applies only to {' and '.join(strategies)}, but strategy is {strategy!r}"
            applies = value == setting.default or strategy in strategies
            self._require(applies, setting.name, problem)


@dataclass(frozen=True)
class ParallelConfig:
    """How a strategy changes a model, except for precision.

    Attributes:
        sharding: Settings of the sharded strategies.
        activation_checkpointing: "blocks" keeps only the inputs of each block for backward and
            recomputes its activations; parameter names do not change.
        compile: "blocks" compiles each block with `torch.compile`, "model" the full model.
        microbatches: Number of microbatches of a step on one rank; None if unknown.

    Example:
        >>> from distmp.parallel import ParallelConfig
        >>> ParallelConfig(activation_checkpointing="blocks", compile="blocks").compile
        'blocks'
    """

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: Compilation = "none"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.microbatches is not None and self.microbatches < 1:
            raise ConfigError("microbatches", self.microbatches, "use 1 or more, or None")


@dataclass(frozen=True, kw_only=True)
class AccumulationSettings:
    """How the strategies single and ddp accumulate, reduce and apply gradients."""

    shard_optimizer: bool = False
    """Shard FP32 weights and optimizer state over the ranks (`single` and `ddp`); each rank updates
    its shard."""

    reproducible: bool = False
    """Compute the same bits on 1, 2, 4, 8 ... ranks from the same global batch (`single` and
    `ddp`). A step keeps the buffers that the first microbatch of the global batch wrote. Sets one
    CPU thread and `torch.use_deterministic_algorithms` for the process."""

    on_nonfinite: OnNonfinite = "skip_step"
    """"skip_step" skips a step with a non-finite gradient; "drop_microbatch" drops the microbatch
    and averages over the others (`single` and `ddp`)."""

    def refuse_for(self, strategy: str) -> None:
        """Refuse settings that a sharded strategy does not implement.

        Raises:
            ConfigError: Naming the first such setting.
        """
        reasons = {
            "shard_optimizer": "always shards the optimizer",
            "reproducible": "does not control the order of additions in torch",
            "precision.on_nonfinite": "reduces gradients before they can be checked",
        }
        for setting, reason in reasons.items():
            name = setting.removeprefix("precision.")
            value, default = getattr(self, name), getattr(AccumulationSettings, name)
            problem = f"needs strategy single or ddp; {strategy} {reason}"
            require(value == default, setting, value, problem)
