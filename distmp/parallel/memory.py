"""Predicts the memory of a rank under every strategy from the sizes of one model."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from distmp.buckets.layout import DEFAULT_BUCKET_BYTES
from distmp.parallel.blocks import find_blocks, outermost
from distmp.parallel.settings import AccumulationSettings, ShardingConfig
from distmp.precision.keep import parameters_in_fp32, storage_dtypes
from distmp.precision.policy import PrecisionPolicy

# Temporary bytes of FSDP for each parameter of a unit: three copies of its FP32 gradient (in FSDP,
# sent, received: 12), and the gathered 16-bit parameters of this unit and the next one (4).
UNIT_BYTES = 16


class Option(NamedTuple):
    """A strategy that `strategy: auto` can choose.

    Attributes:
        strategy: "ddp", "fsdp" or "hsdp".
        shard_optimizer: Whether `ddp` shards FP32 weights and optimizer state.
    """

    strategy: str
    shard_optimizer: bool = False

    def __str__(self) -> str:
        return f"{self.strategy} with shard_optimizer" if self.shard_optimizer else self.strategy


class ModelMemory(NamedTuple):
    """Memory that training needs for one copy of a model, in bytes, and sizes of its units.

    Attributes:
        parameters: Parameters in the dtypes in which the module holds them.
        stepped: Parameters in the dtypes in which the optimizer steps them.
        masters: FP32 master weights of 16-bit parameters; 0 if the parameters are stepped.
        optimizer_state: Two moments of each weight in its dtype, as in AdamW.
        average: FP32 average of the weights (setting `ema`), sharded like them; 0 without one.
        gradients: FP32 gradients.
        root: Parameters outside of the blocks, which FSDP gathers as one unit and keeps.
        root_elements: Number of parameters outside of the blocks.
        block_elements: Number of parameters of the largest block.
        largest_parameter: Number of elements of the largest parameter.
    """

    parameters: int
    stepped: int
    masters: int
    optimizer_state: int
    average: int
    gradients: int
    root: int
    root_elements: int
    block_elements: int
    largest_parameter: int

    def replicated(self, accumulation: AccumulationSettings, ranks: int, microbatches: int) -> int:
        """Return the predicted peak memory of a rank with `ddp`, without activations.

        Args:
            accumulation: The settings of `ddp`.
            ranks: Number of ranks.
            microbatches: Number of microbatches of a step on one rank.
        """
        sets = 1 + accumulation.drop_non_finite
        if accumulation.reproducible:
            sets += int(math.log2(microbatches))
        stepped, exchanged = self.masters + self.optimizer_state + self.average, 0
        if accumulation.shard_optimizer:
            stepped //= ranks
            # A bucket of gradients, of at least one parameter, as it is sent and received.
            bucket = max(DEFAULT_BUCKET_BYTES, 4 * self.largest_parameter)
            exchanged = 2 * min(bucket, self.gradients)
        return self.parameters + stepped + sets * self.gradients + exchanged

    def sharded(self, sharding: ShardingConfig, shards: int, microbatches: int) -> int:
        """Return the predicted peak memory of a rank with `fsdp` or `hsdp`, without activations.

        Args:
            sharding: The settings; with `accumulate: auto` gradients are accumulated in shards.
            shards: Number of ranks that share one copy.
            microbatches: Number of microbatches of a step on one rank.
        """
        of_weights = self.stepped + self.optimizer_state + self.average
        held = 0 if sharding.offload else of_weights // shards
        held += self.root if sharding.reshard_after_forward else self.parameters
        gradients = 0 if sharding.offload else self.gradients // shards
        if sharding.accumulate == "unsharded":
            gradients += self.gradients
        # At the start of backward there are only the gradients of earlier microbatches and of the
        # head, which is outside of the blocks.
        start = 4 * self.root_elements + UNIT_BYTES * self.block_elements
        if microbatches > 1:
            start += gradients
        end = gradients + UNIT_BYTES * max(self.root_elements, self.block_elements)
        return held + max(start, end)


def model_memory(
    model: nn.Module,
    policy: PrecisionPolicy,
    sharding: ShardingConfig,
    *,
    averaged: bool,
) -> ModelMemory:
    """Return the memory that training a model needs; the values of its parameters do not matter.

    Args:
        model: The model before a strategy changes it.
        policy: The resolved policy.
        sharding: Determines the blocks.
        averaged: Whether the run averages its weights.
    """
    dtypes = storage_dtypes(model, policy)
    kept = parameters_in_fp32(model, policy)
    in_blocks: set[int] = set()
    blocks = []
    for block in outermost(find_blocks(model, sharding.wrap)).values():
        own = {id(parameter): parameter.numel() for parameter in block.parameters()}
        in_blocks |= own.keys()
        blocks.append(sum(own.values()))
    parameters = stepped = masters = trained = moments = root = outside = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        held = count * dtypes[name].itemsize
        parameters += held
        if id(parameter) not in in_blocks:
            root += held
            outside += count
        if not parameter.requires_grad:
            stepped += count * parameter.dtype.itemsize
            continue
        trained += count
        in_fp32 = id(parameter) in kept
        itemsize = 4 if in_fp32 else policy.param_dtype.itemsize
        stepped += count * itemsize
        moments += 2 * count * itemsize
        if not in_fp32 and policy.casts_parameters and policy.has_masters:
            masters += 4 * count
    return ModelMemory(
        parameters,
        stepped,
        masters,
        moments,
        4 * trained if averaged else 0,
        4 * trained,
        root,
        outside,
        max(blocks, default=0),
        max(parameter.numel() for parameter in model.parameters()),
    )
