"""The engine against the oracle, and the oracle's own parts against torch."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.adversary.__main__ import describe, draw
from tests.adversary.cases import FEATURES, PARTS, Case, OptimizerSpec, ScaleSpec
from tests.adversary.oracle import Adam, AdamW, LossScale, Sgd, schedule_factor
from tests.adversary.run import run_cases
from tests.adversary.shrink import kinds

CASES = int(os.environ.get("ADVERSARY_CASES", "300"))
SEED = int(os.environ.get("ADVERSARY_SEED", "0"))
# The processes of one test run so many, so that several tests can run side by side.
PER_TEST = 50
BATCHES = [
    pytest.param(cases[first : first + PER_TEST], id=f"{size}-ranks-from-{first}")
    for size, cases in draw(SEED, CASES).items()
    for first in range(0, len(cases), PER_TEST)
]


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
    "6: parameters that are used only sometimes": lambda case: (
        _unused(case) or (case.model.unused and case.sharded)
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
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", BATCHES)
def test_engine_agrees_with_oracle(cases: list[Case]) -> None:
    cases = [case for case in cases if not any(known(case) for known in KNOWN.values())]
    failures = [
        (case, complaints)
        for case, complaints in zip(cases, run_cases(cases), strict=True)
        if complaints
    ]
    if failures:
        # Of each kind one, made smaller.
        distinct = {tuple(sorted(kinds(found))): (case, found) for case, found in failures}
        reports = [describe(*failure, seconds=30.0) for failure in list(distinct.values())[:3]]
        total = f"{len(failures)} of {len(cases)} cases failed, ADVERSARY_SEED={SEED}"
        pytest.fail("\n\n".join([*reports, total]), pytrace=False)


def test_every_feature_is_switched_on_or_known() -> None:
    assert set(FEATURES) == {"rates"}


# The oracle's own parts


OPTIMIZERS = [
    (Sgd, OptimizerSpec("sgd"), torch.optim.SGD, {}),
    (Sgd, OptimizerSpec("sgd", momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (
        Sgd,
        OptimizerSpec("sgd", momentum=0.5, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.5, "nesterov": True},
    ),
    (Adam, OptimizerSpec("adam", eps=0.1), torch.optim.Adam, {"betas": (0.9, 0.99), "eps": 0.1}),
    (
        AdamW,
        OptimizerSpec("adamw", betas=(0.8, 0.95)),
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-3},
    ),
]


@pytest.mark.parametrize(("ours", "spec", "theirs", "options"), OPTIMIZERS)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_optimizers_are_those_of_torch(
    ours: type, spec: OptimizerSpec, theirs: type, options: dict[str, object], decay: float
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, dtype=torch.float64)
    reference = torch.nn.Parameter(weight.clone())
    optimizer = theirs([reference], lr=0.1, weight_decay=decay, **options)
    update = ours(spec).update
    for _ in range(4):
        gradient = torch.randn(5, dtype=torch.float64)
        update("weight", weight, gradient, 0.1, decay)
        reference.grad = gradient
        optimizer.step()
        torch.testing.assert_close(weight, reference.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "number", "build"),
    [
        ("step", 2.0, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)),
        ("exponential", 0.8, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8)),
    ],
)
def test_schedules_are_those_of_torch(
    name: str, number: float, build: Callable[[torch.optim.Optimizer], object]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = build(optimizer)
    for applied in range(7):
        rate = 0.5 * schedule_factor(name, number, applied)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        schedule.step()  # type: ignore[attr-defined]


def test_the_scale_grows_and_backs_off_by_its_rules() -> None:
    scale = LossScale(
        ScaleSpec(init=8.0, growth_interval=2, hysteresis=2, min_scale=2.0, max_scale=16.0)
    )
    seen = []
    for overflow in [0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1]:
        scale.update(overflow=bool(overflow), empty=False)
        scale.update(overflow=False, empty=True)  # changes nothing
        seen.append(scale.value)
    assert seen == [8, 16, 16, 16, 16, 16, 16, 16, 8, 4, 2, 2]
