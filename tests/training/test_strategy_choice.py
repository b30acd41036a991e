"""`strategy: auto` chooses the fastest strategy whose weights, gradients and moments fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from distmp.commands.explain.explanation import predict
from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.fsdp_setup import shard_size
from distmp.parallel.settings import ShardingConfig
from distmp.precision import resolve
from distmp.training import strategy_choice
from distmp.training.components import (
    Progress,
    build_engine,
    build_model_and_data,
    training_batches,
)
from distmp.training.restarts import Restarts
from distmp.training.run import build_run
from distmp.training.strategy_choice import OPTIONS, SHARE, choose_strategy
from distmp.utils import processes
from tests.commands.explain.runs import CPU, policy, run
from tests.machines import pretend
from tests.marks import nightly
from tests.ranks import ranks

RANKS, LOCAL = 16, 4
MODEL = {"options": {"layers": 6, "dimension": 256, "heads": 4, "hidden": 704}}
BATCH = {"global_batch_size": 64, "microbatch_size": 2}


def config_of(**settings: Any) -> RunConfig:
    return run(**{"model": MODEL, "batch": BATCH, "precision": policy("bf16"), **settings})


@contextmanager
def world(local: int = LOCAL) -> Iterator[World]:
    with simulate_ranks(RANKS, local):
        yield World.current(CPU)


def chosen(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, free: int, local: int = LOCAL
) -> tuple[str, str]:
    """Return the strategy and the reason with so much free memory."""
    monkeypatch.setattr(strategy_choice, "least_free_bytes", lambda _: free)
    with world(local) as simulated:
        found, reason = choose_strategy(config, build_model_and_data(config, simulated), simulated)
    return found.strategy, reason


# Bytes for each parameter of a rank: 16-bit or FP32 parameters, FP32 gradients, two moments.
@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, (2 + 4 + 8 + 4, 16 / LOCAL, 16 / RANKS)),
        nightly({"precision": policy("bf16-autocast")}, (4 + 4 + 8, 16 / LOCAL, 16 / RANKS)),
        nightly({"precision": policy("bf16-pure")}, (2 + 4 + 8, 14 / LOCAL, 14 / RANKS)),
    ],
)
def test_fastest_strategy_that_fits_is_chosen_with_reason(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], needs: tuple[float, ...]
) -> None:
    config = config_of(**settings)
    with world() as simulated:
        elements = sum(
            p.numel() for p in build_model_and_data(config, simulated).model.parameters()
        )
    for option, each in zip(OPTIONS, needs, strict=True):
        limit = int(each * elements / SHARE)
        found, reason = chosen(monkeypatch, config, limit + 16)
        assert found == option, reason
        assert f"{option} " in reason
        assert (
            chosen(monkeypatch, config, limit - 16)[0]
            == OPTIONS[min(OPTIONS.index(option) + 1, len(OPTIONS) - 1)]
        )


def test_frozen_weights_of_adapters_count_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    adapters = {"peft": {"r": 2, "target_modules": ["down"]}}
    config = config_of(model={**MODEL, **adapters})
    with world() as simulated:
        parameters = [*build_model_and_data(config, simulated).model.parameters()]
    need = sum((16 if each.requires_grad else 2) * each.numel() for each in parameters) / LOCAL
    assert chosen(monkeypatch, config, int(need / SHARE) + 16)[0] == "hsdp"
    assert chosen(monkeypatch, config, int(need / SHARE) - 16)[0] == "fsdp"


def test_hsdp_needs_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for local in (RANKS, 1):
        found, reason = chosen(monkeypatch, config_of(), 10**7, local)
        assert (found, "hsdp" in reason) == ("fsdp", False)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"shard_optimizer": True}, ["ddp"]),
        ({"reproducible": True}, ["ddp"]),
        ({"precision": {"policy": "bf16", "on_nonfinite": "drop_microbatch"}}, ["ddp"]),
        ({"sharding": {"shard_size": 8}}, ["hsdp"]),
        ({"sharding": {"accumulate": "sharded"}}, ["hsdp", "fsdp"]),
        ({"sharding": {"reshard_after_forward": False}}, ["hsdp", "fsdp"]),
        ({}, list(OPTIONS)),
    ],
)
def test_settings_exclude_strategies(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], options: list[str]
) -> None:
    found, reason = chosen(monkeypatch, config_of(**settings), 1)
    assert found == options[-1]
    numbers = reason.partition("take: ")[2].partition(";")[0]
    assert [part.split()[0] for part in numbers.split(", ")] == options


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reproducible": True, "sharding": {"accumulate": "sharded"}},
            r"sharding.accumulate = 'sharded': applies only to",
        ),
        (
            {"shard_optimizer": True, "precision": policy("bf16-pure")},
            "a sharded optimizer updates FP32 weights",
        ),
    ],
)
def test_settings_without_supporting_strategy_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(monkeypatch, config_of(**settings), 10**9)


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

    processes.psutil.virtual_memory = lambda: Memory


@pytest.mark.nightly
@ranks(2)
def test_ranks_with_different_free_memory_agree() -> None:
    real = World.current("cpu")
    config = config_of(batch={"global_batch_size": 8, "microbatch_size": 2})
    parts = build_model_and_data(config, real)
    # On rank 0 alone, everything would fit.
    elements = sum(parameter.numel() for parameter in parts.model.parameters())
    free_bytes(int(0.8 * 18 * elements / SHARE), real)
    resolved, reason = choose_strategy(config, parts, real)
    assert resolved.strategy == "fsdp", reason
    assert len(set(real.ranks.gather(f"{resolved} {reason}"))) == 1
    engine = build_engine(resolved, parts, real, policy="bf16", attribution=False)
    batches = training_batches(resolved, parts, real, Progress())
    assert not engine.step(next(batches).microbatches).numbers.skipped
    batches.close()


@ranks(4)
def test_machines_with_different_numbers_of_ranks_agree() -> None:
    real = World.current("cpu")
    pretend(2 if real.rank in (1, 2) else 1)
    config = config_of(batch={"global_batch_size": 8, "microbatch_size": 2})
    parts = build_model_and_data(config, real)
    elements = sum(parameter.numel() for parameter in parts.model.parameters())
    strategy_choice.least_free_bytes = lambda _: int(10 * elements / SHARE)  # too little for ddp
    resolved, reason = choose_strategy(config, parts, real)
    assert real.ranks.gather(resolved.strategy) == ["fsdp"] * 4, reason
    with pytest.raises(ConfigError, match=r"None: machines have .* ranks, \[1, 2\]; set it"):
        shard_size(ShardingConfig(), real)
    assert shard_size(ShardingConfig(shard_size=2), real) == 2


@ranks(2)
def test_run_prints_chosen_strategy(tmp_path: Any) -> None:
    real = World.current("cpu")
    config = config_of(
        batch={"global_batch_size": 8, "microbatch_size": 2}, run_dir=str(tmp_path / "run")
    )
    free_bytes(10_000_000, real)
    console: Any = Quiet()
    built = build_run(config, real, console, Restarts(None, 0, 0, 2))
    assert built.engine.strategy == "fsdp"
    (line,) = [line for line in console.lines if line.startswith("strategy: ")]
    assert "strategy: fsdp (auto: weights, gradients and optimizer state of a rank take: " in line
    assert built.config.strategy == "auto"


@pytest.mark.nightly
def test_explain_chooses_same_strategy_as_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    for free, strategy in ((10**12, "ddp"), (1, "fsdp")):
        monkeypatch.setattr(strategy_choice, "least_free_bytes", lambda _, free=free: free)
        found = predict(config, resolve("bf16", CPU)[0], RANKS, CPU, LOCAL)
        assert found.strategy == strategy
        assert found.strategy_reason.startswith("auto: ")
