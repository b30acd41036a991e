"""What a rank does in a steady step does not grow with ranks, nor with parameters."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distmp
from benchmarks.memory import anonymous_bytes
from distmp.commands.explain import fake_ranks
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.engine.engine import Engine
from distmp.utils import tensor_trees
from tests.engine import launches
from tests.engine.launches import LOW_PRECISION
from tests.ranks import in_turn, ranks
from tests.recording import Operators
from tests.reference import TWO_RANKS, make_engine, microbatches

WIDTH = 1024  # a multiple of the numbers of ranks, so that every rank has a shard
MICROBATCHES = 4
BUCKETS = 2
STRATEGIES: dict[str, dict[str, Any]] = {
    **launches.STRATEGIES,
    "ddp, 16-bit communication": {"strategy": "ddp", "policy": LOW_PRECISION},
    "fsdp, every microbatch": {
        **launches.STRATEGIES["fsdp, every microbatch"],
        "policy": LOW_PRECISION,
    },
}


def build_model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers + 1)))


def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return module(batch).float().square().sum(), float(len(batch))


def build(layers: int = 2, **options: Any) -> Engine:
    return Engine(
        build_model(layers),
        loss,
        lambda named: torch.optim.AdamW(named, fused=True),
        device="cpu",
        first_step_checks=False,
        **{"policy": "fp32", **options},
    )


class Calls:
    """Counts calls of functions of distmp, and operations of stores, in the thread that enters.

    Attributes:
        counts: Number of calls by file and line of the function; of a store by name.
    """

    package = os.path.dirname(distmp.__file__) + os.sep
    simulation = (fake_ranks.__file__, tensor_trees.__file__)  # the simulation looks for tensors

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if event == "call":
            if file.startswith(self.package) and file not in self.simulation:
                name = file.removeprefix(self.package)
                self.counts[f"{name}:{code.co_firstlineno} {code.co_name}"] += 1
            elif "_object" in code.co_name and file == dist.distributed_c10d.__file__:
                self.counts[f"object collective {code.co_name}"] += 1
        elif event == "c_call" and "_distributed_c10d.Store" in (argument.__doc__ or ""):
            self.counts[f"store {argument.__name__}"] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._record)
        try:
            yield
        finally:
            sys.setprofile(before)


def steady_step(
    world_size: int, count: int = MICROBATCHES, **options: Any
) -> tuple[Counter[str], Counter[str]]:
    """Simulate ranks; return the operators and the calls of distmp of a step of `count` batches."""
    with simulate_ranks(world_size):
        engine = build(**options)
        batches = [torch.ones(2, WIDTH) for _ in range(count)]
        for _ in range(2):
            engine.step(batches)
        calls = Calls()
        with Operators() as operators, calls.counted():
            engine.step(batches)
    # A fake tensor dispatches every access to its device.
    del operators.counts["prim::device"]
    return operators.counts, calls.counts


@pytest.fixture(autouse=True)
def restore_algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_of_512_ranks_makes_the_calls_of_8_ranks(strategy: str) -> None:
    few_operators, few_calls = steady_step(8, **STRATEGIES[strategy])
    many_operators, many_calls = steady_step(512, **STRATEGIES[strategy])
    growth = many_operators - few_operators
    if strategy == "reproducible":
        # The levels of a binary tree, in the sum of each bucket and in the decision.
        assert growth.total() <= 5 * 6 * (BUCKETS + 1)
    else:
        assert growth == Counter()
        assert many_calls - few_calls == Counter()
    assert few_operators["aten::mm"] + few_operators["aten::addmm"] == 8 * MICROBATCHES


def of_a_microbatch(layers: int) -> tuple[Counter[str], Counter[str]]:
    """Return the operators and the calls of distmp that a further microbatch of a step causes."""
    (few, few_calls), (many, many_calls) = (
        steady_step(8, count, layers=layers, strategy="ddp") for count in (4, 5)
    )
    return many - few, many_calls - few_calls


@pytest.mark.nightly
def test_a_parameter_costs_one_call_in_a_microbatch() -> None:
    few_operators, few_calls = of_a_microbatch(layers=2)
    many_operators, many_calls = of_a_microbatch(layers=10)
    growth = many_calls - few_calls
    assert [name.partition(" ")[2] for name in growth] == ["take_gradient"]
    assert growth.total() == 2 * 8  # weight and bias
    assert few_calls.total() <= 59
    for found, layers in ((few_operators, 2), (many_operators, 10)):
        # Scale and copy the loss; a tensor of the weight.
        assert (found - in_plain_torch(layers)).total() <= 8


def in_plain_torch(layers: int) -> Counter[str]:
    """Return the operators of a microbatch that adds to the gradients of an earlier one."""
    model, batch = build_model(layers), torch.ones(2, WIDTH)
    loss(model, batch)[0].backward()
    with Operators() as operators:
        loss(model, batch)[0].backward()
    return operators.counts


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_a_steady_step_exchanges_no_object(strategy: str) -> None:
    engine = make_engine(strategy=strategy)
    batches = microbatches(0, TWO_RANKS[0], dist.get_rank())
    first, steady = Calls(), Calls()
    with first.counted():
        engine.evaluate(batches)
    for _ in range(2):
        engine.step(batches)
    with steady.counted():
        engine.step(batches)
    assert exchanged(first)  # ranks compare which method they call
    assert exchanged(steady) == []


def exchanged(calls: Calls) -> list[str]:
    return [name for name in calls.counts if name.startswith(("object", "store"))]


@ranks(1)
def test_freed_tensors_are_allocated_again_without_page_faults() -> None:
    make_engine(strategy="fsdp")
    torch.ones(2**21)  # freed at once, which raises glibc's threshold for mapped memory to 8 MiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.ones(2**18)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults * resource.getpagesize() < 10 * 2**20


@pytest.mark.parametrize("load", [False, True])
def test_memory_freed_by_start_and_load_is_returned(load: bool) -> None:
    engine = make_engine()
    before = anonymous_bytes(os.getpid())
    freed = [b"x" * 2**15 for _ in range(2**11)]  # in the heap, which `kept` does not let shrink
    kept = [b"x" * 2**15 for _ in range(2)]
    assert anonymous_bytes(os.getpid()) - before > 2**25
    del freed
    if load:
        engine.load_state_dict(engine.state_dict())
    else:
        make_engine()
    assert anonymous_bytes(os.getpid()) - before < 2**23, len(kept)
