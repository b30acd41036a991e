"""Everything that can be said about a run before it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distmp.config import RunConfig
from distmp.explain import memory as parts_of_memory
from distmp.explain.follow import follow
from distmp.explain.observe import Observed, differences, observe, smaller, types_of
from distmp.explain.pretend import pretend
from distmp.explain.types import Group, promised
from distmp.explain.wire import Traffic, traffic
from distmp.parallel import resolve_strategy
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.parallel.world import World, local_device
from distmp.precision import PrecisionPolicy, as_mapping, resolve
from distmp.precision.costs import costs
from distmp.precision.policy import dtype_name, dtype_word
from distmp.trainer import prepare

# The first microbatch of a step, one in between, and the last.
MICROBATCHES_RUN = 3
# With `reproducible` it has to be a power of two; beyond that each doubling takes one more set.
REPRODUCIBLE_RUN = 4


class Explanation(NamedTuple):
    """What a run will do.

    Attributes:
        world_size: Ranks.
        device: What each of them computes on.
        strategy: In force.
        strategy_reason: What it chose and why; empty if there was nothing to choose.
        policy: In force.
        policy_reason: Why.
        microbatches: Of a step, on each rank.
        groups: What is promised, by group of modules.
        memory: Bytes of a rank by part, when they are most in a step.
        wire: What a rank sends in a step.
        observed: What a real step did; None if the model is too large to run one.
        differences: Where it did not do what is promised.
        warnings: What loses precision, with the figure.
    """

    world_size: int
    device: str
    strategy: str
    strategy_reason: str
    policy: PrecisionPolicy
    policy_reason: str
    microbatches: int
    groups: list[Group]
    memory: dict[str, int]
    wire: list[Traffic]
    observed: Observed | None
    differences: list[str]
    warnings: list[str]

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(group.parameters for group in self.groups)

    def as_json(self) -> dict[str, Any]:
        """Return the same numbers as dictionaries, lists, text and numbers."""
        return {
            "world_size": self.world_size,
            "device": self.device,
            "strategy": self.strategy,
            "strategy_reason": self.strategy_reason,
            "policy": as_mapping(self.policy),
            "policy_reason": self.policy_reason,
            "microbatches": self.microbatches,
            "parameters": self.parameters,
            "groups": [self._group_as_json(group) for group in self.groups],
            "memory_bytes": {**self.memory, "total": sum(self.memory.values())},
            "wire": [{**entry._asdict(), "dtype": dtype_name(entry.dtype)} for entry in self.wire],
            "wire_bytes": sum(entry.nbytes for entry in self.wire),
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
    config = replace(config, compile="none", lockstep=replace(config.lockstep, every=0))
    device = local_device(0)
    policy, policy_reason = resolve(config.precision.policy, device)
    with _quiet():
        with pretend(world_size):
            world = World.current(device)
            strategy = resolve_strategy(config.strategy, world)
            parts = prepare(config, world)
            groups = promised(parts.model, policy, strategy)
            run = REPRODUCIBLE_RUN if config.reproducible else MICROBATCHES_RUN
            followed = follow(config, parts, world, microbatches=min(run, parts.microbatches))
        parameters = sum(group.parameters for group in groups)
        small = smaller(config, parameters)
        observed = None if small is None else observe(small, strategy)
    wire = traffic(followed.sent, parts.microbatches, shards=strategy in SHARDED_STRATEGIES)
    found = [] if observed is None else [*differences(groups, observed, policy)]
    return Explanation(
        world_size,
        device.type,
        strategy,
        followed.strategy_reason,
        policy,
        policy_reason,
        parts.microbatches,
        groups,
        _whole_tree(followed.peak, parts.microbatches, reproducible=config.reproducible),
        wire,
        observed,
        [*found, *_wire_differences(groups, wire)],
        costs(policy),
    )


def _whole_tree(peak: dict[str, int], microbatches: int, *, reproducible: bool) -> dict[str, int]:
    """Add the partial sums of microbatches that were not run: a set for each doubling."""
    memory = {part: peak[part] for part in parts_of_memory.PARTS if peak.get(part)}
    if reproducible and microbatches > REPRODUCIBLE_RUN:
        doublings = (microbatches // REPRODUCIBLE_RUN).bit_length() - 1
        memory[parts_of_memory.PARTIAL_SUMS] += doublings * memory[parts_of_memory.GRADIENTS]
    return memory


def _wire_differences(groups: list[Group], wire: list[Traffic]) -> Iterator[str]:
    promised_types = {group.reduced for group in groups}
    for entry in wire:
        if entry.purpose == "gradients" and entry.dtype not in promised_types:
            yield (
                f"gradients travel in {dtype_name(entry.dtype)} ({entry.kind}), and the policy "
                f"says {' or '.join(sorted(map(dtype_name, promised_types)))}"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the engine logs at its start to itself: it is all in the explanation."""
    logger = logging.getLogger("distmp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
