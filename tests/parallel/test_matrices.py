"""Muon under every strategy: the same updates at any number of ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

from distmp import Engine
from distmp.checkpoint import saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.distributed import collectives
from distmp.errors import ConfigError
from distmp.optim import Muon, owners
from distmp.parallel.settings import ParallelConfig, ShardingConfig
from distmp.utils.flat_shard import gathered
from tests.marks import nightly
from tests.ranks import in_turn, ranks, run_ranks
from tests.recording import HostReads

VOCABULARY, SAMPLES = 17, 64
# Rows that 2 and 4 ranks do not share equally; 3 rows leave ranks without a shard.
WIDTHS = (24, 41, 3, 24)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTHS[0])
        self.layers = nn.ModuleList(
            nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(WIDTHS)
        )
        self.norm = nn.LayerNorm(WIDTHS[-1])
        self.head = nn.Linear(WIDTHS[-1], VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss(module: nn.Module, batch: Any) -> tuple[Tensor, int]:
    tokens, targets, factor = batch
    total = nn.functional.cross_entropy(module(tokens).float(), targets, reduction="sum")
    return total * factor, len(targets)


KINDS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "shard_optimizer": {"strategy": "ddp", "shard_optimizer": True},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {
        "strategy": "hsdp",
        "parallel": ParallelConfig(sharding=ShardingConfig(shard_size=2)),
    },
}


def build(kind: str, policy: str = "fp32", **options: Any) -> Engine:
    return Engine(
        Net(),
        loss,
        lambda named: Muon(named, **{"lr": 0.02, **options}),
        policy=policy,
        max_norm=1.0,
        **KINDS[kind],
    )


def take_steps(engine: Engine, first: int, count: int, factor: float = 1.0) -> list[Any]:
    """Train on global batches that do not depend on the number of ranks."""
    rank, size = engine.world.rank, engine.world.world_size
    outcomes = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        data = torch.randint(VOCABULARY, (2, SAMPLES), generator=generator)
        tokens, targets = data[:, rank::size]
        outcomes.append(engine.step([(tokens, targets, factor)]).numbers)
    return outcomes


def full_state(engine: Engine) -> dict[str, Tensor]:
    """Return the full weights and momentum."""
    return {
        name: gathered(tensor).detach().clone()
        for name, tensor in engine.state_dict().items()
        if name.startswith("model/") or name.endswith("momentum_buffer")
    }


def trained(
    kind: str, policy: str, steps: int, max_norm: float | None = 1.0, ns_dtype: str = "fp32"
) -> dict[str, Tensor]:
    engine = build(kind, policy, ns_dtype=ns_dtype)
    engine.max_norm = max_norm
    take_steps(engine, 0, steps)
    return full_state(engine)


@functools.cache
def on_one_rank(policy: str, steps: int) -> dict[str, Tensor]:
    return run_ranks(trained, 1, "single", policy, steps)[0]


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("ddp", 2),
        ("shard_optimizer", 4),
        nightly("fsdp", 1),
        nightly("fsdp", 2),
        nightly("fsdp", 4),
        nightly("hsdp", 4),
    ],
)
def test_updates_do_not_depend_on_ranks_and_strategy(kind: str, world_size: int) -> None:
    expected = on_one_rank("fp32", 1)
    start = {f"model/{name}": value for name, value in Net().state_dict().items()}
    results = run_ranks(trained, world_size, kind, "fp32", 1)
    for name, value in expected.items():
        moved = (value - start.get(name, torch.zeros(()))).norm()
        assert all((result[name] - value).norm() <= 1e-5 * moved for result in results), name
        assert all(torch.equal(results[0][name], result[name]) for result in results), name


@ranks(2)
@in_turn("policy", ["fp32", "bf16"])
def test_owners_compute_the_bits_of_replicas(policy: str) -> None:
    # Under bf16, iterations and exchanges are in 16 bits, too.
    expected = trained("ddp", policy, 1, None, policy)
    # AdamW's kernel rounds differently at the end of a shard.
    matrices = [name for name in expected if "layers." in name and "weight" in name]
    for kind in ("shard_optimizer", "fsdp"):
        result = trained(kind, policy, 1, None, policy)
        for name in matrices:
            assert result[name].dtype == torch.float32
            assert torch.equal(result[name], expected[name]), f"{name} under {kind}"


@ranks(2)
@in_turn("kind", ["ddp", "shard_optimizer", "fsdp"])
def test_a_skipped_step_changes_nothing_on_any_rank(kind: str) -> None:
    engine = build(kind)
    take_steps(engine, 0, 1)
    before = full_state(engine)
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    (numbers,) = take_steps(engine, 1, 1, factor=bad)
    assert numbers.skipped
    after = full_state(engine)
    for name, value in before.items():
        assert torch.equal(value.view(torch.int32), after[name].view(torch.int32)), name
    (numbers,) = take_steps(engine, 2, 1)
    assert not numbers.skipped
    assert any(not torch.equal(before[name], value) for name, value in full_state(engine).items())


@ranks(2)
@in_turn(
    ("kind", "hooked"), [*itertools.product(["ddp", "shard_optimizer", "fsdp"], [(0,), (0, 1)])]
)
def test_skipped_steps_run_no_hooks_on_any_rank(kind: str, hooked: tuple[int, ...]) -> None:
    engine = build(kind)
    ran: list[int] = []
    steps = 0
    if engine.world.rank in hooked:
        engine.optimizer.register_step_post_hook(lambda *_: ran.append(steps))
    for steps, factor in enumerate((float("inf"), 1.0, float("inf"), 1.0)):
        (numbers,) = take_steps(engine, steps, 1, factor)
        assert numbers.skipped == (factor != 1)
    assert ran == ([1, 3] if engine.world.rank in hooked else [])


def test_reproducible_updates_are_bitwise_equal_at_any_number_of_ranks() -> None:
    (one,) = run_ranks(_reproducible, 1, 4)
    for result in run_ranks(_reproducible, 2, 2):
        assert all(torch.equal(one[name], value) for name, value in result.items())


def _reproducible(microbatches: int) -> dict[str, Tensor]:
    engine = Engine(
        Net(),
        loss,
        lambda named: Muon(named, lr=0.02),
        policy="fp32",
        reproducible=True,
        shard_optimizer=True,
    )
    data = torch.randint(VOCABULARY, (3, 4, 2, 8), generator=torch.Generator().manual_seed(0))
    for batches in data:
        part = batches[engine.world.rank * microbatches :][:microbatches]
        engine.step([(tokens, targets, 1.0) for tokens, targets in part])
    return full_state(engine)


def _save(kind: str, path: Path) -> dict[str, Tensor]:
    engine = build(kind)
    take_steps(engine, 0, 2)
    saving.save(path, 2, engine.state_dict(), {"step": 2}, keep=1)
    take_steps(engine, 2, 1)
    return full_state(engine)


def _load(kind: str, path: Path) -> dict[str, Tensor]:
    engine = build(kind)
    (directory,) = path.glob("*2*")
    checkpoint = StoredCheckpoint(directory)
    live = engine.prepare_to_load(checkpoint.tensors)
    assert any(name.endswith("momentum_buffer") for name in live)
    checkpoint.load(live)
    engine.finish_loading(live)
    take_steps(engine, 2, 1)
    return full_state(engine)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(("fsdp", 2), ("shard_optimizer", 3)), (("shard_optimizer", 2), ("fsdp", 3))],
)
def test_training_continues_at_another_number_of_ranks(
    saved: tuple[str, int], loaded: tuple[str, int], tmp_path: Path
) -> None:
    expected = run_ranks(_save, saved[1], saved[0], tmp_path)[0]
    for result in run_ranks(_load, loaded[1], loaded[0], tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_matrices_are_batched_and_no_full_copy_is_kept() -> None:
    engine = build("fsdp")
    calls: list[int] = []
    exchange: Callable[..., dist.Work] = collectives.all_to_all

    def counted(*arguments: Any) -> dist.Work:
        calls.append(arguments[0].numel())
        return exchange(*arguments)

    with mock.patch.object(owners, "all_to_all", counted):
        take_steps(engine, 0, 2)
    assert len(calls) == 2 * 2  # to owners and back, in each step
    elements = sum(out * inside for inside, out in itertools.pairwise(WIDTHS))
    held = sum(
        tensor.to_local().numel()  # type: ignore[attr-defined]
        for name, tensor in engine.state_dict().items()
        if name.endswith("momentum_buffer")
    )
    assert held <= 0.6 * elements


@ranks(2)
@in_turn("kind", ["ddp", "shard_optimizer", "fsdp"])
def test_an_update_reads_no_value_on_the_host(kind: str) -> None:
    engine = Engine(
        Net(),
        loss,
        lambda named: Muon(named, lr=0.02),
        policy="fp32",
        schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        **KINDS[kind],
    )
    take_steps(engine, 0, 2)
    reads = HostReads()
    step = Muon.step

    def recorded(optimizer: Muon) -> None:
        with reads:
            step(optimizer)

    with mock.patch.object(Muon, "step", recorded):
        take_steps(engine, 2, 2)
    assert isinstance(engine.optimizer.param_groups[0]["lr"], Tensor)
    assert reads.found == []


def test_muon_refuses_embeddings_and_models_without_matrices() -> None:
    with pytest.raises(ConfigError, match=r"lacks 'embed\.weight', an embedding"):
        build("single", adamw=["head*"])
    with pytest.raises(ConfigError, match="finds no hidden matrix"):
        build("single", adamw=["*"])
    model = nn.ModuleDict({"projection": nn.Linear(8, 4, bias=False), "tokens": nn.Embedding(4, 8)})
    model["tokens"].weight = model["projection"].weight
    with pytest.raises(ConfigError, match=r"lacks 'projection\.weight', an embedding"):
        Engine(model, loss, lambda named: Muon(named), policy="fp32")


@ranks(1)
def test_torchs_muon_is_refused_for_shards() -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ConfigError, match="updates then depend on the number of ranks"):
        Engine(model, loss, lambda named: torch.optim.Muon(named), policy="fp32", strategy="fsdp")


@ranks(1)
@in_turn("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_optimizers_that_torch_cannot_run_on_shards_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{kind.__name__}': cannot compute with sharded"):
        Engine(nn.Linear(4, 4), loss, lambda named: kind(named), policy="fp32", strategy="fsdp")


@ranks(2)
def test_shards_that_muon_does_not_know_are_refused_on_all_ranks() -> None:
    whole = nn.Linear(1, 1, bias=False)  # rank 0 has all rows
    model = fully_shard(nn.Sequential(whole))
    optimizer = Muon(model.named_parameters(), lr=0.02)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ConfigError, match=r"a shard of a matrix, \(1, 1\), .* Muon\.shard"):
        optimizer.step()


@ranks(2)
def test_a_matrix_without_a_gradient_is_left_out_for_one_step() -> None:
    assert dist.group.WORLD is not None
    local = slice(12 * dist.get_rank(), 12 * dist.get_rank() + 12)
    whole = [(str(seed), torch.randn(shape)) for seed, shape in enumerate([(6, 4), (3, 8)])]
    for _, tensor in whole:
        dist.broadcast(tensor, 0)
    reference = Muon(whole, lr=0.02)
    optimizer = Muon([(name, tensor.clone()) for name, tensor in whole], lr=0.02)
    shards = [tensor.flatten()[local].clone() for _, tensor in whole]
    optimizer.param_groups[0]["params"] = shards
    divided = [owners.ShardedMatrix(tensor.shape, [0, 12, 24]) for _, tensor in whole]
    by_id = {id(shard): division for shard, division in zip(shards, divided, strict=True)}
    optimizer.shard(by_id, dist.group.WORLD)
    for present in ([True, True], [False, True], [True, True]):
        for (_, tensor), shard, has_gradient in zip(whole, shards, present, strict=True):
            tensor.grad = tensor.cos() if has_gradient else None
            shard.grad = None if tensor.grad is None else tensor.grad.flatten()[local]
        optimizer.step()
        reference.step()
        for (_, tensor), shard in zip(whole, shards, strict=True):
            torch.testing.assert_close(shard, tensor.flatten()[local], rtol=0, atol=1e-6)


@ranks(2)
def test_matrices_that_are_not_sharded_are_computed_on_every_rank() -> None:
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    local = slice(12 * dist.get_rank(), 12 * dist.get_rank() + 12)
    whole, flat = start.clone(), start.clone()
    optimizer = Muon([("whole", whole), ("flat", flat)], lr=0.02)
    (group,) = optimizer.param_groups
    group["params"][1] = shard = start.flatten()[local].clone()
    whole.grad, shard.grad = gradient, gradient.flatten()[local]
    assert dist.group.WORLD is not None
    division = owners.ShardedMatrix(start.shape, [0, 12, 24])
    optimizer.shard({id(shard): division}, dist.group.WORLD)
    optimizer.step()
    assert not torch.equal(whole, start)
    assert torch.equal(shard, whole.flatten()[local])
