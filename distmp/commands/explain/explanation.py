"""Everything that can be said about a run before it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distmp.commands.explain import memory as parts_of_memory
from distmp.commands.explain.comm_volume import Traffic, traffic
from distmp.commands.explain.fake_ranks import pretend
from distmp.commands.explain.observe import Observed, differences, observe, smaller, types_of
from distmp.commands.explain.trace_steps import follow
from distmp.commands.explain.types import Group, promised
from distmp.config import RunConfig
from distmp.distributed.world import World, local_device
from distmp.parallel import resolve_strategy
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision import PrecisionPolicy, as_mapping, resolve
from distmp.precision.costs import costs
from distmp.precision.policy import dtype_word
from distmp.training.setup import prepare
from distmp.utils.dtypes import dtype_name

# The first microbatch of a step, one in between, and the last.
MICROBATCHES_RUN = 3
# With `reproducible` it has to be a power of two; beyond that each doubling takes one more set.
REPRODUCIBLE_RUN = 4


class Prediction(NamedTuple):
    """What a rank will hold and send.

    Attributes:
        strategy: In force.
        strategy_reason: What it chose and why; empty if there was nothing to choose.
        microbatches: Of a step, on each rank.
        groups: What is promised, by group of modules.
        memory: Bytes of a rank by part, when they are most in a step.
        wire: What a rank sends in a step.
    """

    strategy: str
    strategy_reason: str
    microbatches: int
    groups: list[Group]
    memory: dict[str, int]
    wire: list[Traffic]

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(group.parameters for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        """All parts of memory together."""
        return sum(self.memory.values())

    @property
    def wire_bytes(self) -> int:
        """All that a rank sends in a step."""
        return sum(entry.nbytes for entry in self.wire)


class Explanation(NamedTuple):
    """What a run will do.

    Attributes:
        world_size: Ranks.
        device: What each of them computes on.
        policy: In force.
        policy_reason: Why.
        predicted: What a rank will hold and send.
        observed: What a real step did; None if the model is too large to run one.
        differences: Where it did not do what is promised.
        warnings: What loses precision, with the figure.
    """

    world_size: int
    device: str
    policy: PrecisionPolicy
    policy_reason: str
    predicted: Prediction
    observed: Observed | None
    differences: list[str]
    warnings: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the same numbers as dictionaries, lists, text and numbers."""
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
            "wire": [
                {**entry._asdict(), "dtype": dtype_name(entry.dtype)} for entry in predicted.wire
            ],
            "wire_bytes": predicted.wire_bytes,
            "observed": None if self.observed is None else _observed_as_json(self.observed),
            "differences": self.differences,
            "warnings": self.warnings,
        }

    def seen(self, group: Group) -> str:
        """Return the types in which a group was seen to compute, or nothing."""
        if self.observed is None:
            return ""
        return " ".join(sorted(map(dtype_word, types_of(self.observed, group.name))))

    def _group_as_json(self, group: Group) -> dict[str, Any]:
        entry = {
            name: dtype_name(value) if isinstance(value, torch.dtype) else value
            for name, value in group._asdict().items()
        }
        return {**entry, "observed": self.seen(group).split()}


def _observed_as_json(observed: Observed) -> dict[str, Any]:
    def names(dtypes: set[torch.dtype]) -> list[str]:
        return sorted(map(dtype_name, dtypes))

    return {
        "of": observed.of,
        "stored": {name: names(found) for name, found in observed.stored.items()},
        "computed": {
            name: {kind: names(found) for kind, found in kinds.items()}
            for name, kinds in observed.computed.items()
        },
        "backward": names(observed.backward),
        "accumulated": names(observed.accumulated),
    }


def explain(config: RunConfig, world_size: int) -> Explanation:
    """Say what a run will do, without the ranks, the memory and the time for it.

    Args:
        config: The run.
        world_size: Its ranks; this machine need not have them.

    Raises:
        ConfigError: As the run itself would raise it.
    """
    config = replace(
        config, compile="none", rank_consistency=replace(config.rank_consistency, every=0)
    )
    device = local_device(0)
    policy, policy_reason = resolve(config.precision.policy, device)
    predicted = predict(config, policy, world_size, device)
    small = smaller(config, predicted.parameters)
    with _as_before():
        observed = None if small is None else observe(small, policy, predicted.strategy)
    found = [] if observed is None else [*differences(predicted.groups, observed, policy)]
    return Explanation(
        world_size,
        device.type,
        policy,
        policy_reason,
        predicted,
        observed,
        [*found, *_wire_differences(predicted)],
        costs(policy),
    )


def predict(
    config: RunConfig, policy: PrecisionPolicy, world_size: int, device: torch.device
) -> Prediction:
    """Say what a rank of a run will hold and send, by taking steps without values or other ranks.

    Args:
        config: The run.
        policy: Its policy, resolved.
        world_size: Its ranks.
        device: What a rank computes on.

    Raises:
        ConfigError: As the run itself would raise it.
    """
    with _as_before(), pretend(world_size, group=config.strategy in SHARDED_STRATEGIES):
        world = World.current(device)
        strategy = resolve_strategy(config.strategy, world)
        parts = prepare(config, world)
        groups = promised(parts.model, policy, strategy)
        run = REPRODUCIBLE_RUN if config.reproducible else MICROBATCHES_RUN
        followed = follow(config, parts, world, policy, microbatches=min(run, parts.microbatches))
    return Prediction(
        strategy,
        followed.strategy_reason,
        parts.microbatches,
        groups,
        _whole_tree(followed.peak, parts.microbatches, reproducible=config.reproducible),
        traffic(followed.sent, parts.microbatches, shards=strategy in SHARDED_STRATEGIES),
    )


def _whole_tree(peak: dict[str, int], microbatches: int, *, reproducible: bool) -> dict[str, int]:
    """Add the partial sums of microbatches that were not run: a set for each doubling."""
    memory = {part: peak[part] for part in parts_of_memory.PARTS if peak.get(part)}
    if reproducible and microbatches > REPRODUCIBLE_RUN:
        doublings = (microbatches // REPRODUCIBLE_RUN).bit_length() - 1
        memory[parts_of_memory.PARTIAL_SUMS] += doublings * memory[parts_of_memory.GRADIENTS]
    return memory


def _wire_differences(predicted: Prediction) -> Iterator[str]:
    promised_types = {group.reduced for group in predicted.groups}
    for entry in predicted.wire:
        if entry.purpose == "gradients" and entry.dtype not in promised_types:
            yield (
                f"gradients travel in {dtype_name(entry.dtype)} ({entry.kind}), and the policy "
                f"says {' or '.join(sorted(map(dtype_name, promised_types)))}"
            )


@contextmanager
def _as_before() -> Iterator[None]:
    """Put back what engines set for the whole process, and keep what they log to itself."""
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
