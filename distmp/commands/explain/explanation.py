"""Predict types, memory and communication of a run before it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from distmp.commands.explain import observe
from distmp.commands.explain.fake_ranks import applied_steps, simulate_ranks
from distmp.commands.explain.trace_steps import CommVolume, comm_volumes, trace_steps
from distmp.config import RunConfig
from distmp.data.order import microbatches_per_rank
from distmp.distributed.world import World, local_device
from distmp.parallel.build_strategy import resolve_strategy
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision import PrecisionPolicy, resolve
from distmp.precision.policy import costs
from distmp.training.components import build_model_and_data, round_frozen
from distmp.training.strategy_choice import choose_strategy
from distmp.utils import live_bytes as memory_parts
from distmp.utils.dtypes import dtype_name

# The first microbatch of a step, one in between, and the last.
MICROBATCHES_RUN = 3
# `reproducible` needs a power of two; beyond it, each doubling takes one more set of partial sums.
REPRODUCIBLE_RUN = 4


@dataclass(frozen=True)
class Explanation:
    """The explanation of a run.

    Attributes:
        world_size: Number of ranks.
        ranks_per_machine: Number of ranks on each machine.
        device: Device type of the ranks.
        policy: The resolved policy.
        strategy: The resolved strategy.
        strategy_reason: What the strategy selected and why; empty if nothing was left to select.
        microbatches: Number of microbatches per step on each rank.
        groups: The dtypes that the policy specifies for each group of modules.
        observed: The dtypes observed in the steps.
        memory: Memory of a rank at the peak of a step, in bytes by part.
        start_memory_bytes: Peak memory of a rank while the engine is built, in bytes.
        communication: What a rank sends in a step.
        low_precision_layers: Which linear layers have low-precision matmuls, as text; empty
            without any.
        differences: One line for each observation that differs from the policy.
        warnings: Settings that lose precision, with the relative error.
        policy_reason: Why this policy was selected.
    """

    world_size: int
    ranks_per_machine: int
    device: str
    policy: PrecisionPolicy
    strategy: str
    strategy_reason: str
    microbatches: int
    groups: list[observe.ModuleGroup]
    observed: observe.ObservedDtypes
    memory: dict[str, int]
    start_memory_bytes: int
    communication: list[CommVolume]
    low_precision_layers: str
    differences: list[str]
    warnings: list[str]
    policy_reason: str = ""

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

    def as_mapping(self) -> dict[str, Any]:
        """Return all fields and totals; `plain` makes them JSON values."""
        totals = ("parameters", "memory_bytes", "communication_bytes", "between_machines_bytes")
        return asdict(self) | {name: getattr(self, name) for name in totals}


def plain(value: object) -> object:
    """Return a JSON value for a dtype or a set, for `json.dumps(default=plain)`."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return sorted(map(str, map(plain, value))) if isinstance(value, set) else str(value)


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
    policy, reason = resolve(config.precision.policy, device)
    found = predict(config, policy, world_size, device, ranks_per_machine)
    return replace(found, policy_reason=reason)


def predict(
    config: RunConfig,
    policy: PrecisionPolicy,
    world_size: int,
    device: torch.device,
    ranks_per_machine: int | None = None,
) -> Explanation:
    """Explain a run under a resolved policy with steps on fake tensors and fake ranks.

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
    ranks = simulate_ranks(world_size, local, group=group)
    with _restored_settings(), ranks, applied_steps():
        world = World.current(device)
        parts = build_model_and_data(config, world)
        config, auto_reason = choose_strategy(config, parts, world)
        strategy = resolve_strategy(config.strategy, world)
        round_frozen(config, parts, policy)
        groups = observe.expected_groups(parts.model, policy, strategy, config.sharding.wrap)
        most = REPRODUCIBLE_RUN if config.reproducible else MICROBATCHES_RUN
        run = min(most, parts.microbatches)
        trace = trace_steps(config, parts, world, policy, groups=groups, microbatches=run)
    communication = comm_volumes(
        trace.collectives, parts.microbatches, run, local, shards=strategy in SHARDED_STRATEGIES
    )
    return Explanation(
        world_size,
        local,
        device.type,
        policy,
        strategy,
        "; ".join(filter(None, (auto_reason, trace.strategy_reason))),
        parts.microbatches,
        groups,
        trace.observed,
        _add_partial_sums(trace.peak, parts.microbatches, reproducible=config.reproducible),
        trace.start_peak,
        communication,
        trace.low_precision_layers,
        [
            *observe.differences(trace.observed, groups, policy),
            *_communication_differences(communication, groups),
        ],
        costs(policy),
    )


def _add_partial_sums(
    peak: dict[str, int], microbatches: int, *, reproducible: bool
) -> dict[str, int]:
    """Add the partial sums of microbatches that were not run: one set per doubling."""
    memory = {part: peak[part] for part in memory_parts.PARTS if peak.get(part)}
    if reproducible and microbatches > REPRODUCIBLE_RUN:
        doublings = (microbatches // REPRODUCIBLE_RUN).bit_length() - 1
        memory[memory_parts.PARTIAL_SUMS] += doublings * memory[memory_parts.GRADIENTS]
    return memory


def _communication_differences(
    communication: list[CommVolume], groups: list[observe.ModuleGroup]
) -> Iterator[str]:
    expected = {group.reduced for group in groups}
    for entry in communication:
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
    with ExitStack() as restored, torch.random.fork_rng(devices=[]):
        restored.callback(logger.setLevel, level)
        restored.callback(torch.set_num_threads, threads)
        restored.callback(torch.use_deterministic_algorithms, deterministic)
        restored.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
        yield
