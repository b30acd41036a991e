from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.engine.engine import Engine
from distmp.parallel import module_buffers
from distmp.parallel.module_buffers import ModuleBuffers
from tests.ranks import from_all_ranks, ranks
from tests.recording import no_waiting
from tests.reference import (
    CLASSES,
    INPUTS,
    Batch,
    assert_same_bits,
    fused_adamw,
    loss,
    sgd,
    weights,
)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batch(step: int, rank: int, factor: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(6, INPUTS, generator=generator) * (1 + rank)
    return Batch(inputs, torch.randint(CLASSES, (6,), generator=generator), factor)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


@ranks(2)
def test_batch_statistics_are_those_of_ddp() -> None:
    rank = dist.get_rank()
    for strategy in ("ddp", "fsdp"):
        model = Normalised()
        ddp = DistributedDataParallel(copy.deepcopy(model))
        optimizer = sgd(ddp.parameters())
        engine = Engine(model, loss, sgd, policy="fp32", strategy=strategy, device="cpu")
        for step in range(4):
            optimizer.zero_grad()
            total, weight = loss(ddp, batch(step, rank))
            (total / weight).backward()
            optimizer.step()
            engine.step([batch(step, rank)])
        if rank == 0:  # DDP broadcasts to the others in its next forward
            for name, value in statistics(ddp.module).items():
                torch.testing.assert_close(dict(model.named_buffers())[name], value)
        everyone = from_all_ranks(statistics(model))
        assert_same_bits(everyone[0], everyone[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_skipped_step_changes_no_state(value: float) -> None:
    model = Normalised()
    engine = Engine(model, loss, fused_adamw, policy="fp32", device="cpu")
    engine.step([batch(0, 0)])
    before = statistics(model)
    bad = batch(1, 0)
    bad.inputs[0, 0] = value
    assert engine.step([batch(2, 0), bad]).numbers.skipped
    assert_same_bits(statistics(model), before)
    assert not engine.step([batch(3, 0)]).numbers.skipped
    assert statistics(model)["layers.1.num_batches_tracked"] == 2


def test_failed_step_does_not_change_buffers() -> None:
    model = Normalised()
    engine = Engine(model, loss, fused_adamw, policy="fp32", device="cpu")
    twin_model = Normalised()
    twin = Engine(twin_model, loss, fused_adamw, policy="fp32", device="cpu")
    for one in (engine, twin):
        one.step([batch(0, 0)])
    with pytest.raises(AttributeError):
        engine.step([batch(1, 0), None])
    for one in (engine, twin):
        one.step([batch(2, 0)])
    assert_same_bits(statistics(model), statistics(twin_model))
    assert_same_bits(weights(engine), weights(twin))


def test_buffers_that_are_replaced_or_come_later() -> None:
    model = Normalised()
    buffers = ModuleBuffers(model, None)
    buffers.begin_step()
    model.mask = torch.zeros(8, dtype=torch.bool)
    model.register_buffer("new", torch.ones(3))
    buffers.end_step(torch.tensor(1.0))
    assert model.mask.all()
    assert model.new.tolist() == [1, 1, 1]


class Streaming(nn.Module):
    """Holds a part of its last inputs in two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("last", torch.zeros(6, 2))
        self.register_buffer("same", self.last)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.last.mean()
        self.last = self.same = x[:, -2:]
        return self.linear(x) + shift


@ranks(2)
def test_buffers_that_forward_takes_from_its_inputs_do_not_overwrite_them() -> None:
    model = Streaming()
    engine = Engine(model, loss, sgd, policy="fp32", strategy="ddp", device="cpu")
    # The second step is skipped.
    batches = [batch(step, dist.get_rank(), torch.nan if step == 1 else 1.0) for step in range(3)]
    before = copy.deepcopy(batches)
    for each in batches:
        engine.step([each])
    assert_same_bits(*({"x": torch.cat([b.inputs for b in part])} for part in (batches, before)))
    assert torch.equal(model.last, batch(2, 0).inputs[:, -2:])
    assert model.last is model.same


def test_an_evaluation_leaves_no_buffer_in_its_inputs() -> None:
    model, inputs = Streaming(), batch(0, 0)
    engine = Engine(model, loss, sgd, policy="fp32", device="cpu")
    before = inputs.inputs.clone()
    engine.evaluate([inputs])
    model.last.zero_()
    assert torch.equal(inputs.inputs, before)


def test_a_buffer_that_is_assigned_between_steps_keeps_its_memory() -> None:
    model = Normalised()
    engine = Engine(model, loss, sgd, policy="fp32", device="cpu")
    mask = torch.zeros_like(model.mask)
    model.mask = mask
    engine.step([batch(0, 0)])
    assert model.mask is mask


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class EveryKind(nn.Module):
    """Has buffers of many dtypes and layouts; their values depend on `seed`."""

    def __init__(self, seed: int, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"{name}_scalar", self.values((), dtype))
            self.register_buffer(f"{name}_matrix", self.values((3, 4), dtype))
            self.register_buffer(f"{name}_transposed", self.values((4, 3), dtype).t())
            self.register_buffer(f"{name}_empty", self.values((0, 5), dtype))
        self.register_buffer("special", torch.tensor([-0.0, torch.nan, torch.inf, 1.0]))
        self.register_buffer("shared", self.float32_matrix)
        self.register_buffer("first_rows", self.float32_matrix[:2])
        self.register_buffer("last_rows", self.float32_matrix[1:])

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = torch.randint(0, 9, shape, generator=self.generator) / 4
        return (values > 1) if dtype == torch.bool else values.to(dtype)

    @torch.no_grad()
    def forward(self) -> None:
        for name in [*self._buffers]:
            buffer = self.get_buffer(name)
            buffer.copy_(self.values(tuple(buffer.shape), buffer.dtype))
        self.special.fill_(torch.nan)


def bits(module: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size, Any]]:
    return {
        name: (value.dtype, value.shape, value.cpu().reshape(-1).view(torch.uint8).tolist())
        for name, value in module.named_buffers(remove_duplicate=False)
    }


def check_every_kind(
    dtypes: Sequence[torch.dtype] = (*DTYPES, *WIDE_UNSIGNED), device: str = "cpu"
) -> None:
    """Take an applied, a skipped and an interrupted step with buffers of every kind."""
    group, rank = (dist.group.WORLD, dist.get_rank()) if dist.is_initialized() else (None, 0)
    model, first_rank = (EveryKind(seed, dtypes).to(device) for seed in (rank, 0))
    storages = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    buffers = ModuleBuffers(model, group)
    for skipped in (0.0, 1.0):
        buffers.begin_step()
        before = bits(model)
        model()
        after = bits(model)
        assert before != after
        buffers.end_step(torch.tensor(skipped, device=device))
        first_rank()
        if not skipped:  # then all ranks have the buffers of rank 0
            assert bits(model) == bits(first_rank)
            assert rank or bits(model) == after
        else:
            assert bits(model) == before
    buffers.begin_step()
    model()
    buffers.end_failed_step()
    assert bits(model) == before
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == storages


@pytest.mark.parametrize("batch_bytes", [1, 100, module_buffers.BATCH_BYTES])
def test_every_kind_of_buffer_is_reverted_to_the_bit(
    batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_buffers, "BATCH_BYTES", batch_bytes)
    check_every_kind()


@pytest.mark.gpu
def test_every_kind_of_buffer_is_reverted_on_a_gpu() -> None:
    check_every_kind(DTYPES, device="cuda")


@ranks(2)
def test_ranks_get_every_kind_of_buffer() -> None:
    for batch_bytes in (100, module_buffers.BATCH_BYTES):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(module_buffers, "BATCH_BYTES", batch_bytes)
            check_every_kind()


class Launches(TorchDispatchMode):
    """Counts operations that are not views: on a GPU each launches one kernel or a few."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(number: int) -> int:
    """Return the launches of a step with this number of buffers of each kind."""
    model = nn.Module()
    for n in range(number):
        model.register_buffer(f"mean_{n}", torch.ones(8))
        model.register_buffer(f"scale_{n}", torch.ones((), dtype=torch.bfloat16))
        model.register_buffer(f"count_{n}", torch.zeros((), dtype=torch.int64))
        model.register_buffer(f"mask_{n}", torch.zeros(4, 2, dtype=torch.bool))
    buffers = ModuleBuffers(model, dist.group.WORLD)
    with Launches() as found:
        for _ in range(2):  # the second reverts the first
            buffers.begin_step()
        buffers.end_step(torch.zeros(()))
    return found.count


@ranks(2)
def test_launches_do_not_grow_with_the_number_of_buffers() -> None:
    assert launches(50) == launches(2)


def test_batches_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_buffers, "BATCH_BYTES", 100)
    module = nn.Module()
    for index, elements in enumerate((10, 10, 10, 60, 5)):
        module.register_buffer(f"b{index}", torch.ones(elements))
    batches = [
        sum(buffer.nbytes for buffer in batch.values()) for batch in module_buffers._grouped(module)
    ]
    assert batches == [80, 40, 240, 20]


def test_a_step_that_is_not_skipped_keeps_the_bits_of_another_dtype() -> None:
    module = nn.Module()
    module.register_buffer("count", torch.zeros(3))
    buffers = ModuleBuffers(module, None)
    buffers.begin_step()
    module.count = torch.full((3,), 2**53 + 1)
    buffers.end_step(torch.tensor(0.0))
    assert module.count.tolist() == [2**53 + 1] * 3


def test_a_buffer_replaced_by_another_dtype_or_shape() -> None:
    model = nn.Module()
    model.register_buffer("count", torch.tensor([2**53 + 1]))
    model.register_buffer("scale", torch.tensor([0.5]))
    model.register_buffer("filled", torch.empty(0))
    buffers = ModuleBuffers(model, None)
    buffers.begin_step()
    model.scale = torch.tensor([3.0], dtype=torch.float16)
    model.filled = torch.ones(3)
    buffers.end_step(torch.ones(()))
    assert model.count.item() == 2**53 + 1
    assert (model.scale.dtype, model.scale.item()) == (torch.float16, 0.5)
    assert model.filled.tolist() == [1, 1, 1]
    for skipped in (0.0, 1.0):
        buffers.begin_step()
        model.filled = torch.arange(len(model.filled) + 1.0)
        model.count += 1
        buffers.end_step(torch.tensor(skipped))
    assert model.filled.tolist() == [0, 1, 2, 3, 4]
    buffers.begin_step()
    model.filled = torch.ones(1).expand(3)  # cannot be written to
    buffers.end_step(torch.ones(()))
    assert model.filled.tolist() == [1, 1, 1]
    assert model.count.item() == 2**53 + 2


@pytest.mark.gpu
def test_a_gpu_reverts_a_skipped_step_without_waiting() -> None:
    model = Normalised().cuda()
    buffers = ModuleBuffers(model, None)
    inputs, skipped = torch.randn(6, INPUTS, device="cuda"), torch.zeros(2, device="cuda")
    skipped[1] = 1
    after = []
    with no_waiting():
        for skip in skipped:
            buffers.begin_step()
            model(inputs)
            buffers.end_step(skip)
            after.append(statistics(model))
    assert after[0]["layers.1.num_batches_tracked"] == 1
    assert_same_bits(after[0], after[1])


@pytest.mark.gpu
@ranks(2, cuda=True)
def test_gpus_have_the_batch_statistics_of_rank_0() -> None:
    expected, model = Normalised(), Normalised().cuda()
    buffers = ModuleBuffers(model, dist.group.WORLD)
    for step in range(3):
        buffers.begin_step()
        expected(batch(step, 0).inputs)
        model(batch(step, dist.get_rank()).inputs.cuda())
        buffers.end_step(torch.zeros((), device="cuda"))
        torch.full((100,), 7.0, device="cuda")  # in memory that the step has freed
    for name, value in statistics(model).items():
        torch.testing.assert_close(value.cpu(), dict(expected.named_buffers())[name])
