"""`strategy: auto` chooses the fastest strategy whose predicted memory fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.commands.explain.explanation import predict
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.models.settings import ModelConfig
from distmp.parallel.memory import Option
from distmp.precision import resolve
from distmp.training import strategy_choice
from distmp.training.build import build_run
from distmp.training.restarts import Restarts
from distmp.training.setup import Progress, build_engine, prepare, training_batches
from distmp.training.strategy_choice import (
    OPTIONS,
    SHARE,
    Choice,
    choose,
    choose_strategy,
)
from distmp.utils import cgroups
from distmp.utils.units import bytes_text
from tests.commands.explain.runs import CPU, policy, run
from tests.ranks import ranks

RANKS, LOCAL = 16, 4
MODEL = {"options": {"layers": 6, "dimension": 256, "heads": 4, "hidden": 704}}
SMALLER = {"options": {**MODEL["options"], "layers": 3}}
BATCH = {"global_batch_size": 64, "microbatch_size": 2}
DDP, SHARDED_DDP, HSDP, FSDP = OPTIONS


def config_of(**settings: Any) -> RunConfig:
    return run(**{"model": MODEL, "batch": BATCH, "precision": policy("bf16"), **settings})


@contextmanager
def world(local: int = LOCAL) -> Iterator[World]:
    with simulate_ranks(RANKS, local):
        yield World.current(CPU)


def chosen(config: RunConfig, free: int, local: int = LOCAL) -> Choice:
    with world(local) as simulated:
        chosen_policy, _ = resolve(config.precision.policy, CPU)
        return choose(config, prepare(config, simulated), chosen_policy, simulated, free)


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> dict[Option, int]:
    """Return a dictionary that gets the predicted memory of each strategy that is considered."""
    found: dict[Option, int] = {}
    original = strategy_choice._of_rank

    def of_rank(memory: Any, option: Option, *rest: Any) -> int:
        found[option] = original(memory, option, *rest)
        return found[option]

    monkeypatch.setattr(strategy_choice, "_of_rank", of_rank)
    return found


def test_moments_are_counted_in_their_dtypes(needs: dict[Option, int]) -> None:
    elements = 3 * (4 * 256 * 256 + 3 * 256 * 704)  # without embedding, head and norms
    found = []
    for text in ("bf16", "bf16-pure,stochastic_rounding=true"):
        chosen(config_of(model=SMALLER, precision=policy(text)), 10**8)
        found.append(needs[DDP] / elements)
    with_masters, pure = found
    assert with_masters - pure == pytest.approx(4 + 8 - 4, rel=0.1)


def memory_in(choice: Choice) -> float:
    """Return the memory of the chosen strategy that the reason states."""
    number, unit = choice.reason.partition("; ")[0].split()[-2:]
    return float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@pytest.mark.nightly
def test_the_fastest_that_fits_is_chosen_and_the_reason_has_the_numbers() -> None:
    config = config_of()
    free, names = 10**9, []
    for option in OPTIONS:
        choice = chosen(config, free)
        names.append(str(choice.option))
        assert choice.fits
        assert choice.option == option, choice.reason
        assert f"limit: 50% of the {bytes_text(free)} that are free for a rank" in choice.reason
        assert all(f"{name} " in choice.reason for name in names)
        free = int(0.99 * memory_in(choice) / SHARE)
    last = chosen(config, free)
    assert (last.option, last.fits) == (FSDP, False)


@pytest.mark.nightly
def test_hsdp_needs_several_machines() -> None:
    config = config_of()
    free = int(1.05 * memory_in(chosen(config, 2 * 10**7)) / SHARE)
    for local in (RANKS, 1):
        assert chosen(config, 2 * free, local).option != HSDP
        assert "hsdp" not in chosen(config, free, local).reason


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"shard_optimizer": True}, [SHARDED_DDP]),
        ({"reproducible": True}, [DDP, SHARDED_DDP]),
        ({"precision": {"policy": "bf16", "on_nonfinite": "drop_microbatch"}}, [DDP, SHARDED_DDP]),
        ({"sharding": {"shard_size": 8}}, [HSDP]),
        ({"sharding": {"accumulate": "sharded"}}, [HSDP, FSDP]),
        ({"sharding": {"reshard_after_forward": False}}, [HSDP, FSDP]),
        ({"precision": policy("bf16-pure")}, [DDP, HSDP, FSDP]),
        ({}, list(OPTIONS)),
    ],
)
def test_settings_exclude_strategies(
    settings: dict[str, Any], options: list[Option], needs: dict[Option, int]
) -> None:
    choice = chosen(config_of(**settings), 10**8)
    assert (list(needs) or [choice.option]) == options


def test_settings_that_no_strategy_supports_are_refused() -> None:
    config = config_of(reproducible=True, sharding={"accumulate": "sharded"})
    with pytest.raises(ConfigError, match=r"sharding.accumulate = 'sharded': applies only to"):
        chosen(config, 10**9)


def test_settings_are_refused_as_by_the_only_strategy_that_has_them() -> None:
    config = config_of(shard_optimizer=True, precision=policy("bf16-pure"))
    with pytest.raises(ConfigError, match="a sharded optimizer steps FP32 weights"):
        chosen(config, 10**9)


class Frozen(nn.Module):
    """Has a frozen parameter without elements, which FSDP shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 257)
        self.empty = nn.Parameter(torch.zeros(0, 4), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def test_a_frozen_parameter_without_elements_excludes_no_strategy(
    needs: dict[Option, int],
) -> None:
    name = f"{Frozen.__module__}:{Frozen.__qualname__}"
    config = replace(config_of(), model=ModelConfig(name))
    chosen(config, 10**6)
    assert list(needs) == list(OPTIONS)


def test_a_run_that_is_predicted_not_to_fit_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of()
    choice = Choice(FSDP, "a rank needs: fsdp 9 GiB", fits=False)
    monkeypatch.setattr(strategy_choice, "choose", lambda *_: choice)
    with world() as simulated:
        choose_strategy(config, prepare(config, simulated), simulated)
    assert (
        "no strategy is predicted to fit in memory (a rank needs: fsdp 9 GiB); use more ranks"
        in caplog.text
    )


class Quiet:
    """A console that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, line: str) -> None:
        self.lines.append(line)


def free_bytes(least: int, world: World) -> None:
    """Give each rank of this machine other free memory, for the rest of this process."""

    class Memory:
        available = 2 * least * (2 if world.rank == 0 else 1)

    cgroups.psutil.virtual_memory = lambda: Memory


@pytest.mark.nightly
@ranks(2)
def test_ranks_agree_although_their_free_memory_differs() -> None:
    real = World.current("cpu")
    config = config_of(batch={"global_batch_size": 8, "microbatch_size": 2})
    parts = prepare(config, real)
    # On rank 0 alone, everything would fit.
    free_bytes(140_000_000, real)
    resolved, reason = choose_strategy(config, parts, real)
    assert resolved.strategy == "fsdp", reason
    assert len(set(real.ranks.gather(f"{resolved} {reason}"))) == 1
    engine = build_engine(resolved, parts, real, policy="bf16", attribution=False)
    batches = training_batches(resolved, parts, real, Progress())
    assert not engine.step(next(batches)).numbers.skipped
    batches.close()


@ranks(2)
def test_a_run_prints_the_choice(tmp_path: Any) -> None:
    real = World.current("cpu")
    config = config_of(
        batch={"global_batch_size": 8, "microbatch_size": 2}, run_dir=str(tmp_path / "run")
    )
    free_bytes(140_000_000, real)
    console: Any = Quiet()
    built = build_run(config, real, console, Restarts(None, 0, 0, 2))
    assert built.engine.strategy == "fsdp"
    (line,) = [line for line in console.lines if line.startswith("strategy: ")]
    assert "strategy: fsdp (auto: without activations, a rank needs: ddp " in line
    assert built.config.strategy == "auto"


@pytest.mark.nightly
def test_explain_makes_the_choice_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    monkeypatch.setattr(cgroups.psutil, "virtual_memory", lambda: Available(10**12))
    found = predict(config, resolve("bf16", CPU)[0], RANKS, CPU, LOCAL)
    assert (found.strategy, found.strategy_reason.partition(":")[0]) == ("ddp", "auto")
    monkeypatch.setattr(cgroups.psutil, "virtual_memory", lambda: Available(4 * 2 * 10**7))
    found = predict(config, resolve("bf16", CPU)[0], RANKS, CPU, LOCAL)
    assert found.strategy == "fsdp"
    assert "a rank needs: ddp " in found.strategy_reason


class Available:
    def __init__(self, available: int) -> None:
        self.available = available
