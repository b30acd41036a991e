"""Plausible misuse of the public API: correct numbers, or one distmp error on every rank.

    python -m tests.adversary.misuse --cases 2000 --seed 7
    python -m tests.adversary.misuse --replay '{"mistakes": ["loss is a mean"], "world_size": 2}'
    python -m tests.adversary.misuse --list

A case is a training script (`tests.adversary.script`) with one or two mistakes in it
(`tests.adversary.mistakes`). Each rank may end with correct numbers, which are those of plain torch
in float64 and the same bits on every rank; with an error of distmp; or with an error of the user's
code. A rank that another one has left reports this.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import pkgutil
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.adversary import mistakes
from tests.adversary.mistakes import MISTAKES, Mistake
from tests.adversary.parts import BucketsScript, CallScript, ScalerScript
from tests.adversary.script import EXTRAS, OPTIMIZERS, POLICIES, STRATEGIES, Case, Script
from tests.adversary.trial import Ending, run_trial
from tests.ranks import run_ranks

for _module in pkgutil.iter_modules(mistakes.__path__):
    importlib.import_module(f"{mistakes.__name__}.{_module.name}")

SCRIPTS: dict[str, Callable[[Case, int], Any]] = {
    "engine": Script,
    "scaler": ScalerScript,
    "buckets": BucketsScript,
    "call": CallScript,
}
# Messages of torch's scaler, and of ours in the same style.
TORCH_MESSAGES = (
    "No inf checks were recorded",
    "has already been called",
    "is being called after step()",
    "outputs must be",
    "The source state dict is empty",
    "factor must be",
    "call scaler.scale(loss).backward() before step()",
    "call clip_grad_norm_() instead of unscale_()",
    "call scaler.update() after step()",
    "gradients changed after the ranks had decided",
)
# Share of the cases without a mistake, and with two mistakes.
CONTROLS, PAIRS = 0.05, 0.3
# Imported before ranks are forked, because imports would take most of the time of a case.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "distmp.parallel.fsdp",
    "distmp.optim.optimizer_tensors",
    "distmp.integrations.accelerate",
)


@dataclass
class StepDecision:
    """Whether a case ended in an allowed way, and how each rank ended."""

    case: Case
    problem: str
    endings: list[Ending]
    seconds: float

    def __str__(self) -> str:
        ends = "\n".join(f"  rank {rank}: {ending}" for rank, ending in enumerate(self.endings))
        replay = f"python -m tests.adversary.misuse --replay '{json.dumps(self.case.as_mapping())}'"
        return f"{self.problem or 'as it may be'}\n{ends}\n  {replay}"


def generate(count: int, seed: int) -> Iterator[Case]:
    """Yield cases in which every mistake is equally frequent."""
    chance = random.Random(seed)
    deck: list[str] = []
    for _ in range(count):
        if chance.random() < CONTROLS:
            yield _settle([], chance)
            continue
        if not deck:
            deck = [name for name, mistake in MISTAKES.items() if not mistake.known]
            chance.shuffle(deck)
        made = [MISTAKES[deck.pop()]]
        if chance.random() < PAIRS:
            fitting = [m for m in MISTAKES.values() if _fit(made[0], m)]
            made += [chance.choice(fitting)] if fitting else []
        yield _settle(made, chance)


def _fit(one: Mistake, other: Mistake) -> bool:
    return (
        one.kind == other.kind == "engine"
        and one.part != other.part
        and not other.known
        and bool(set(one.ranks) & set(other.ranks))
        and bool(_common(one.strategies, other.strategies, STRATEGIES))
        and bool(_common(one.policies, other.policies, POLICIES))
    )


def _common(one: Sequence[str], other: Sequence[str], every: Sequence[str]) -> list[str]:
    return [name for name in every if name in (one or every) and name in (other or every)]


def _settle(made: Sequence[Mistake], chance: random.Random) -> Case:
    """Choose the rest of a case at random."""
    ranks = [n for n in (1, 2) if all(n in m.ranks for m in made)]
    strategies: Sequence[str] = STRATEGIES
    policies: Sequence[str] = POLICIES
    for one in made:
        strategies = _common(strategies, one.strategies, STRATEGIES)
        policies = _common(policies, one.policies, POLICIES)
    world_size = chance.choice(ranks)
    if any(one.kind != "engine" for one in made):
        return Case(tuple(one.name for one in made), world_size, seed=chance.randrange(10**6))
    strategy = "auto" if world_size == 1 else chance.choice(strategies)
    case = Case(
        tuple(one.name for one in made),
        world_size,
        strategy,
        # FP32 more often, because its rounding does not hide small errors.
        "fp32" if "fp32" in policies and chance.random() < 0.4 else chance.choice(policies),
        chance.choice(list(OPTIMIZERS)),
        chance.choice(["layernorm", "layernorm", "batchnorm"]),
        chance.choice(["", *EXTRAS]),
        chance.randrange(10**6),
    )
    return replace(case, extra=case.extra if _extra_fits(case) else "")


def _extra_fits(case: Case) -> bool:
    whole = ("shard_optimizer", "reproducible", "drop_microbatch")
    if case.extra in whole and case.sharded:
        return False
    return not (case.extra == "shard_optimizer" and case.policy == "bf16-pure")


def perform(case: Case, rank: int) -> Any:
    kinds = {MISTAKES[name].kind for name in case.mistakes} or {"engine"}
    script = SCRIPTS[kinds.pop()](case, rank)
    for name in case.mistakes:
        MISTAKES[name].change(script)
    return script.run()


def try_out(case: Case) -> StepDecision:
    started = time.monotonic()
    endings = run_trial(
        functools.partial(perform, case), case.world_size, group=case.world_size > 1
    )
    return StepDecision(case, judge(case, endings), endings, time.monotonic() - started)


def judge(case: Case, endings: Sequence[Ending]) -> str:
    """Return the problems of the outcome of a case; none if the outcome is allowed."""
    made = [MISTAKES[name] for name in case.mistakes]
    if all(one.kind == "scaler" for one in made) and made:
        endings = [_as_torch(ending) for ending in endings]
    for kind, problem in (
        ("hung", "a rank hangs"),
        ("died", "a rank has died"),
        ("bare", "a rank has ended with an error that is not ours"),
    ):
        if any(ending.kind == kind for ending in endings):
            return problem
    well = [ending.result for ending in endings if ending.kind == "well"]
    if not well:
        if all(one.ends in ("right", "warning") for one in made):
            return "an error where there is nothing wrong"
        if all("another rank has ended" in ending.text for ending in endings):
            return "no rank tells the cause"
        return ""
    if len(well) < len(endings):
        return "some ranks have ended well, others with an error"
    if any(one.ends == "error" for one in made):
        return "no error"
    if any(one.ends == "warning" for one in made) and not well[0].warnings:
        return "no warning"
    if len({found.digest for found in well}) > 1:
        return "ranks have different weights, buffers or numbers"
    problems = [problem for found in well for problem in found.problems]
    return "" if any(one.ends == "warning" for one in made) else "; ".join(problems)


def _as_torch(ending: Ending) -> Ending:
    """Count the errors of torch's scaler, which ours raises too, as messages."""
    last = ending.text.strip().splitlines()[-1] if ending.text else ""
    if ending.kind == "bare" and any(phrase in last for phrase in TORCH_MESSAGES):
        return replace(ending, kind="message")
    return ending


def try_all(cases: Sequence[Case]) -> list[StepDecision]:
    """Run cases in a process that has only imported modules."""
    for name in PRELOADED:
        importlib.import_module(name)
    return [try_out(case) for case in cases]


def run(cases: Sequence[Case], timeout: float) -> list[StepDecision]:
    """Run cases one after the other."""
    return run_ranks(try_all, 1, list(cases), timeout=timeout, initialize=False)[0]


def simplest(decision: StepDecision) -> StepDecision:
    """Return a smaller case with the same problem."""
    kind = decision.problem.partition(":")[0]
    plain = {"extra": "", "policy": "fp32", "model": "layernorm", "optimizer": "sgd"}
    for change in (
        *({"mistakes": (name,)} for name in decision.case.mistakes),
        *({name: value} for name, value in plain.items()),
    ):
        simpler = replace(decision.case, **change)
        if simpler != decision.case and all(
            not MISTAKES[name].policies or simpler.policy in MISTAKES[name].policies
            for name in simpler.mistakes
        ):
            (tried,) = run([simpler], timeout=100)
            if tried.problem.partition(":")[0] == kind:
                decision = tried
    return decision


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--replay", action="append", help="a case as JSON; may be given repeatedly")
    parser.add_argument("--mistake", action="append", help="only mistakes whose name contains this")
    parser.add_argument("--failures", type=int, default=1000, help="stop after so many")
    parser.add_argument("--list", action="store_true", help="list mistakes")
    parser.add_argument("--verbose", action="store_true", help="also show what ends as it may")
    wanted = parser.parse_args()
    if wanted.list:
        for one in MISTAKES.values():
            print(f"{one.ends:8} {one.name}{f' (known: {one.known})' if one.known else ''}")
        return 0
    if wanted.mistake:
        for name in [n for n in MISTAKES if not any(part in n for part in wanted.mistake)]:
            del MISTAKES[name]
    if wanted.replay:
        cases = [Case.from_mapping(json.loads(text)) for text in wanted.replay]
    else:
        print(f"seed {wanted.seed}", flush=True)
        cases = list(generate(wanted.cases, wanted.seed))
    failed = 0
    for start in range(0, len(cases), 50):
        if failed >= wanted.failures:
            break
        for decision in run(cases[start : start + 50], timeout=50 * 60):
            failed += bool(decision.problem)
            if decision.problem and not wanted.replay and failed <= wanted.failures:
                decision = simplest(decision)
            if decision.problem or wanted.verbose or wanted.replay:
                print(f"{decision}\n", flush=True)
        print(f"{min(start + 50, len(cases))} cases, {failed} failed", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
