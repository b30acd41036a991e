"""Compares the engine with the oracle, and parts of the oracle with torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.adversary import judge
from tests.adversary.__main__ import describe, draw
from tests.adversary.cases import (
    Case,
    OptimizerSpec,
    ScaleSpec,
    dumps,
    generate,
    loads,
    reproducible_on,
)
from tests.adversary.oracle import Adam, AdamW, LossScale, Sgd, schedule_factor
from tests.adversary.run import final_bits, run_case, run_cases
from tests.adversary.shrink import kinds
from tests.marks import nightly
from tests.ranks import ranks, run_ranks

# `make nightly` tries thousands.
CASES = int(os.environ.get("ADVERSARY_CASES", "20"))
SEED = int(os.environ.get("ADVERSARY_SEED", "0"))
# Number of cases per test, so that several tests can run in parallel.
PER_TEST = 50
BATCHES = [
    pytest.param(cases[first : first + PER_TEST], id=f"{size}-ranks-from-{first}")
    for size, cases in draw(SEED, CASES).items()
    for first in range(0, len(cases), PER_TEST)
]

# Bugs that the oracle has found, each in its smallest case.
FOUND_BEFORE = {
    "a rank of fsdp without elements": """
        {"seed": 1, "world_size": 4, "strategy": "fsdp", "model": {"width": 6},
         "steps": [{"ranks": [[{}], [{}], [{}], [{}]]}]}""",
    "a 0-dim parameter loaded into a sharded optimizer": """
        {"seed": 1, "world_size": 2, "strategy": "ddp", "shard_optimizer": true,
         "model": {"scalar": true}, "optimizer": {"name": "adam"},
         "steps": [{"ranks": [[{}], [{}]]}, {"ranks": [[{}], [{}]], "reload": true}]}""",
    "momentum of what is frozen and not run": """
        {"seed": 1, "world_size": 2, "strategy": "fsdp", "optimizer": {"name": "adamw"},
         "steps": [{"ranks": [[{}], [{}]]},
                   {"ranks": [[{"uses": ["offset"]}], [{"uses": ["side"]}]],
                    "freeze": ["blocks.0.core.weight"]}]}""",
    "weights of before the update after an evaluation": """
        {"seed": 567070154, "world_size": 2, "strategy": "fsdp", "model": {"blocks": 2},
         "reshard_after_forward": false, "optimizer": {"name": "adam", "lr": 0.05},
         "steps": [{"ranks": [[{}], [{}]], "evaluate": true},
                   {"ranks": [[{"uses": ["side"]}], [{"uses": ["offset", "side"]}]]},
                   {"ranks": [[{}], [{}]]}]}""",
    "the value of what is frozen during training, when it is loaded": """
        {"seed": 37697281, "world_size": 1, "policy": "bf16",
         "steps": [{"ranks": [[{}]]}, {"ranks": [[{}]], "freeze": ["blocks.0.core.bias"]},
                   {"ranks": [[{}]], "reload": true}]}""",
}


@pytest.mark.parametrize("case", FOUND_BEFORE.values(), ids=FOUND_BEFORE)
def test_what_was_found_before_stays_mended(case: str) -> None:
    assert run_cases([loads(case)]) == [[]]


# In bfloat16, an input of ReLU near 0 has the other sign.
KINK = """
    {"seed": 633370243, "world_size": 1, "steps": [{"ranks": [[{}, {}]]}], "policy": "bf16",
     "model": {"blocks": 2, "activation": "relu", "loss": "mse"},
     "optimizer": {"name": "adamw", "lr": 0.1, "eps": 0.1}}"""


@ranks(1)
def test_oracle_distinguishes_kinks_from_defects() -> None:
    case = loads(KINK)
    record = run_case(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "MOST_KINKS", 0)
        assert judge.judge(case, [record])
    assert judge.judge(case, [record]) == []
    record.steps[0].state["model/head.weight"].values.mul_(1.5)
    assert judge.judge(case, [record])


@pytest.mark.parametrize("cases", BATCHES)
def test_engine_agrees_with_oracle(cases: list[Case]) -> None:
    failures = [
        (case, complaints)
        for case, complaints in zip(cases, run_cases(cases), strict=True)
        if complaints
    ]
    if failures:
        # One case of each kind, made smaller.
        distinct = {tuple(sorted(kinds(found))): (case, found) for case, found in failures}
        reports = [describe(*failure, seconds=30.0) for failure in list(distinct.values())[:3]]
        total = f"{len(failures)} of {len(cases)} cases failed, ADVERSARY_SEED={SEED}"
        pytest.fail("\n\n".join([*reports, total]), pytrace=False)


@pytest.mark.nightly
@pytest.mark.parametrize("part", [slice(4), nightly(slice(4, None))])
def test_reproducible_bits_do_not_depend_on_the_split(part: slice) -> None:
    cases = [replace(generate(SEED, index, 4), reproducible=True) for index in range(16)]
    cases = [reproducible_on(case, 4) for case in cases if not case.sharded][part]
    bits = {
        size: run_ranks(
            final_bits, size, [dumps(reproducible_on(case, size)) for case in cases], timeout=200
        )[0]
        for size in (1, 2, 4)
    }
    assert len(cases) >= 4
    for case, one, two, four in zip(cases, bits[1], bits[2], bits[4], strict=True):
        assert one == two == four, dumps(case)


# Parts of the oracle


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
        {"betas": (0.8, 0.95), "eps": 1e-2},
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
