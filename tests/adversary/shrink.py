"""Makes a failing case smaller, while it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from tests.adversary.cases import (
    PARTS,
    Case,
    Microbatch,
    ModelSpec,
    OptimizerSpec,
    Step,
    dumps,
    legal,
)

Run = Callable[[Sequence[Case]], list[list[str]]]

# The settings of a case for which the shrinker tries the default.
SETTINGS = (
    "model",
    "optimizer",
    "policy",
    "schedule",
    "max_norm",
    "scale",
    "nominal_weight",
    "shard_optimizer",
    "reproducible",
    "on_nonfinite",
    "activation_checkpointing",
    "accumulate",
    "reshard_after_forward",
    "shard_size",
    "attribution",
    "weight_kind",
)


def kinds(complaints: Sequence[str]) -> set[str]:
    """Return the kinds of complaints, errors with the line that raised them."""
    return {_kind(complaint) for complaint in complaints}


def _kind(complaint: str) -> str:
    kind = complaint.partition(":")[0]
    last = complaint.strip().rpartition("\n")[2]
    return f"{kind}: {last[:40]}" if kind == "error" else kind


def shrink(
    case: Case, complaints: Sequence[str], run: Run, seconds: float = 60.0
) -> tuple[Case, list[str]]:
    """Return the smallest case found in the given time that has a complaint of the same kind.

    Args:
        case: A failing case.
        complaints: Its complaints.
        run: Runs cases of one world size.
        seconds: No further round starts after this number of seconds.
    """
    wanted = kinds(complaints)
    found = list(complaints)
    deadline = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for batch in _batches(case):
            decisions = run(batch)
            failing = [
                (smaller, decision)
                for smaller, decision in zip(batch, decisions, strict=True)
                if kinds(decision) & wanted
            ]
            if failing:
                case, found = min(failing, key=lambda item: len(dumps(item[0])))
                progress = True
                break
    return case, found


def _batches(case: Case) -> Iterator[list[Case]]:
    """Yield smaller cases, grouped by world size, the smallest ones first."""
    seen = {dumps(case)}
    for proposals in (_fewer_ranks(case), _fewer_steps(case), [*_simpler(case), *_smaller(case)]):
        by_size: dict[int, list[Case]] = {}
        for proposal in map(legal, proposals):
            text = dumps(proposal)
            if text not in seen and len(text) <= len(dumps(case)):
                seen.add(text)
                by_size.setdefault(proposal.world_size, []).append(proposal)
        yield from by_size.values()


def _fewer_ranks(case: Case) -> Iterator[Case]:
    for size in (1, 2):
        if size < case.world_size:
            strategy = "single" if size == 1 else case.strategy
            for first in range(0, case.world_size, size):
                steps = tuple(
                    replace(step, ranks=step.ranks[first : first + size], stop=None)
                    for step in case.steps
                )
                yield replace(
                    case, world_size=size, strategy=strategy, steps=steps, shard_size=None
                )


def _fewer_steps(case: Case) -> Iterator[Case]:
    steps = case.steps
    for length in range(1, len(steps)):
        yield replace(case, steps=steps[:length])
    for index in range(len(steps)):
        if len(steps) > 1:
            yield replace(case, steps=steps[:index] + steps[index + 1 :])


def _simpler(case: Case) -> Iterator[Case]:
    default = Case(seed=case.seed, world_size=case.world_size, steps=case.steps)
    strategy = "single" if case.world_size == 1 else "ddp"
    yield replace(case, strategy=strategy)
    for name in SETTINGS:
        yield replace(case, **{name: getattr(default, name)})
    for name in (item.name for item in fields(ModelSpec)):
        model = replace(case.model, **{name: getattr(ModelSpec(), name)})
        yield replace(case, model=model)
    for name in (item.name for item in fields(OptimizerSpec)):
        optimizer = replace(case.optimizer, **{name: getattr(OptimizerSpec(), name)})
        yield replace(case, optimizer=optimizer)


def _smaller(case: Case) -> Iterator[Case]:
    plain = Step(ranks=())
    for index, step in enumerate(case.steps):
        for change in _simpler_steps(step, plain):
            yield replace(case, steps=(*case.steps[:index], change, *case.steps[index + 1 :]))
    yield _each(case, lambda step: _map(step, lambda batch: replace(batch, uses=PARTS)))
    yield _each(case, lambda step: _map(step, lambda batch: replace(batch, fault=None)))
    yield _each(case, lambda step: _map(step, lambda batch: replace(batch, size=4, weight=1.0)))
    yield _each(case, lambda step: replace(step, ranks=tuple(one[:1] for one in step.ranks)))


def _simpler_steps(step: Step, plain: Step) -> Iterator[Step]:
    for name in ("freeze", "thaw", "rates", "stop", "reload", "explain", "evaluate"):
        if getattr(step, name) != getattr(plain, name):
            yield replace(step, **{name: getattr(plain, name)})
    yield _map(step, lambda batch: Microbatch())
    for part in PARTS:
        yield _map(step, lambda batch, part=part: replace(batch, uses=(*batch.uses, part)))
    yield _map(step, lambda batch: replace(batch, fault=None))
    yield _map(step, lambda batch: replace(batch, size=4, weight=1.0))
    for rank, batches in enumerate(step.ranks):
        for index in range(len(batches)):
            if len(batches) > 1:
                fewer = batches[:index] + batches[index + 1 :]
                yield replace(step, ranks=(*step.ranks[:rank], fewer, *step.ranks[rank + 1 :]))


def _each(case: Case, change: Callable[[Step], Step]) -> Case:
    return replace(case, steps=tuple(change(step) for step in case.steps))


def _map(step: Step, change: Callable[[Any], Microbatch]) -> Step:
    return replace(step, ranks=tuple(tuple(map(change, batches)) for batches in step.ranks))
