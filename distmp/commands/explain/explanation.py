"""Predict types, memory and communication of a run before it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distmp.commands.explain.comm_volume import CommVolume, comm_volumes
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.commands.explain.hardware_rates import (
    DATASHEET,
    EIGHT_BITS,
    FOUR_BITS,
    largest_gain,
)
from distmp.commands.explain.observe import ObservedDtypes, differences, observe, smaller, types_of
from distmp.commands.explain.product_flops import Products
from distmp.commands.explain.trace_steps import trace_steps
from distmp.commands.explain.types import ModuleGroup, expected_groups
from distmp.config import RunConfig
from distmp.data.order import microbatches_per_rank
from distmp.distributed.world import World, local_device
from distmp.parallel import resolve_strategy
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision import PrecisionPolicy, as_mapping, resolve
from distmp.precision.costs import costs
from distmp.precision.policy import dtype_word
from distmp.quantization.selection import OPTIONAL
from distmp.training.setup import prepare, round_frozen
from distmp.training.strategy_choice import choose_strategy
from distmp.utils import live_bytes as memory_parts
from distmp.utils.dtypes import dtype_name

# The first microbatch of a step, one in between, and the last.
MICROBATCHES_RUN = 3
# `reproducible` needs a power of two; beyond it, each doubling takes one more set of partial sums.
REPRODUCIBLE_RUN = 4


class Prediction(NamedTuple):
    """Predicted memory and communication of a rank.

    Attributes:
        strategy: The resolved strategy.
        strategy_reason: What the strategy selected and why; empty if nothing was left to select.
        ranks_per_machine: Number of ranks on each machine.
        microbatches: Number of microbatches per step on each rank.
        groups: The dtypes that the policy specifies for each group of modules.
        memory: Memory of a rank at the peak of a step, in bytes by part.
        start_memory_bytes: Peak memory of a rank while the engine is built, in bytes.
        communication: What a rank sends in a step.
        products: The matrix products of a rank in a step.
    """

    strategy: str
    strategy_reason: str
    ranks_per_machine: int
    microbatches: int
    groups: list[ModuleGroup]
    memory: dict[str, int]
    start_memory_bytes: int
    communication: list[CommVolume]
    products: Products

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(group.parameters for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a rank, in bytes."""
        return sum(self.memory.values())

    @property
    def communication_bytes(self) -> int:
        """Number of bytes that a rank sends in a step."""
        return sum(entry.nbytes for entry in self.communication)

    @property
    def between_machines_bytes(self) -> int:
        """Number of bytes that a rank sends to other machines in a step."""
        return sum(entry.between_machines for entry in self.communication)


class Explanation(NamedTuple):
    """The explanation of a run.

    Attributes:
        world_size: Number of ranks.
        device: Device type of the ranks.
        policy: The resolved policy.
        policy_reason: Why this policy was selected.
        predicted: Predicted memory and communication of a rank.
        observed: The dtypes observed in a real step; None if the model is too large to run one.
        differences: One line for each observation that differs from the policy.
        warnings: Settings that lose precision, with the relative error.
    """

    world_size: int
    device: str
    policy: PrecisionPolicy
    policy_reason: str
    predicted: Prediction
    observed: ObservedDtypes | None
    differences: list[str]
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        predicted = self.predicted
        return {
            "world_size": self.world_size,
            "device": self.device,
            "strategy": predicted.strategy,
            "strategy_reason": predicted.strategy_reason,
            "policy": as_mapping(self.policy),
            "policy_reason": self.policy_reason,
            "microbatches": predicted.microbatches,
            "parameters": predicted.parameters,
            "groups": [self._group_as_json(group) for group in predicted.groups],
            "memory": predicted.memory,
            "memory_bytes": predicted.memory_bytes,
            "start_memory_bytes": predicted.start_memory_bytes,
            "ranks_per_machine": predicted.ranks_per_machine,
            "wire": [
                {
                    **entry._asdict(),
                    "dtype": dtype_name(entry.dtype),
                    "inside_machine": entry.inside_machine,
                }
                for entry in predicted.communication
            ],
            "wire_bytes": predicted.communication_bytes,
            "wire_bytes_between_machines": predicted.between_machines_bytes,
            "products": {
                "flops": predicted.products.flops,
                "layers": predicted.products.layers,
                "largest_gain": largest_gains(predicted.products),
            },
            "observed": None if self.observed is None else _observed_as_json(self.observed),
            "differences": self.differences,
            "warnings": self.warnings,
        }

    def seen(self, group: ModuleGroup) -> str:
        """Return the dtypes in which a group was observed to compute, or an empty string."""
        if self.observed is None:
            return ""
        dtypes = sorted(map(dtype_word, types_of(self.observed, group.name)))
        narrow = sorted(self.observed.narrow.get(group.name, ())) if group.narrow else []
        return " ".join([*narrow, *([] if narrow else dtypes)])

    def _group_as_json(self, group: ModuleGroup) -> dict[str, Any]:
        entry = {
            name: dtype_name(value) if isinstance(value, torch.dtype) else value
            for name, value in group._asdict().items()
        }
        return {**entry, "observed": self.seen(group).split()}


def _observed_as_json(observed: ObservedDtypes) -> dict[str, Any]:
    def names(dtypes: set[torch.dtype]) -> list[str]:
        return sorted(map(dtype_name, dtypes))

    return {
        "of": observed.of,
        "stored": {name: names(dtypes) for name, dtypes in observed.stored.items()},
        "computed": {
            name: {kind: names(dtypes) for kind, dtypes in kinds.items()}
            for name, kinds in observed.computed.items()
        },
        "backward": names(observed.backward),
        "accumulated": names(observed.accumulated),
    }


def explain(
    config: RunConfig, world_size: int, ranks_per_machine: int | None = None
) -> Explanation:
    """Explain a run without its ranks, memory and time.

    Args:
        config: The configuration of the run.
        world_size: Number of ranks, which this machine need not have.
        ranks_per_machine: Number of ranks on each machine; None: all of them.

    Raises:
        ConfigError: If the run itself would raise it.
        SetupError: If `strategy: auto` finds no strategy, as in the run itself.
    """
    config = replace(
        config, compile="none", rank_consistency=replace(config.rank_consistency, every=0)
    )
    device = local_device(0)
    policy, policy_reason = resolve(config.precision.policy, device)
    predicted = predict(config, policy, world_size, device, ranks_per_machine)
    small = smaller(config, predicted.parameters)
    with _restored_settings():
        observed = (
            None
            if small is None
            else observe(small, _for_small_model(policy, config, small), predicted.strategy)
        )
    mismatches = [] if observed is None else [*differences(observed, policy)]
    return Explanation(
        world_size,
        device.type,
        policy,
        policy_reason,
        predicted,
        observed,
        [*mismatches, *_communication_differences(predicted)],
        costs(policy),
    )


def _for_small_model(
    policy: PrecisionPolicy, config: RunConfig, small: RunConfig
) -> PrecisionPolicy:
    """Return the policy without patterns of blocks that a smaller model does not have."""
    if small.model == config.model or not policy.is_narrow:
        return policy
    words = tuple(pattern for pattern in policy.hp if pattern in OPTIONAL)
    return replace(policy, hp=words)


def predict(
    config: RunConfig,
    policy: PrecisionPolicy,
    world_size: int,
    device: torch.device,
    ranks_per_machine: int | None = None,
) -> Prediction:
    """Predict memory and communication of a rank with steps on fake tensors and fake ranks.

    Args:
        config: The configuration of the run.
        policy: The resolved policy.
        world_size: Number of ranks.
        device: Device of a rank.
        ranks_per_machine: Number of ranks on each machine; None: all of them.

    Raises:
        ConfigError: If the run itself would raise it.
        SetupError: If `strategy: auto` finds no strategy, as in the run itself.
    """
    # Before any rank is simulated: a fake process group takes memory for each of them.
    microbatches_per_rank(config.batch.global_batch_size, config.batch.microbatch_size, world_size)
    local = ranks_per_machine or world_size
    group = config.strategy in SHARDED_STRATEGIES
    with _restored_settings(), simulate_ranks(world_size, local, group=group):
        world = World.current(device)
        parts = prepare(config, world)
        config, auto_reason = choose_strategy(config, parts, world)
        strategy = resolve_strategy(config.strategy, world)
        round_frozen(config, parts, policy)
        groups = expected_groups(parts.model, policy, strategy, config.sharding.wrap)
        run = REPRODUCIBLE_RUN if config.reproducible else MICROBATCHES_RUN
        trace = trace_steps(config, parts, world, policy, microbatches=min(run, parts.microbatches))
    return Prediction(
        strategy,
        "; ".join(filter(None, (auto_reason, trace.strategy_reason))),
        local,
        parts.microbatches,
        groups,
        _add_partial_sums(trace.peak, parts.microbatches, reproducible=config.reproducible),
        trace.start_peak,
        comm_volumes(
            trace.collectives, parts.microbatches, local, shards=strategy in SHARDED_STRATEGIES
        ),
        _of_all_microbatches(trace.products, parts.microbatches, min(run, parts.microbatches)),
    )


def _of_all_microbatches(products: Products, microbatches: int, run: int) -> Products:
    """Return the products of a step; each microbatch has the same."""
    flops = {label: count * microbatches // run for label, count in products.flops.items()}
    return products._replace(flops=flops)


def largest_gains(products: Products) -> dict[str, float | None]:
    """Return upper limits of the gain over bfloat16 by GPU; empty without narrow products."""
    eight_bits, four_bits = products.share(EIGHT_BITS), products.share(FOUR_BITS)
    if not (eight_bits or four_bits):
        return {}
    return {name: largest_gain(rates, eight_bits, four_bits) for name, rates in DATASHEET.items()}


def _add_partial_sums(
    peak: dict[str, int], microbatches: int, *, reproducible: bool
) -> dict[str, int]:
    """Add the partial sums of microbatches that were not run: one set per doubling."""
    memory = {part: peak[part] for part in memory_parts.PARTS if peak.get(part)}
    if reproducible and microbatches > REPRODUCIBLE_RUN:
        doublings = (microbatches // REPRODUCIBLE_RUN).bit_length() - 1
        memory[memory_parts.PARTIAL_SUMS] += doublings * memory[memory_parts.GRADIENTS]
    return memory


def _communication_differences(predicted: Prediction) -> Iterator[str]:
    expected = {group.reduced for group in predicted.groups}
    for entry in predicted.communication:
        if entry.purpose == "gradients" and entry.dtype not in expected:
            yield (
                f"gradients are communicated in {dtype_name(entry.dtype)} ({entry.kind}), but the "
                f"policy specifies {' or '.join(sorted(map(dtype_name, expected)))}"
            )


@contextmanager
def _restored_settings() -> Iterator[None]:
    """Restore the process-wide settings that engines change, and silence their logs."""
    logger = logging.getLogger("distmp")
    level, threads = logger.level, torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    logger.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
