"""Cases that may touch what is known to be wrong, so that other failures can be seen."""

from __future__ import annotations

from collections.abc import Callable

from tests.adversary.cases import Case


def _empty_shard(case: Case) -> bool:
    """Whether the last rank has no element of any parameter."""
    ranks = case.shard_size or case.world_size
    rows = [
        case.model.width,
        7 if case.model.kind == "embedding" else 3,
        *[2, 3] * case.model.unused,
    ]
    return all(-(-count // ranks) * (ranks - 1) >= count for count in rows)


# Cases that may touch what is known to be wrong, by what it is. To be emptied.
KNOWN: dict[str, Callable[[Case], bool]] = {
    "A: fsdp with a rank that has no elements": lambda case: (
        case.strategy in ("fsdp", "hsdp") and _empty_shard(case)
    ),
    "B: loading 0-dim parameters into a sharded optimizer": lambda case: (
        case.model.scalar and case.shard_optimizer and any(step.reload for step in case.steps)
    ),
    "C: unfreezing under fsdp with bf16-pure": lambda case: (
        case.strategy in ("fsdp", "hsdp")
        and case.policy == "bf16-pure"
        and any(step.thaw for step in case.steps)
    ),
    "D: freezing under fsdp what a step does not run": lambda case: (
        case.strategy in ("fsdp", "hsdp")
        and any(step.freeze for step in case.steps)
        and any("block" not in batch.uses for batch in case.microbatches)
    ),
    "G: fsdp1 evaluates, then does not run a block, without resharding": lambda case: (
        case.strategy == "fsdp1"
        and not case.reshard_after_forward
        and any(step.evaluate for step in case.steps)
        and any("block" not in batch.uses for batch in case.microbatches)
    ),
}


def known(case: Case) -> list[str]:
    """Return what is known to be wrong that a case may touch."""
    return [name for name, touches in KNOWN.items() if touches(case)]
