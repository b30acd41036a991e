"""Budgets of a step of `fsdp` on the fake CUDA device, beside FSDP2 by hand.

Sizes are those of two blocks of an 8 B model: fake tensors take no time.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from benchmarks import predicted_step
from benchmarks.predicted_step import METHODS, Recorded, predicted
from benchmarks.recorded_step import StepRecorder
from benchmarks.report import RESULTS
from benchmarks.step_tail import Work as Tail
from benchmarks.timeline import Rates, Timeline, simulate
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.distributed import collectives
from distmp.models.settings import ModelConfig
from distmp.parallel.fsdp import FullySharded
from distmp.parallel.strategy import Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.not_replayed,
    pytest.mark.skipif("FAKE_CUDA_DEVICES" not in os.environ, reason="needs fake CUDA devices"),
]

MODEL = ModelConfig(size="8b", options={"layers": 2, "vocabulary_size": 128_256})
BY_HAND, APART, DISTMP = METHODS
RATES = Rates()


def record(method: str, microbatches: int = 1) -> Recorded:
    return predicted_step.record(METHODS[method], 8, MODEL, microbatches=microbatches)


recorded = functools.cache(record)


@functools.cache
def timeline(method: str) -> Timeline:
    return predicted(recorded(method), RATES)


def launches(of: Recorded) -> Counter[str]:
    return Counter(one.name for one in of.step() if one.kind != "wait")


def test_launches_of_a_step() -> None:
    # The scalars of the decision, the outcome and the numbers; see `tests/engine/launches.json`.
    added = launches(recorded(DISTMP)) - launches(recorded(APART))
    assert added.total() <= 21


def test_launches_of_a_microbatch() -> None:
    one, two = recorded(DISTMP).launches(), recorded(DISTMP, 2).launches()
    assert two - one <= 237


def test_memory_traffic_is_at_most_that_of_fsdp2_by_hand() -> None:
    ours, by_hand = (recorded(method).total("kernel") for method in (DISTMP, APART))
    assert ours < by_hand


def test_bytes_that_are_sent() -> None:
    # All parameters once in bfloat16, blocks again in backward, all gradients once in FP32.
    with torch.device("meta"):
        model: Any = predicted_step.Work(MODEL, torch.device("meta")).build()
    count = sum(parameter.numel() for parameter in model.parameters())
    in_blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    expected = (2 * count + 2 * in_blocks + 4 * count) * 7 / 8
    assert recorded(DISTMP).total("collective") == pytest.approx(expected, rel=1e-4)


def test_step_is_faster_than_fsdp2_by_hand_and_exposes_less_communication() -> None:
    ours, apart, by_hand = (timeline(method) for method in (DISTMP, APART, BY_HAND))
    assert ours.seconds < apart.seconds < by_hand.seconds
    assert ours.exposed < 1.1 * apart.exposed < 0.6 * by_hand.exposed
    assert ours.idle < 1e-3


def test_ddp_hides_its_reductions() -> None:
    def ddp(work: Any) -> Any:
        return predicted_step.loops.Distmp(work, "bf16", "ddp", first_step_checks=False)

    both = predicted_step.record(ddp, 8, MODEL)
    sent = [one.seconds(RATES) for one in both.step() if one.kind == "collective"]
    assert predicted(both, RATES).exposed < 0.5 * sum(sent)


def test_gathers_and_reductions_run_on_streams_of_high_priority() -> None:
    large = [
        one for one in recorded(DISTMP).step() if one.kind == "collective" and one.nbytes > 1e6
    ]
    assert {one.name for one in large} == {"all-gather", "reduce-scatter"}
    assert {one.priority for one in large} == {-1}


def test_host_waits_only_for_the_step_before() -> None:
    both = recorded(DISTMP)
    waits = [one for one in both.step() if one.kind == "wait"]
    assert all(max(one.after) < both.second for one in waits)


def test_a_gather_that_waits_for_all_kernels_is_seen() -> None:
    gather = collectives.all_gather_on_stream

    def late(*arguments: Any) -> None:
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        gather(*arguments)

    with mock.patch.object(collectives, "all_gather_on_stream", late):
        found = predicted(record(DISTMP), RATES)
    assert found.exposed > 1.3 * timeline(DISTMP).exposed


def test_copies_of_all_gradients_are_seen() -> None:
    with mock.patch.object(FullySharded, "backward_context", Strategy.backward_context):
        found = record(DISTMP)
    # Read in bfloat16, written in FP32, and read again in FP32 instead of bfloat16: 8 bytes.
    sent = sum(one.nbytes for one in found.step() if one.name == "reduce-scatter")
    parameters = sent / (4 * 7 / 8)
    added = found.total("kernel") - recorded(DISTMP).total("kernel")
    assert added == pytest.approx(8 * parameters, rel=0.01)


@pytest.mark.parametrize(
    ("function", "nbytes"),
    [
        (lambda x: x + x, 3 * 4 * 2**24),
        (lambda x: x.add_(x), 3 * 4 * 2**24),
        (lambda x: x.copy_(x[:1]), 4 * (2**24 + 2**12)),
        (lambda x: x.to(torch.bfloat16), 6 * 2**24),
        (lambda x: x.view(-1)[1:], 0),
        (lambda x: torch._foreach_mul_([x, x], 2.0), 4 * 4 * 2**24),
        (lambda x: torch.mm(x, x, out=x), 3 * 4 * 2**24),
        (lambda x: x.gather(0, x[:1].long()), 8 * 2**12 + 4 * 2**12 + 8 * 2**12 + 8 * 2**12),
    ],
)
def test_bytes_that_a_kernel_moves(function: Callable[[Tensor], object], nbytes: int) -> None:
    with simulate_ranks(1, group=False):
        x = torch.empty(2**12, 2**12, device="cuda")
        with StepRecorder() as recorder:
            function(x)
    assert sum(one.nbytes for one in recorder.operations) == nbytes


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("bare fused AdamW", Tail.bare),
        ("torch: unscale, clip, step", Tail.stock),
        ("Engine", Tail.engine),
        ("norm alone", Tail.norm),
        ("copy", Tail.copy),
    ],
)
def test_prediction_agrees_with_an_h200(
    name: str, tail: Callable[[Tail], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch does not use foreach kernels for fake tensors.
    monkeypatch.setattr(clip_grad, "_has_foreach_support", lambda *_: True)
    measured = json.loads((RESULTS / "step-tail-cuda.json").read_text())
    with simulate_ranks(1, group=False):
        work = Tail(measured["elements"], 2**20, torch.device("cuda", 0))
        tail(work)
        with StepRecorder() as recorder:
            tail(work)
    rates = Rates(memory=measured["machine"]["peak"]["bandwidth"], launch=20e-6)
    found = 1000 * simulate(recorder.operations, rates).seconds
    assert found == pytest.approx(median(measured["milliseconds"][name]), rel=0.15)
