"""Cases that may touch what is known to be wrong, so that other failures can be seen."""

from __future__ import annotations

from collections.abc import Callable

from tests.adversary.cases import PARTS, Case


def _unused(case: Case) -> bool:
    """Whether some part is used in none of the microbatches of a step."""
    used = [
        {part for batches in step.ranks for batch in batches for part in batch.uses}
        for step in case.steps
    ]
    return any(parts != set(PARTS) for parts in used)


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
    "4: statistics of dropped microbatches": lambda case: (
        case.drops and case.model.norm and any(step.faults for step in case.steps)
    ),
    "5: statistics of recomputed blocks": lambda case: (
        case.activation_checkpointing == "blocks" and case.model.norm
    ),
    "6: parameters that are used only sometimes, sharded": lambda case: (
        case.sharded and (_unused(case) or case.model.unused)
    ),
    "6: parameters that are used only sometimes, after a state is loaded": lambda case: (
        _unused(case) and any(step.reload for step in case.steps)
    ),
    "7: fsdp in 16 bits with parameters without gradients": lambda case: (
        case.sharded
        and case.policy != "fp32"
        and (case.model.unused or any(set(b.uses) != set(PARTS) for b in case.microbatches))
    ),
    "9: infinite weights": lambda case: any(
        fault.place == "weight" for step in case.steps for _, _, fault in step.faults
    ),
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
}


def known(case: Case) -> list[str]:
    """Return what is known to be wrong that a case may touch."""
    return [name for name, touches in KNOWN.items() if touches(case)]
