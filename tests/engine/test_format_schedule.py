"""Formats of narrow products change at the same step on all ranks, and after a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from distmp.engine import Engine
from distmp.engine.format_guard import CAUSES, FormatGuard, cause_text
from distmp.engine.format_schedule import RECOMPILE_LIMIT
from distmp.engine.format_settings import GuardConfig, PrecisionPhase
from distmp.engine.rank_consistency import check
from distmp.engine.settings import DivergenceConfig
from distmp.errors import CheckpointError
from distmp.parallel.settings import ParallelConfig, ShardingConfig
from distmp.quantization.description import formats_record
from distmp.quantization.linear import OPERANDS
from tests.ranks import ranks, run_ranks
from tests.reference import assert_same_bits, fused_adamw, snapshot

CPU = torch.device("cpu")
WIDTH = 16
PRODUCTS = ("forward", "grad", "wgrad")
STEPS = 12
BAD_STEP = 3
PHASES = (
    PrecisionPhase(after_steps=2),
    PrecisionPhase(after_tokens=70.0, wgrad="bf16"),
    PrecisionPhase(after_steps=10, forward="bf16", grad="bf16", wgrad="bf16"),
)
# Phase 1 returns from wide products.
PHASES = (PrecisionPhase(after_steps=0, forward="bf16", grad="bf16", wgrad="bf16"), *PHASES)
GUARD = GuardConfig(saturated=0.0, underflowed=0.5, widen="layer", steps=3)
ON_SPIKE = GuardConfig(on_spike=True, steps=2)
SPIKES = DivergenceConfig(warmup_steps=3, loss_threshold=1000, norm_threshold=1000)


class Branches(nn.Module):
    """Two layers with inputs, outputs and losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([self.left(left), self.right(right)], -1)


class Block(nn.Module):
    def __init__(self, small: float = 1.0) -> None:
        super().__init__()
        self.up = nn.Linear(2 * WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2 * WIDTH)
        with torch.no_grad():
            self.up.weight[0] *= small

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) - batch.sin()).square().sum(), len(batch)


def make_engine(build: Callable[[], nn.Module] = Branches, **options: Any) -> Engine:
    torch.manual_seed(0)
    options = {"policy": "fp8", "first_step_checks": False, **options}
    return Engine(build(), options.pop("loss", loss), fused_adamw, device="cpu", **options)


def batches(step: int, rank: int = 0, bad_rank: int = 0, value: float = float("inf")) -> Any:
    """Return two microbatches; in `BAD_STEP` an input of the layer `right` is too large."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(4, 2 * WIDTH, generator=generator) for _ in range(2)]
    if step == BAD_STEP and rank == bad_rank:
        made[1][0, -1] = value
    return made


class Taken(NamedTuple):
    """The formats of a step, found in the layers, and its record."""

    formats: dict[str, tuple[str | None, ...]]
    phase: int
    widened: int


def take(engine: Engine, step: int, **bad: Any) -> Taken:
    outcome = engine.step(batches(step, engine.world.rank, **bad))
    _ = outcome.numbers
    assert outcome.formats is not None
    return Taken(used(engine), outcome.formats.phase, outcome.formats.widened)


def used(engine: Engine) -> dict[str, tuple[str | None, ...]]:
    """Return the products of the step that were narrow, from the number of values they rounded."""
    assert engine.narrow_products.layers is not None
    assert engine.narrow_products.statistics is not None
    elements = engine.narrow_products.statistics.read()[:, :, 3]
    narrow = [OPERANDS.index(name) for name in ("input", "grad", "wgrad_grad")]
    return {
        name: tuple(p for p, n in zip(PRODUCTS, row[narrow], strict=True) if n)
        for name, row in zip(engine.narrow_products.layers.modules, elements, strict=True)
    }


@ranks(4)
def test_a_saturation_on_one_rank_widens_one_layer_on_all_ranks() -> None:
    # grad of the first layer is not computed: its input needs no gradient.
    first = ("forward", "wgrad")
    engine = make_engine(strategy="ddp", precision_guard=GUARD)
    for step in range(BAD_STEP + GUARD.steps + 3):
        taken = take(engine, step, bad_rank=2)
        wide = BAD_STEP + 2 <= step < BAD_STEP + 2 + GUARD.steps
        assert taken.formats == {"left": first, "right": () if wide else first}
        assert taken.widened == (3 if wide else 0)
    check(engine)  # all ranks hold the same bits


@pytest.mark.parametrize("widen", ["product", "layer", "policy"])
def test_what_is_widened_follows_from_the_statistics(widen: Any) -> None:
    """The products of each step are those of rules in plain Python, from the steps before."""
    limits = {"saturated": 0.0, "underflowed": 0.02}
    guard = GuardConfig(**limits, widen=widen, steps=2)
    engine = make_engine(lambda: nn.Sequential(Block(small=1e-9), Block()), precision_guard=guard)
    uses = {"input": "forward", "weight": "forward grad", "grad": "grad"}
    uses |= {"wgrad_input": "wgrad", "wgrad_grad": "wgrad"}
    asked_at: list[set[tuple[str, str]]] = []
    widened = 0
    for step in range(24):
        value = 1e6 if step == BAD_STEP else 1.0
        outcome = engine.step([x * 2.0 ** (step % 5) for x in batches(step, value=value)])
        asked = set()
        assert outcome.narrow_statistics is not None
        for name, operands in zip(
            outcome.narrow_statistics.layers, outcome.narrow_statistics.read(), strict=True
        ):
            for operand, (_, saturated, underflowed, elements) in zip(
                OPERANDS, operands.tolist(), strict=True
            ):
                if saturated > 0 or underflowed > limits["underflowed"] * elements:
                    asked |= {(name, product) for product in uses[operand].split()}
        names = outcome.narrow_statistics.layers
        if widen == "layer":
            asked = {(name, product) for name, _ in asked for product in PRODUCTS}
        if widen == "policy" and asked:
            asked = {(name, product) for name in names for product in PRODUCTS}
        asked_at.append(asked)
        expected = set().union(*asked_at[max(0, step - 3) : max(0, step - 1)])
        assert outcome.formats is not None
        assert outcome.formats.widened == len(expected)
        narrow = {(name, product) for name, row in used(engine).items() for product in row}
        assert not narrow & expected
        widened += bool(expected)
    assert 2 <= widened < 24


def test_a_spike_widens_everything_and_a_loss_that_is_not_finite_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for value, step in ((1e4, 6), (float("nan"), 6)):
        engine = make_engine(precision_guard=ON_SPIKE, divergence=SPIKES)
        for number in range(STEPS):
            made = batches(number, bad_rank=1)
            if number == step:
                made[0][0, 0] = value
            outcome = engine.step(made)
            assert outcome.formats is not None
            assert outcome.formats.widened == (6 if step + 2 <= number < step + 4 else 0)
    assert [record.message for record in caplog.records] == 2 * [
        "precision.guard: from step 9 to 10 at least, bf16 replaces the formats of left (forward, "
        "grad, wgrad), right (forward, grad, wgrad), because of a spike",
        "precision.guard: from step 11 on, left (forward, grad, wgrad), right (forward, grad, "
        "wgrad) are narrow again; they were wide because of a spike",
    ]


def run(engine: Engine, first: int = 0, **bad: Any) -> list[Taken]:
    return [take(engine, step, **bad) for step in range(first, STEPS)]


def test_a_run_that_resumes_has_the_formats_and_bits_of_one_that_was_not_interrupted() -> None:
    options = {"precision_phases": PHASES, "precision_guard": GUARD}
    engine = make_engine(**options)
    states, taken = [], []
    for step in range(STEPS):
        states.append({name: value.clone() for name, value in engine.state_dict().items()})
        taken.append(take(engine, step))
    # Phases 1 to 4; 8 samples a step, so 70 are reached after the ninth, which counts 2 later.
    assert [each.phase for each in taken] == [1, 1, *[2] * 8, 4, 4]
    expected = snapshot(engine)
    for step, state in enumerate(states):
        other = make_engine(**options)
        take(other, 7)  # a state of its own, which loading replaces
        other.load_state_dict(state)
        assert run(other, step) == taken[step:]
        assert_same_bits(snapshot(other), expected)


def test_tokens_are_counted_up_to_the_step_before_the_last_one() -> None:
    phases = (PrecisionPhase(after_tokens=17.0, forward="bf16"),)
    engine = make_engine(precision_phases=phases)
    found = [take(engine, step).phase for step in range(6)]
    # 8 samples a step: 24 after the third one.
    assert found == [0, 0, 0, 0, 1, 1]


def resumed_on_ranks(folder: Path, strategy: str) -> list[Taken]:
    options = {"precision_phases": PHASES, "precision_guard": GUARD, "strategy": strategy}
    engine = make_engine(**options)
    taken = []
    for step in range(STEPS):
        taken.append(take(engine, step, bad_rank=1))
        if step + 1 in (BAD_STEP + 1, BAD_STEP + 3, 10):
            engine.save(folder, keep=None)
    expected = snapshot(engine)
    for step in (BAD_STEP + 1, BAD_STEP + 3, 10):
        other = make_engine(**options)
        other.load(folder / f"step-{step:06}")
        assert run(other, step, bad_rank=1) == taken[step:]
        assert_same_bits(snapshot(other), expected)
    return taken


def all_resumed(folder: Path) -> list[list[Taken]]:
    return [resumed_on_ranks(folder / strategy, strategy) for strategy in ("ddp", "fsdp")]


def test_two_ranks_resume_on_either_side_of_a_switch(tmp_path: Path) -> None:
    first, second = run_ranks(all_resumed, 2, tmp_path)
    assert first == second
    ddp, fsdp = first
    assert ddp == fsdp
    assert {each.phase for each in ddp} == {1, 2, 3, 4}
    assert {each.widened for each in ddp} == {0, 3}


def test_any_policy_resumes_from_any_other() -> None:
    tokens = (PrecisionPhase(after_tokens=9.0, wgrad="bf16"),)
    narrow = make_engine(precision_guard=GUARD)
    for step in range(5):
        take(narrow, step)
    wide = make_engine(policy="bf16")
    wide.load_state_dict(narrow.state_dict())
    assert not any(name.startswith("narrow/") for name in wide.state_dict())
    # The guard starts from nothing, also if it has widened a layer before.
    take(narrow, 5)
    narrow.load_state_dict(wide.state_dict())
    assert [take(narrow, step).widened for step in (6, 7)] == [0, 0]
    # Another selection of layers keeps the decisions on the layers that both have.
    for step in range(BAD_STEP + 2):
        take(narrow, step)
    fewer = make_engine(policy="fp8,hp=left", precision_guard=GUARD)
    fewer.load_state_dict(narrow.state_dict())
    assert take(fewer, 5).widened == 3
    # Tokens that a policy did not count: then the phase is refused, also some steps later.
    counting = make_engine(precision_phases=tokens)
    for state in (wide.state_dict(), narrow.state_dict()):
        with pytest.raises(CheckpointError, match="lacks the number of tokens consumed"):
            counting.load_state_dict(state)


def test_evaluation_and_replay_use_the_formats_of_their_step() -> None:
    batch = torch.randn(8, 2 * WIDTH)
    phases = (PrecisionPhase(after_steps=2, forward="bf16", grad="bf16", wgrad="bf16"),)
    losses = []

    def recorded(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        total, weight = loss(model, batch)
        losses.append(float(total.detach()))
        return total, weight

    engine = make_engine(precision_phases=phases, loss=recorded)
    wide = make_engine(policy="bf16")
    take(engine, 0)
    losses.clear()
    outcome = engine.step(batches(BAD_STEP))
    assert losses[0] != loss(wide.model, batches(BAD_STEP)[0])[0].item()
    wide.load_state_dict(engine.state_dict())
    # The formats of an evaluation are those of the next step.
    assert engine.evaluate([batch]) == wide.evaluate([batch])
    losses[2:] = []
    assert engine.explain(outcome) is not None
    assert losses[2] == losses[0]  # the first microbatch, which is finite
    assert engine.evaluate([batch]) == wide.evaluate([batch])


@pytest.mark.nightly
@ranks(1)
def test_compiled_layers_change_their_formats() -> None:
    found = []
    for compiled in (False, True):
        engine = make_engine(Block, precision_phases=PHASES)
        if compiled:
            engine.model.compile(backend="eager")
        found.append(([take(engine, step) for step in range(4)], snapshot(engine)))
    # A block has more versions than the eight that torch compiles by default.
    compiled_blocks = ParallelConfig(compile="blocks", sharding=ShardingConfig(wrap=("Block",)))
    make_engine(
        lambda: nn.Sequential(Block(), Block()), precision_guard=GUARD, parallel=compiled_blocks
    )
    assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


def test_a_run_that_resumes_with_a_wide_layer_does_not_warn_that_it_is_never_called(
    recwarn: pytest.WarningsRecorder,
) -> None:
    engine = make_engine(precision_guard=GUARD)
    last_wide = BAD_STEP + 1 + GUARD.steps
    for step in range(last_wide):
        take(engine, step)
    other = make_engine(precision_guard=GUARD, first_step_checks=True)
    other.load_state_dict(engine.state_dict())
    assert [take(other, step).widened for step in (last_wide, last_wide + 1)] == [3, 0]
    assert not any("no rank called" in str(warning.message) for warning in recwarn)


def test_formats_are_described_as_those_of_the_policy() -> None:
    layers = make_engine(precision_phases=PHASES).narrow_products.layers
    assert layers is not None
    assert formats_record(layers)["formats"] == [
        "forward e4m3, grad e5m2, wgrad e5m2, a scale per tensor"
    ]


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "distmp"):
        run(make_engine(precision_phases=PHASES, precision_guard=GUARD))
    messages = [record.message for record in caplog.records]
    assert messages == [
        "precision.phases: from step 1 on, the formats are forward=bf16, grad=bf16, wgrad=bf16",
        "precision.phases: from step 3 on, the formats are forward=e4m3, grad=e5m2, wgrad=e5m2",
        "precision.guard: from step 6 to 8 at least, bf16 replaces the formats of right (forward, "
        "grad, wgrad), because of saturated or non-finite values",
        "precision.guard: from step 9 on, right (forward, grad, wgrad) are narrow again; they were "
        "wide because of saturated or non-finite values",
        "precision.phases: from step 11 on, the formats are forward=bf16, grad=bf16, wgrad=bf16",
    ]


@pytest.mark.parametrize("widen", ["product", "layer", "policy"])
def test_a_run_that_resumes_knows_why_products_are_wide(widen: Any) -> None:
    options = {"precision_guard": replace(GUARD, widen=widen)}
    engine = make_engine(**options)
    states, messages = [], []
    for step in range(9):
        states.append({name: value.clone() for name, value in engine.state_dict().items()})
        messages += changes(engine, step)
    cause = "because of saturated or non-finite values"
    assert [message.rpartition(", ")[2] for message in messages[:1]] == [cause]
    assert messages[1].endswith(f"are narrow again; they were wide {cause}")
    assert len(messages) == 2
    # Before the change, at its step, in between, at the step of the return, and after it.
    for first in (BAD_STEP + 1, BAD_STEP + 2, 6, 8):
        other = make_engine(**options)
        other.load_state_dict(states[first])
        found = [message for step in range(first, 9) for message in changes(other, step)]
        assert found[-1] == messages[1]
        assert [message.rpartition(", ")[2] for message in found[:-1]] == [cause] * (first < 8)
    # A state that was written before causes were stored.
    older = {n: v for n, v in states[6].items() if not n.startswith("narrow/causes/")}
    other.load_state_dict(older)
    found = [message for step in range(6, 9) for message in changes(other, step)]
    assert found[-1] == messages[1].partition(";")[0]
    fresh = make_engine(**options)
    fresh.load_state_dict(older)
    assert changes(fresh, 6)[0].endswith("because of the state of the checkpoint")


def test_a_product_returns_with_the_cause_of_its_own() -> None:
    """Another cause that widens another layer in the meantime is not that of the first one."""
    guard = FormatGuard(GuardConfig(saturated=0.0, underflowed=0.5, steps=2), 2, CPU)
    bad = torch.zeros(2, len(OPERANDS), 3, dtype=torch.float64)
    bad[..., 2] = 1
    first, second = bad.clone(), bad.clone()
    first[0, OPERANDS.index("grad"), 0] = 1
    second[1, OPERANDS.index("input"), 1] = 1
    no_spike = torch.tensor(False)
    for taken, sums in enumerate((first, second, bad), 1):
        guard.end_step(sums, no_spike, taken)
    texts = [[cause_text(causes) for causes in row] for row in guard.causes[:, 1].tolist()]
    assert texts == [3 * [CAUSES[0]], 3 * [CAUSES[1]]]


def changes(engine: Engine, step: int) -> tuple[str, ...]:
    outcome = engine.step(batches(step))
    _ = outcome.numbers
    assert outcome.formats is not None
    return outcome.formats.changes
