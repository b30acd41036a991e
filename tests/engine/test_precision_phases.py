"""The policy of matmuls changes at a number of tokens, on all ranks and after a resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.config import PrecisionConfig
from distmp.engine.engine import Engine
from distmp.engine.engine_config import EngineConfig
from distmp.engine.precision_phases import phase_formats
from distmp.engine.settings import PrecisionPhase, parse_phases
from distmp.errors import CheckpointError, ConfigError
from distmp.precision import policy
from distmp.quantization.layers import formats_record
from distmp.quantization.linear import OPERANDS
from tests.ranks import ranks, run_ranks
from tests.reference import assert_same_bits, fused_adamw, snapshot

WIDTH = 16
PRODUCTS = ("forward", "grad", "wgrad")
STEPS = 10
FORWARD = "fp8,forward=bf16"
# 8 samples a step and rank.
PHASES = (
    PrecisionPhase(9, "bf16"),
    PrecisionPhase(33, "fp8"),
    PrecisionPhase(56, FORWARD),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2 * WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) - batch.sin()).square().sum(), len(batch)


def make_engine(build: Callable[[], nn.Module] = Block, **options: Any) -> Engine:
    torch.manual_seed(0)
    options = {"policy": "fp8", "first_step_checks": False, **options}
    return Engine(build(), options.pop("loss", loss), fused_adamw, device="cpu", **options)


def batches(step: int, rank: int = 0) -> list[Tensor]:
    """Return two microbatches; the ranks of a step have different numbers of samples."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = (4, 4) if rank == 0 else (1, 2)
    return [torch.randn(size, 2 * WIDTH, generator=generator) for size in sizes]


def take(engine: Engine, step: int) -> tuple[str | None, tuple[str, ...]]:
    """Return the policy of a step, and the matmuls of its second layer that rounded values."""
    outcome = engine.step(batches(step, engine.world.rank))
    _ = outcome.numbers
    assert engine.low_precision_matmuls.statistics is not None
    elements = engine.low_precision_matmuls.statistics.read()[1, :, 3]
    low = [OPERANDS.index(name) for name in ("input", "grad", "wgrad_grad")]
    return outcome.formats, tuple(p for p, n in zip(PRODUCTS, elements[low], strict=True) if n)


def run(engine: Engine, first: int = 0) -> list[tuple[str | None, tuple[str, ...]]]:
    return [take(engine, step) for step in range(first, STEPS)]


def test_a_run_that_resumes_has_the_formats_and_bits_of_one_that_was_not_interrupted() -> None:
    engine = make_engine(precision_phases=PHASES)
    states, taken = [], []
    for step in range(STEPS):
        states.append({name: value.clone() for name, value in engine.state_dict().items()})
        taken.append(take(engine, step))
    # The number of tokens is that after the step before the last one.
    wide, low, late = ("bf16", ()), ("fp8", PRODUCTS), (FORWARD, PRODUCTS[1:])
    assert taken == [*[wide] * 3, *[low] * 3, *[late] * 2, *[low] * 2]
    expected = snapshot(engine)
    for step, state in enumerate(states):
        other = make_engine(precision_phases=PHASES)
        take(other, 7)  # a state of its own, which loading replaces
        other.load_state_dict(state)
        assert run(other, step) == taken[step:]
        assert_same_bits(snapshot(other), expected)


def resumed_on_ranks(directory: Path, strategy: str) -> list[Any]:
    engine = make_engine(precision_phases=PHASES, strategy=strategy)
    taken = [take(engine, step) for step in range(2)]
    engine.save(directory)  # the first phase has ended, which the host does not know yet
    taken += run(engine, 2)
    other = make_engine(precision_phases=PHASES, strategy=strategy)
    other.load(directory / "step-000002")
    assert run(other, 2) == taken[2:]
    assert_same_bits(snapshot(other), snapshot(engine))
    return taken


def all_resumed(directory: Path) -> list[list[Any]]:
    return [resumed_on_ranks(directory / strategy, strategy) for strategy in ("ddp", "fsdp")]


def test_ranks_change_together_and_resume(tmp_path: Path) -> None:
    first, second = run_ranks(all_resumed, 2, tmp_path)
    assert first == second
    assert first[0] == first[1]
    # 11 samples a step over both ranks.
    names = ["bf16"] * 2 + ["fp8"] * 2 + [FORWARD] * 3 + ["fp8"] * 3
    assert [name for name, _ in first[0]] == names


def test_checkpoints_without_a_number_of_tokens_are_refused() -> None:
    low = make_engine()
    take(low, 0)
    late = make_engine(precision_phases=(PrecisionPhase(9, "bf16"),))
    with pytest.raises(CheckpointError, match="lacks the number of tokens"):
        late.load_state_dict(low.state_dict())
    low.load_state_dict(late.state_dict())  # without phases it has no effect
    take(low, 1)


def test_evaluation_and_replay_use_the_formats_of_their_step() -> None:
    batch = torch.randn(8, 2 * WIDTH)
    losses = []

    def recorded(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        total, weight = loss(model, batch)
        losses.append(float(total.detach()))
        return total, weight

    phases = (PrecisionPhase(1, "fp8"), PrecisionPhase(math.inf, "bf16"))
    engine = make_engine(precision_phases=phases, loss=recorded)
    wide = make_engine(policy="bf16")
    take(engine, 0)
    losses.clear()
    made = batches(3)
    made[1][0, -1] = math.inf
    outcome = engine.step(made)
    assert losses[0] != loss(wide.model, made[0])[0].item()
    wide.load_state_dict(engine.state_dict())
    # The formats of an evaluation are those of the next step.
    assert engine.evaluate([batch]) == wide.evaluate([batch])
    losses[2:] = []
    assert engine.explain(outcome) is not None
    assert losses[2] == losses[0]  # the first microbatch, which is finite
    assert engine.evaluate([batch]) == wide.evaluate([batch])


def test_changes_are_logged_and_formats_described(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(precision_phases=PHASES[1:])
    with caplog.at_level(logging.WARNING, "distmp"):
        take(make_engine(), 0)  # without phases nothing is logged
        run(engine)
    assert [record.message for record in caplog.records] == [
        "precision.phases: policy fp8 from step 1 on",
        f"precision.phases: policy {FORWARD} from step 7 on",
        "precision.phases: policy fp8 from step 9 on",
    ]
    layers = engine.low_precision_matmuls.layers
    assert layers is not None
    assert formats_record(layers)["formats"] == [
        "forward e4m3, grad e5m2, wgrad e5m2, scaling tensor"
    ]


@pytest.mark.nightly
@ranks(1)
def test_compiled_layers_change_their_formats() -> None:
    found = []
    for compiled in (False, True):
        engine = make_engine(precision_phases=PHASES)
        if compiled:
            engine.model.compile(backend="eager")
        found.append((run(engine), snapshot(engine)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"policy": "bf16"}, "use until_tokens and policy, such as"),
    ({"until": 3, "policy": "bf16"}, "use until_tokens and policy, such as"),
    (
        {"until_tokens": 0, "policy": "bf16"},
        "precision.phases.until_tokens = 0: use a number above",
    ),
    ({"until_tokens": "1e9", "policy": "bf16"}, "until_tokens = '1e9': must be a number, not text"),
    ({"until_tokens": 5, "policy": "fp9"}, "precision.phases.policy = 'fp9': did you mean 'fp8'"),
    ({"until_tokens": 5, "policy": "bf16,reduce=bf16"}, "in more than forward, grad and wgrad"),
    ({"until_tokens": 5, "policy": "mxfp8"}, "in more than forward, grad and wgrad"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG)
def test_a_wrong_phase_is_refused_with_one_message(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        PrecisionConfig("fp8", phases=(entry,)).check_names()
    assert message in str(raised.value)


def test_wrong_lists_are_refused() -> None:
    twice = (PrecisionPhase(5, "bf16"), PrecisionPhase(5, "fp8"))
    with pytest.raises(ConfigError, match="is not above 5"):
        EngineConfig(policy="fp8", precision_phases=twice)
    one: Any = twice[0]
    with pytest.raises(ConfigError, match=r"must be a list of PrecisionPhase$"):
        EngineConfig(policy="fp8", precision_phases=one)
    with pytest.raises(ConfigError, match="has no low-precision matmuls to change"):
        phase_formats(policy("bf16"), parse_phases([{"until_tokens": 5, "policy": "fp8"}]))
