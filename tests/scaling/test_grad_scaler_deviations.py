"""Random sequences of calls on two ranks: correct numbers, or the same error on both ranks.

One rank may deviate in one call. Either that changes no decision, or both ranks raise the same
message; weights are the same bits afterwards, unless the message says that they are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distmp import DistributedGradScaler, TrainingError
from distmp.distributed import rank_monitor
from tests.ranks import run_ranks

OPTIMIZERS = 2
RATE = 0.125
# The gradients of an iteration without overflow, by optimizer.
GRADIENTS = ([3.0, 4.0], [-1.0, 0.5])


class Call(NamedTuple):
    """One line of a training script: "backward", or a method of the scaler."""

    method: str
    optimizers: tuple[int, ...] = ()
    number: float | None = None  # max_norm, new_scale


@dataclass(frozen=True)
class Sequence:
    calls: tuple[Call, ...]
    # The calls of rank 1, if they differ.
    deviating: tuple[Call, ...] | None
    # (backward, rank, optimizer) whose gradient is infinite
    overflows: frozenset[tuple[int, int, int]]
    registered: tuple[int, ...]
    fused: bool
    init_scale: float


@st.composite
def iterations(draw: st.DrawFn) -> list[Call]:
    """Draw the calls of an iteration that torch's scaler would accept too."""
    numbers = st.integers(0, OPTIMIZERS - 1)
    clipped = tuple(draw(st.lists(numbers, unique=True)))
    unscaled = draw(st.lists(numbers.filter(lambda number: number not in clipped), unique=True))
    updated = draw(st.lists(numbers, unique=True, min_size=1))
    norms = st.sampled_from([1.0, 3.0, 100.0])
    calls = [Call("unscale_", (number,)) for number in unscaled]
    if clipped:
        calls.insert(
            draw(st.integers(0, len(calls))), Call("clip_grad_norm_", clipped, draw(norms))
        )
    calls += [Call("step", (number,)) for number in updated]
    new_scale = draw(st.sampled_from([None, None, None, 64.0]))
    return [Call("backward"), *calls, Call("update", (), new_scale)]


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    calls = tuple(
        call for part in draw(st.lists(iterations(), min_size=1, max_size=3)) for call in part
    )
    places = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, OPTIMIZERS - 1))
    return Sequence(
        calls,
        draw(st.one_of(deviations(calls), deviations(calls), st.none())),
        draw(st.frozensets(places, max_size=2)),
        tuple(draw(st.sampled_from([(), (), (0, 1), (1, 0)]))),
        draw(st.booleans()),
        draw(st.sampled_from([256.0, 100.0])),
    )


@st.composite
def deviations(draw: st.DrawFn, calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """Remove, repeat, swap or change one call of the scaler."""
    changed = list(calls)
    places = [place for place, call in enumerate(calls) if call.method != "backward"]
    place = draw(st.sampled_from(places))
    call = calls[place]
    way = draw(st.sampled_from(["leave out", "repeat", "exchange", "change"]))
    if way == "leave out":
        del changed[place]
    elif way == "repeat":
        changed.insert(place, call)
    elif way == "exchange":
        other = draw(st.sampled_from(places))
        changed[place], changed[other] = changed[other], changed[place]
    elif call.method == "update":
        changed[place] = call._replace(number=None if call.number else 32.0)
    elif call.number is not None and draw(st.booleans()):
        changed[place] = call._replace(number=2 * call.number)
    else:
        optimizers = tuple(OPTIMIZERS - 1 - number for number in call.optimizers)
        changed[place] = call._replace(optimizers=optimizers)
    return tuple(changed)


# On the ranks


@dataclass
class Rank:
    sequence: Sequence
    backwards: int = 0
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [nn.Parameter(torch.tensor([1.0, 2.0]) + n) for n in range(OPTIMIZERS)]
        self.optimizers = [
            torch.optim.SGD([parameter], lr=RATE, fused=self.sequence.fused)
            for parameter in self.parameters
        ]
        self.scaler = DistributedGradScaler(
            "cpu",
            self.sequence.init_scale,
            growth_interval=2,
            optimizers=[self.optimizers[number] for number in self.sequence.registered],
        )
        self.scaler.scale(torch.ones(()))

    def call(self, call: Call) -> None:
        chosen = [self.optimizers[number] for number in call.optimizers]
        if call.method == "backward":
            self.set_gradients()
        elif call.method == "clip_grad_norm_":
            assert call.number is not None
            self.scaler.clip_grad_norm_(chosen, call.number)
        elif call.method == "update":
            self.scaler.update(call.number)
        else:
            getattr(self.scaler, call.method)(*chosen)

    def set_gradients(self) -> None:
        scale = self.scaler.get_scale()
        for number, parameter in enumerate(self.parameters):
            parameter.grad = torch.tensor(GRADIENTS[number]) * scale
            if (self.backwards, dist.get_rank(), number) in self.sequence.overflows:
                parameter.grad[1] = math.inf
        self.backwards += 1


class Seen(NamedTuple):
    """The final result of a rank."""

    error: str | None  # because ranks differ
    misuse: str | None  # an error that torch's scaler raises too
    weights: list[list[float]]
    scale: float


def play(sequence: Sequence, number: int) -> Seen:
    """Run a sequence on this rank."""
    deviating = sequence.deviating if dist.get_rank() == 1 else None
    rank, error, misuse = Rank(sequence), None, None
    try:
        try:
            for call in deviating or sequence.calls:
                rank.call(call)
        except TrainingError:
            raise
        except (AssertionError, RuntimeError) as raised:
            misuse = str(raised)
        # A rank with fewer decisions joins a decision of the other rank here.
        rank.scaler.clip_grad_norm_([], 1000.0 + number)
    except TrainingError as raised:
        error = str(raised)
    weights = [parameter.tolist() for parameter in rank.parameters]
    return Seen(error, misuse, weights, rank.scaler.get_scale())


def play_all(played: list[Sequence]) -> list[Seen]:
    rank_monitor.INTERVAL_SECONDS = 0.02
    return [play(sequence, number) for number, sequence in enumerate(played)]


# The reference


def expected(sequence: Sequence) -> tuple[list[list[float]], float]:
    """Return weights and scale after the calls of a sequence without a deviation, in FP64."""
    weights = [torch.tensor([1.0, 2.0], dtype=torch.float64) + n for n in range(OPTIMIZERS)]
    gradients = [torch.tensor(gradient, dtype=torch.float64) for gradient in GRADIENTS]
    scale, clean, iteration = sequence.init_scale, 0, -1
    for call in sequence.calls:
        if call.method == "backward":
            iteration += 1
            unscaled: set[int] = set()
            skips: dict[int, bool] = {}
            factors: dict[int, float] = {}
        elif call.method == "unscale_":
            unscaled |= set(call.optimizers)
        elif call.method == "update":
            decide(sequence, iteration, unscaled - skips.keys(), skips)
            skipped = any(skips.values())
            if call.number is not None:
                scale = call.number
                continue
            clean = 0 if skipped else clean + 1
            if skipped:
                scale /= 2
            elif clean == 2:
                scale, clean = scale * 2, 0
        else:
            if not skips.keys() >= set(call.optimizers) or call.method != "step":
                members = set(call.optimizers) | (unscaled - skips.keys())
                decide(sequence, iteration, members, skips)
            if call.method == "step":
                (number,) = call.optimizers
                if not skips[number]:
                    weights[number] -= RATE * gradients[number] * factors.get(number, 1.0)
            else:
                assert call.number is not None
                squares = sum(float(gradients[n].square().sum()) for n in call.optimizers)
                factor = min(1.0, call.number / (math.sqrt(squares) + 1e-6))
                factors.update(dict.fromkeys(call.optimizers, factor))
    return [weight.tolist() for weight in weights], scale


def decide(sequence: Sequence, iteration: int, members: set[int], skips: dict[int, bool]) -> None:
    if members & set(sequence.registered):
        members = members | set(sequence.registered)
    members = members - skips.keys()
    flag = any((iteration, r, n) in sequence.overflows for r in range(2) for n in members)
    skips.update(dict.fromkeys(members, flag))


@pytest.mark.slow
@settings(
    max_examples=1,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(sequences(), min_size=40, max_size=40))
def test_result_is_correct_or_one_error(played: list[Sequence]) -> None:
    by_rank = run_ranks(play_all, 2, played)
    for sequence, seen in zip(played, zip(*by_rank, strict=True), strict=True):
        check(sequence, *seen)


def check(sequence: Sequence, first: Seen, second: Seen) -> None:
    assert first.error == second.error, sequence
    assert first.error is None or first.error.startswith("ranks "), sequence
    if first.error is None or "weights now differ" not in first.error:
        assert first.weights == second.weights, (sequence, first, second)
    if first.error is None:
        assert first.scale == second.scale, (sequence, first, second)
    if sequence.deviating is None:
        assert first == second
        assert (first.error, first.misuse) == (None, None), (sequence, first)
        weights, scale = expected(sequence)
        torch.testing.assert_close(Tensor(first.weights), Tensor(weights), rtol=1e-6, atol=1e-6)
        assert first.scale == scale, (sequence, first)
