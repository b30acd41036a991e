"""Random sequences of overflows, compared with a single-process model of the rules."""

from __future__ import annotations

import functools
import gc
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distmp import DistributedGradScaler, TrainingError
from tests.ranks import run_ranks

# The first parameter of an optimizer is replicated, the second one is local to each rank.
SHARED, OWN = 0, 1
SEQUENCES = int(os.environ.get("SCALER_SEQUENCES", "100"))
OPTIMIZERS = ("fused adamw", "fused sgd", "foreach adamw", "sgd")


@dataclass(frozen=True)
class Iteration:
    # (rank, optimizer, parameter) to a non-finite value in its gradient
    broken: dict[tuple[int, int, int], float]
    # (rank, optimizer) whose local parameter has no gradient
    missing: frozenset[tuple[int, int]]
    # optimizers without any gradient on any rank
    idle: frozenset[int]
    unscaled: tuple[int, ...]
    updated: tuple[int, ...]
    new_scale: float | None
    reload: bool


@dataclass(frozen=True)
class Sequence:
    world_size: int
    optimizers: tuple[str, ...]
    registered: frozenset[int]
    rules: dict[str, Any]
    iterations: tuple[Iteration, ...]


@functools.cache  # hypothesis is slow if strategies are built again
def iterations(world_size: int, count: int) -> st.SearchStrategy[Iteration]:
    ranks, optimizers = st.integers(0, world_size - 1), st.integers(0, count - 1)
    places = st.tuples(ranks, optimizers, st.sampled_from([SHARED, OWN]))
    values = st.sampled_from([math.inf, -math.inf, math.nan])
    return st.builds(
        Iteration,
        broken=st.one_of(st.just({}), st.dictionaries(places, values, max_size=3)),
        missing=st.frozensets(st.tuples(ranks, optimizers), max_size=2),
        idle=st.one_of(st.just(frozenset()), st.frozensets(optimizers)),
        unscaled=st.lists(optimizers, unique=True, max_size=count).map(tuple),
        updated=st.lists(optimizers, unique=True, min_size=1).map(tuple),
        new_scale=st.sampled_from([None, None, None, None, 64.0, 2.0**20]),
        reload=st.booleans(),
    )


@functools.cache
def sequences_of(world_size: int, count: int) -> st.SearchStrategy[Sequence]:
    rules = {
        "init_scale": st.sampled_from([2.0, 256.0]),
        "growth_interval": st.integers(1, 3),
        "hysteresis": st.integers(1, 2),
        "max_scale": st.just(1024.0),
        "static": st.booleans(),
        "max_consecutive_skips": st.sampled_from([None, 2, 3]),
    }
    return st.builds(
        Sequence,
        world_size=st.just(world_size),
        optimizers=st.tuples(*[st.sampled_from(OPTIMIZERS)] * count),
        registered=st.frozensets(st.integers(0, count - 1)),
        rules=st.fixed_dictionaries(rules),
        iterations=st.lists(iterations(world_size, count), min_size=1, max_size=4).map(tuple),
    )


@functools.cache
def sequences(world_size: int) -> st.SearchStrategy[Sequence]:
    return st.one_of([sequences_of(world_size, count) for count in (1, 2, 3)])


@functools.cache
def noise(length: int, seed: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def build(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind.endswith("adamw"):
        which = {"fused": True} if kind.startswith("fused") else {"foreach": True}
        return torch.optim.AdamW(parameters, lr=0.1, **which)  # type: ignore[arg-type]
    # torch's fused SGD fails if only some parameters have momentum.
    options = {"fused": True} if kind.startswith("fused") else {"momentum": 0.9}
    return torch.optim.SGD(parameters, lr=0.1, **options)  # type: ignore[arg-type]


@dataclass
class Rank:
    """The parameters and optimizers of one rank."""

    sequence: Sequence
    rank: int
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizers = [
            build(kind, [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])
            for kind in self.sequence.optimizers
        ]

    def set_gradients(self, index: int, scale: float) -> None:
        """Set gradients that are exact at any power of two, like a backward."""
        iteration = self.sequence.iterations[index]
        for number, optimizer in enumerate(self.optimizers):
            for which, parameter in enumerate(optimizer.param_groups[0]["params"]):
                missing = which == OWN and (self.rank, number) in iteration.missing
                if missing or number in iteration.idle:
                    parameter.grad = None
                    continue
                seed = 1000 * index + 10 * number + (0 if which == SHARED else 1 + self.rank)
                parameter.grad = noise(len(parameter), seed) * scale
                if value := iteration.broken.get((self.rank, number, which)):
                    parameter.grad[-1] = value

    def state(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    "parameter": bits(parameter),
                    **{
                        name: bits(value)
                        for name, value in optimizer.state[parameter].items()
                        if value is not None and any(bits(value))
                    },
                }
                for parameter in optimizer.param_groups[0]["params"]
            ]
            for optimizer in self.optimizers
        ]


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().reshape(-1).view(torch.int32).tolist()


# Results after each iteration, and the final parameters and moments.
Seen = tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]


def play(sequence: Sequence, rank: int, prepare: Callable[[Any], None]) -> Seen:
    """Run a sequence on one rank; return its results."""
    local = Rank(sequence, rank)

    def make() -> DistributedGradScaler:
        registered = [local.optimizers[number] for number in sequence.registered]
        scaler = DistributedGradScaler("cpu", optimizers=registered, **sequence.rules)
        prepare(scaler)
        return scaler

    scaler = make()
    seen: list[dict[str, Any]] = []
    for index, iteration in enumerate(sequence.iterations):
        if rank == 0:  # the others have no loss to scale
            scaler.scale(torch.ones(()))
        local.set_gradients(index, scaler.get_scale())
        for number in iteration.unscaled:
            scaler.unscale_(local.optimizers[number])
        for number in iteration.updated:
            scaler.step(local.optimizers[number])
        error = None
        try:
            scaler.update(iteration.new_scale)
        except TrainingError as raised:
            error = str(raised).partition(" (")[0]
        state = scaler.state_dict()
        seen.append(
            {
                "scale": state["scale"],
                "clean": state["_growth_tracker"],
                "overflows_in_a_row": state["overflows_in_a_row"],
                "skipped": scaler.step_skipped,
                "consecutive": scaler.consecutive_skips,
                "total": scaler.total_skips,
                "error": error,
            }
        )
        if error:
            break
        if iteration.reload:
            scaler = make()
            scaler.load_state_dict(state)
    return seen, local.state()


def expected(sequence: Sequence) -> list[Seen]:
    """Compute the expected results of every rank in plain Python."""
    ranks = [Rank(sequence, rank) for rank in range(sequence.world_size)]
    rules = sequence.rules
    scale, clean, in_a_row, consecutive, total = rules["init_scale"], 0, 0, 0, 0
    seen: list[dict[str, Any]] = []
    for index, iteration in enumerate(sequence.iterations):
        for rank in ranks:
            rank.set_gradients(index, 1.0)
        decided: dict[int, bool] = {}
        used: set[int] = set()
        for number in [*iteration.updated, None]:
            waiting = set(iteration.unscaled) - decided.keys()
            members = waiting | ({number} if number is not None else set())
            if members and number not in decided:
                if members & sequence.registered:
                    members |= sequence.registered
                members -= decided.keys()
                flag = any(overflows(iteration, member) for member in members)
                decided.update(dict.fromkeys(members, flag))
                used |= members - iteration.idle
            if number is not None and not decided[number]:
                for rank in ranks:
                    rank.optimizers[number].step()
        skipped, empty, error = any(decided.values()), not used, None
        if not empty:
            consecutive = consecutive + 1 if skipped else 0
        total += skipped
        if iteration.new_scale is not None:
            scale = min(max(iteration.new_scale, 1.0), rules["max_scale"])
        elif not rules["static"] and not empty:
            in_a_row = in_a_row + 1 if skipped else 0
            clean = 0 if skipped else clean + 1
            if in_a_row >= rules["hysteresis"]:
                if scale == 1.0:
                    error = "gradients overflow at loss scale 1"
                scale = max(scale / 2, 1.0)
            elif clean == rules["growth_interval"]:
                scale, clean = min(scale * 2, rules["max_scale"]), 0
        limit = rules["max_consecutive_skips"]
        if error is None and limit is not None and consecutive >= limit:
            error = f"{consecutive} steps in a row were skipped"
        seen.append(
            {
                "scale": scale,
                "clean": clean,
                "overflows_in_a_row": in_a_row,
                "skipped": skipped,
                "consecutive": consecutive,
                "total": total,
                "error": error,
            }
        )
        if error:
            break
        if iteration.reload and rules["static"]:
            scale = rules["init_scale"]  # the configuration takes precedence
    return [(seen, rank.state()) for rank in ranks]


def overflows(iteration: Iteration, number: int) -> bool:
    return number not in iteration.idle and any(
        optimizer == number and not (which == OWN and (rank, number) in iteration.missing)
        for rank, optimizer, which in iteration.broken
    )


class ThreadRanks:
    """Replaces a process group by threads, which take turns instead of competing for the GIL.

    Attributes:
        turn: Held by the thread that runs; released while it waits for the others.
    """

    group = None

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._given: list[Tensor] = []
        self._result = torch.zeros(0)
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(world_size, action=self._add, timeout=100)
        self.reductions = 0
        self.latest_decision = None

    def _add(self) -> None:
        self._result = torch.stack(self._given).sum(0)
        self._given.clear()
        self.reductions += 1

    def all_reduce(self, values: Tensor) -> Tensor:
        self._given.append(values)
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return self._result

    def exchange(self, place: None, value: Any) -> dict[int, Any]:
        # Ranks differ only in parameters; all their optimizers are in this process.
        return dict.fromkeys(range(self.world_size), value)


def play_in_threads(sequence: Sequence) -> list[Seen]:
    ranks = ThreadRanks(sequence.world_size)

    def prepare(scaler: Any) -> None:
        scaler._ranks = ranks

    def play_in_turn(rank: int) -> Seen:
        with ranks.turn:
            return play(sequence, rank, prepare)

    with ThreadPoolExecutor(sequence.world_size) as pool:
        futures = [pool.submit(play_in_turn, rank) for rank in range(sequence.world_size)]
        return [future.result() for future in futures]


def check(found: list[Seen], sequence: Sequence) -> None:
    wanted = expected(sequence)
    assert found == wanted
    shared = [[pair[SHARED] for pair in state] for _, state in found]
    assert all(state == shared[0] for state in shared)


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Hide the objects of other tests from the scaler's search for optimizers."""
    gc.collect()
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("few_objects")
@settings(max_examples=SEQUENCES, deadline=None)
@given(st.one_of(sequences(2), sequences(3)))
def test_random_sequences_follow_the_model(sequence: Sequence) -> None:
    check(play_in_threads(sequence), sequence)


def play_all(played: list[Sequence]) -> list[Seen]:
    seen = []
    for sequence in played:
        gc.collect()  # otherwise a scaler could find optimizers of the sequences before
        seen.append(play(sequence, dist.get_rank(), lambda scaler: None))
    return seen


@pytest.mark.slow
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.one_of([st.lists(sequences(n), min_size=15, max_size=15) for n in (2, 4)]))
def test_real_ranks_follow_the_model(played: list[Sequence]) -> None:
    by_rank = run_ranks(play_all, played[0].world_size, played)
    for found, sequence in zip(zip(*by_rank, strict=True), played, strict=True):
        check(list(found), sequence)
