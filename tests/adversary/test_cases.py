"""Cases are plain values: drawn from a seed, written as JSON, made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.adversary.__main__ import draw
from tests.adversary.cases import Case, Fault, Microbatch, Step, dumps, generate, legal, loads
from tests.adversary.shrink import shrink

SIZES = [1, 2, 4]


@pytest.mark.parametrize("world_size", SIZES)
def test_a_case_is_the_same_after_json(world_size: int) -> None:
    for index in range(100):
        case = generate(0, index, world_size)
        assert loads(dumps(case)) == case


@pytest.mark.parametrize("world_size", SIZES)
def test_the_seed_decides(world_size: int) -> None:
    assert generate(3, 5, world_size) == generate(3, 5, world_size)
    assert generate(3, 5, world_size) != generate(4, 5, world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_drawn_cases_are_legal(world_size: int) -> None:
    for index in range(100):
        case = generate(1, index, world_size)
        assert legal(case) == case
        assert all(len(step.ranks) == world_size for step in case.steps)


def test_every_dimension_is_tried() -> None:
    cases = [case for drawn in draw(0, 300).values() for case in drawn]
    assert len(cases) == 300
    for name, least in [
        ("strategy", 4),
        ("policy", 10),
        ("shard_optimizer", 2),
        ("reproducible", 2),
        ("on_nonfinite", 2),
        ("activation_checkpointing", 2),
        ("accumulate", 4),
        ("max_norm", 5),
    ]:
        assert len({getattr(case, name) for case in cases}) == least, name
    places = {fault.place for case in cases for step in case.steps for *_, fault in step.faults}
    assert places == {"input", "stem", "output", "backward", "weight", "loss"}


def test_a_failing_case_shrinks_to_what_fails() -> None:
    def run(cases: Sequence[Case]) -> list[list[str]]:
        return [["fault: one"] if any(step.faults for step in c.steps) else [] for c in cases]

    cases = [generate(2, index, 4) for index in range(20)]
    case = next(case for case in cases if any(step.faults for step in case.steps))
    smallest, found = shrink(case, ["fault: one"], run)
    assert found == ["fault: one"]
    assert smallest.world_size == 1
    assert len(smallest.steps) == 1
    assert len(smallest.microbatches) == 1
    assert smallest.strategy == "single"
    assert smallest.policy == "fp32"


def test_shrinking_keeps_the_kind_of_failure() -> None:
    def run(cases: Sequence[Case]) -> list[list[str]]:
        return [["other: two"] for _ in cases]

    case = generate(2, 0, 2)
    assert shrink(case, ["fault: one"], run) == (case, ["fault: one"])


def test_a_batch_norm_has_samples_enough() -> None:
    step = Step(ranks=((Microbatch(size=0, fault=Fault("input", "nan")),),))
    case = Case(seed=0, world_size=1, steps=(step,))
    case = replace(case, model=replace(case.model, norm=True))
    assert legal(case).microbatches[0].size >= 4
