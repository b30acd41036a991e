from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distmp.config import RankConsistencyConfig, load
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.engine import rank_consistency
from distmp.engine.digests import ROW, ROWS_PER_BLOCK, digests
from distmp.engine.engine import Engine
from distmp.errors import ConfigError, TrainingError
from distmp.telemetry.console import Console
from distmp.training.callbacks import Callback, PendingStep, TrainingLoop
from distmp.training.trainer import Trainer
from tests.ranks import ranks
from tests.reference import CLASSES, INPUTS, TWO_RANKS, make_engine, make_model, train
from tests.torchrun import TINY, corpus

CPU = torch.device("cpu")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
# Around the borders of rows and blocks.
SIZES = (1, 2, 3, ROW - 1, ROW, ROW + 1, ROWS_PER_BLOCK["cpu"] * ROW + 5)


def digest(tensor: Tensor) -> int:
    return int(digests({"tensor": tensor}, CPU))


def random_bits(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (size,), generator=generator).to(torch.bool)
    count = size * dtype.itemsize
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype)


def splitmix(state: int) -> int:
    """Reference of splitmix64's finalizer, with Python integers."""
    state &= 2**64 - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def expected_digest(words: Sequence[int]) -> int:
    golden, total = 0x9E3779B97F4A7C15, 0
    for row, start in enumerate(range(0, len(words), ROW)):
        weighted = (
            word * (splitmix((column + 1) * golden) | 1)
            for column, word in enumerate(words[start : start + ROW])
        )
        total += splitmix(sum(weighted) + row * golden)
    return (total + 2**63) % 2**64 - 2**63


# Digests


@pytest.mark.parametrize("size", [0, *SIZES])
def test_a_digest_matches_its_definition(size: int) -> None:
    values = random_bits(size, torch.float32)
    words = struct.unpack(f"<{size}i", values.numpy().tobytes())
    assert digest(values) == expected_digest(words)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(size=st.sampled_from(SIZES), place=st.floats(0, 1), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_changes_it(
    dtype: torch.dtype, size: int, place: float, bit: int
) -> None:
    values = random_bits(size, dtype)
    changed = values.clone()
    memory = changed.view(torch.uint8)
    index = min(len(memory) - 1, int(place * len(memory)))
    memory[index] ^= 1 if dtype == torch.bool else 1 << bit
    assert digest(changed) != digest(values)


@settings(max_examples=200, deadline=None)
@given(
    size=st.sampled_from(SIZES[1:]),
    first=st.floats(0, 1, exclude_max=True),
    second=st.floats(0, 1, exclude_max=True),
    values=st.tuples(st.floats(width=32), st.floats(width=32)),
)
def test_two_swapped_values_change_it(
    size: int, first: float, second: float, values: tuple[float, float]
) -> None:
    one, other = int(first * size), int(second * size)
    tensor = random_bits(size, torch.float32)
    tensor[one], tensor[other] = values
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other].clone(), tensor[one].clone()
    same = torch.equal(tensor.view(torch.int32), swapped.view(torch.int32))
    assert (digest(swapped) == digest(tensor)) == same


def test_equal_values_with_other_bits_change_it() -> None:
    zeros = torch.zeros(10)
    negative = zeros.clone()
    negative[4] = -0.0
    assert torch.equal(zeros, negative)
    assert digest(zeros) != digest(negative)
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32)
    assert payloads.view(torch.float32).isnan().all()
    assert len({digest(nan) for nan in payloads.view(torch.float32)}) == 3


@settings(max_examples=100, deadline=None)
@given(places=st.lists(st.integers(0, 2 * ROW), min_size=2, max_size=8, unique=True))
def test_several_flipped_signs_do_not_cancel(places: list[int]) -> None:
    values = torch.zeros(2 * ROW + 1)
    flipped = values.clone()
    flipped[places] = -0.0
    assert digest(flipped) != digest(values)


def test_swapped_rows_change_it() -> None:
    values = random_bits(3 * ROW, torch.float32).view(3, ROW)
    assert digest(values[[1, 0, 2]]) != digest(values)


def test_neither_strides_nor_grouping_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_bits(6 * ROW, torch.float32).view(48, -1)
    before = digest(values)
    assert digest(values.t().contiguous().t()) == before
    assert digest(torch.stack([values, values], dim=-1)[..., 1]) == before
    monkeypatch.setitem(ROWS_PER_BLOCK, "cpu", 256)
    assert digest(values) == before


def test_digests_of_several_tensors_are_those_of_each() -> None:
    tensors = {str(size): random_bits(size, torch.float32, size) for size in (0, *SIZES)}
    assert digests(tensors, CPU).tolist() == [digest(tensor) for tensor in tensors.values()]
    assert digests({}, CPU).tolist() == []


@pytest.mark.gpu
def test_digests_of_a_gpu_are_complete_when_the_host_reads_them() -> None:
    """Ranks that share a GPU compare digests over gloo."""
    tensors = {str(size): random_bits(size, torch.float32, size) for size in SIZES}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert digests(on_gpu, CPU).tolist() == digests(tensors, CPU).tolist()


# Engines


def flip_a_bit(tensor: Tensor) -> None:
    words = tensor.detach().view(-1)[:1].view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    words ^= 1


def corrupt(engine: Engine, what: str) -> None:
    """Change the state of this rank alone."""
    name, _, key = what.partition("/")
    if what == "engine/nominal_weight":
        assert engine.nominal_weight is not None
        engine._state.nominal_weight *= 2
    elif name == "module":
        flip_a_bit(dict(engine.module.named_parameters())[key])
    else:
        flip_a_bit(engine.state_dict()[what])


CORRUPTIONS = (
    "model/blocks.1.linear.weight",
    "module/head.weight",
    "optimizer/head.weight/exp_avg",
    "optimizer/head.weight/step",
    "loss_scale/value",
    "engine/counts",
    "engine/nominal_weight",
)


@ranks(2, timeout=110)
def test_each_kind_of_difference_is_named() -> None:
    for what in CORRUPTIONS:
        engine = make_engine(policy="fp16", strategy="ddp")
        train(engine, 2, TWO_RANKS)
        rank_consistency.check(engine)
        if engine.world.rank == 1:
            corrupt(engine, what)
        with pytest.raises(TrainingError, match=rf"^ranks differ: {what} = .* on rank 0; .* on ra"):
            rank_consistency.check(engine)


@ranks(2)
def test_another_tensor_is_a_difference() -> None:
    engine = make_engine(strategy="ddp")
    if engine.world.rank == 1:
        weight = engine.optimizer.param_groups[0]["params"][0]
        engine.optimizer.state[weight]["extra"] = torch.ones(2)
    with pytest.raises(TrainingError, match="extra = nothing on rank 0"):
        rank_consistency.check(engine)


@ranks(2)
def test_equal_ranks_cost_one_collective() -> None:
    engine = make_engine(strategy="ddp")
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        rank_consistency.check(engine)
    assert reduce.call_count == 1


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@ranks(2)
def test_buffers_and_shards_may_differ() -> None:
    model = _WithBuffer()
    engine = make_engine(model=model, strategy="ddp")
    model.seen += engine.world.rank
    rank_consistency.check(engine)
    sharded = make_engine(strategy="fsdp")
    train(sharded, 1, TWO_RANKS)
    rank_consistency.check(sharded)
    if engine.world.rank == 1:
        corrupt(sharded, "engine/counts")
    with pytest.raises(TrainingError, match="engine/counts"):
        rank_consistency.check(sharded)


def test_single_process_compares_nothing() -> None:
    rank_consistency.check(make_engine())


# A full run


def _trainer(directory: str, *arguments: str) -> Trainer:
    base = Path(directory)
    config = load(
        [
            *TINY,
            f"--data.path={base / 'corpus'}",
            f"--run-dir={base / 'run'}",
            "--steps=4",
            *arguments,
        ]
    )
    return Trainer(config, World.current("cpu"), Console(config.log, quiet=True))


def _train(trainer: Trainer) -> None:
    with trainer.active(StopSignals()):
        trainer.train()


def _corrupt_after(trainer: Trainer, step: int) -> None:
    """Change a weight of rank 1 after a step, by more than rounding could undo."""
    original = trainer.engine.step

    def stepped(*args: object, **options: object) -> object:
        outcome = original(*args, **options)  # type: ignore[arg-type]
        if trainer.world.rank == 1 and trainer.progress.step + 1 == step:
            trainer.engine.state_dict()["model/norm.weight"].data[0] += 0.5  # not counted
        return outcome

    trainer.engine.step = stepped  # type: ignore[method-assign, assignment]


class AverageBreaker(Callback):
    """Changes the average of rank 1 after the second step."""

    def __init__(self, run: Trainer) -> None:
        self._run = run

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        if trainer.world.rank == 1 and step.step == 2:
            self._run.states.tensors()["callbacks/Ema/norm.weight"][0] += 0.5


@ranks(2)
def test_buffers_of_a_compiled_model_may_differ() -> None:
    model = nn.Sequential(nn.BatchNorm1d(INPUTS), nn.Linear(INPUTS, CLASSES))
    engine = make_engine(model=torch.compile(model, backend="eager"))
    train(engine, 1, TWO_RANKS[2:])
    model[0].running_mean += dist.get_rank()
    rank_consistency.check(engine)


@ranks(2)
def _train_and_break(directory: str) -> None:
    stopping = _trainer(directory, "--rank-consistency.every=2")
    _corrupt_after(stopping, 3)
    with pytest.raises(TrainingError, match=r"norm\.weight = .* on rank 1"):
        _train(stopping)
    assert stopping.progress.step == 4
    stopping = _trainer(directory, "--rank-consistency.every=3", "--ema.decay=0.5")
    stopping.callbacks.append(AverageBreaker(stopping))
    with pytest.raises(TrainingError, match=r"^ranks differ: ema/norm\.weight = "):
        _train(stopping)
    assert stopping.progress.step == 3
    blind = _trainer(directory)
    _corrupt_after(blind, 1)
    _train(blind)
    with pytest.raises(TrainingError, match="norm"):
        rank_consistency.check(blind.engine)


@pytest.mark.nightly
def test_trainer_compares_ranks_at_the_interval(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    _train_and_break(str(tmp_path))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^rank_consistency.every = -1: use 0 or more steps$"):
        RankConsistencyConfig(every=-1)
