from __future__ import annotations

import gc
import logging
import mmap
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from distmp.checkpoint import snapshot
from distmp.checkpoint.snapshot import (
    HostBuffers,
    HostParts,
    Snapshot,
    _pinned,
    _register,
)
from distmp.utils.flat_shard import FlatShard
from tests.checkpoint.test_snapshot import complete
from tests.recording import no_waiting


class Driver:
    """Replaces the pinning of memory.

    Attributes:
        pinned: Number of buffers pinned now.
        calls: Number of buffers pinned so far.
        error: Raised instead of pinning.
    """

    def __init__(self) -> None:
        self.pinned = self.calls = 0
        self.error: Exception | None = None

    def register(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.pinned += 1
        weakref.finalize(tensor, self.unregister).atexit = False
        return tensor

    def unregister(self) -> None:
        self.pinned -= 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Treat all tensors as GPU tensors, and pin tensors of any size with the fake driver."""
    driver = Driver()
    monkeypatch.setattr(snapshot, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(snapshot, "PINNED_IN_PLACE_BYTES", 1)
    monkeypatch.setattr(snapshot, "_register", driver.register)
    return driver


def values(step: int) -> dict[str, Tensor]:
    return {f"weight {n}": torch.full((3, 5), float(10 * step + n)) for n in range(4)}


def take(tensors: dict[str, Tensor], buffers: HostBuffers) -> dict[str, Tensor]:
    return complete(Snapshot(tensors, set(tensors), buffers))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_memory_is_pinned_once(driver: Driver) -> None:
    live, buffers = values(1), HostBuffers()
    take(live, buffers)
    memory = {name: buffers.like(name, 0, live[name]) for name in live}
    assert all(buffer.pinned for buffer in memory.values())
    found = take(live, buffers)
    assert_equal(found, values(1))
    assert all(found[name] is memory[name].tensor for name in live)
    assert driver.calls == 4, "all memory is pinned already"
    del found, memory
    buffers.clear()
    gc.collect()
    assert driver.pinned == 0


def test_tensor_of_other_size_gets_new_memory(driver: Driver) -> None:
    live, buffers = values(1), HostBuffers()
    take(live, buffers)
    live["weight 0"] = torch.arange(7, dtype=torch.float64)
    live["weight 9"] = torch.ones(2)
    assert_equal(take(live, buffers), live)
    gc.collect()
    assert driver.pinned == 5, "the memory of the former size is released"


def test_tensor_of_other_dtype_is_not_converted() -> None:
    buffers = HostBuffers()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        live = {"weight": torch.full((3,), 1 + 2**-7, dtype=dtype)}
        found = take(live, buffers)
        assert found["weight"].dtype == dtype
        assert_equal(found, live)


def test_every_part_of_tensor_is_pinned(driver: Driver) -> None:
    # The end of a row and the start of the next one.
    shard = FlatShard.of(torch.arange(6.0), torch.Size([4, 6]), 3)
    copied = take({"shard": shard}, HostBuffers())["shard"]
    assert isinstance(copied, HostParts)
    assert torch.equal(torch.cat([part.flatten() for part in copied.parts]), torch.arange(6.0))
    assert driver.calls == driver.pinned == 2


def _no_lock(driver: Driver, _: pytest.MonkeyPatch) -> None:
    driver.error = RuntimeError("CUDA error: out of memory")


def _no_memory(_: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "free_host_bytes", lambda: 2**30 + 59)


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (_no_lock, "RuntimeError: CUDA error: out of memory"),
        (_no_memory, "MemoryError: 60 B needed, 1.0 GiB free"),
    ],
)
def test_failed_pinning_is_reported_once(
    fail: Callable[[Driver, pytest.MonkeyPatch], None],
    cause: str,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail(driver, monkeypatch)
    live, buffers = values(1), HostBuffers()
    with caplog.at_level(logging.WARNING, logger="distmp"):
        for _ in range(3):
            found = take(live, buffers)
            assert_equal(found, values(1))
    assert caplog.messages == [
        "host memory for checkpoints of cpu is not pinned, so the update after each save waits "
        f"longer for its copy ({cause}); free host memory, or set checkpoint.asynchronous to false"
    ]
    assert driver.calls <= 1
    assert all(buffers.like(name, 0, live[name]).tensor is found[name] for name in live)


def test_memory_for_host_tensors_is_not_pinned() -> None:
    live, buffers = values(1), HostBuffers()
    take(live, buffers)
    assert not any(buffers.like(name, 0, live[name]).pinned for name in live)
    assert_equal(take(live, buffers), live)


def test_memory_is_registered_until_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *arguments: calls.append(arguments) or 7,
        cudaHostUnregister=calls.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: calls.append(f"error {code}"))
    tensor = torch.ones(5)
    address = tensor.data_ptr()
    expected: list[object] = [(address, 20, 1), "error 7"]
    assert _register(tensor) is tensor
    assert calls == expected
    del tensor
    gc.collect()
    assert calls == [*expected, address]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_memory_to_be_pinned_is_page_aligned(driver: Driver, dtype: torch.dtype) -> None:
    source = torch.arange(701 * 3).view(701, 3).to(dtype)
    found = _pinned(source.shape, source.dtype)
    assert found.data_ptr() % mmap.PAGESIZE == 0
    # DCP copies a tensor that is a view of a larger storage.
    assert found.untyped_storage().nbytes() == source.nbytes
    assert torch.equal(found.copy_(source), source)


@pytest.mark.gpu
def test_memory_for_gpu_copies_stays_pinned() -> None:
    for elements in (100, 3 << 18):
        source = {"x": torch.arange(elements, device="cuda")}
        for _ in range(3):  # pinned again at the same address
            buffers = HostBuffers()
            assert_equal(take(source, buffers), {"x": source["x"].cpu()})
            buffer = buffers.like("x", 0, source["x"])
            assert buffer.pinned
            assert buffer.tensor.is_pinned()


@pytest.mark.gpu
def test_gpu_snapshot_holds_state_of_its_step() -> None:
    """Tensors are written right before and after it, and the host does not wait for them."""
    held, other = torch.zeros(300, device="cuda"), torch.zeros(20, device="cuda")
    live, buffers = {"held": held, "other": other}, HostBuffers()
    take(live, buffers)  # pins the memory
    for step in range(1, 4):
        held += 1
        other += 10
        with no_waiting():
            snapshot = Snapshot(live, {"held"}, buffers)
            other.mul_(1)  # may change before the next update
            other += 1
            snapshot.release()
            held *= 1
            held += 100
        found = snapshot.complete()
        assert torch.equal(found["held"], torch.full((300,), 101.0 * step - 100))
        assert torch.equal(found["other"], torch.full((20,), 11.0 * step - 1))


@pytest.mark.gpu
def test_copy_to_unpinned_memory_waits_for_training_stream() -> None:
    weight, buffers = torch.zeros(300, device="cuda"), HostBuffers()
    buffers._has_failed = True
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(1, 4):
            weight += 1
            found = take({"weight": weight}, buffers)
            assert torch.equal(found["weight"], torch.full((300,), float(step)))
        with no_waiting():
            snapshot = Snapshot({"weight": weight}, {"weight"}, buffers)
        complete(snapshot)
    assert not buffers.like("weight", 0, weight).pinned
