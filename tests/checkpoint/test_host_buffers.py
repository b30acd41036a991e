from __future__ import annotations

import gc
import logging
import mmap
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from distmp.checkpoint import host_buffers, store
from distmp.checkpoint.host_buffers import (
    HostBuffers,
    _clear,
    _page_aligned,
    _pinned,
    _register,
    _Spec,
)
from distmp.checkpoint.settings import CheckpointConfig
from distmp.checkpoint.snapshot import HostParts, Snapshot, expect
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.world import World
from distmp.utils.flat_shard import FlatShard
from tests.checkpoint.test_snapshot import complete
from tests.checkpoint.test_writer import make_writer
from tests.recording import no_waiting


class Driver:
    """Replaces the pinning of memory; it blocks until the test sets `may_pin`.

    Attributes:
        may_pin: Set to let pinning continue.
        is_pinning: Set while memory is being pinned.
        pinned: Number of buffers pinned now.
        calls: Number of buffers pinned so far.
        error: Raised instead of pinning.
    """

    def __init__(self) -> None:
        self.may_pin = threading.Event()
        self.is_pinning = threading.Event()
        self.pinned = self.calls = 0
        self.error: Exception | None = None

    def register(self, tensor: Tensor) -> Tensor:
        assert threading.current_thread() is not threading.main_thread(), (
            "pinning in the training thread"
        )
        self.is_pinning.set()
        self.may_pin.wait()
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
    monkeypatch.setattr(host_buffers, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(host_buffers, "PINNED_IN_PLACE_BYTES", 1)
    monkeypatch.setattr(host_buffers, "_register", driver.register)
    return driver


def values(step: int) -> dict[str, Tensor]:
    return {f"weight {n}": torch.full((3, 5), float(10 * step + n)) for n in range(4)}


def take(tensors: dict[str, Tensor], buffers: HostBuffers) -> dict[str, Tensor]:
    return complete(Snapshot(tensors, set(tensors), buffers))


def pin(tensors: dict[str, Tensor], buffers: HostBuffers) -> None:
    """Pin memory for the tensors, and wait for it."""
    expect(tensors, buffers)
    buffers.start_pinning()
    wait(buffers)


def wait(buffers: HostBuffers) -> None:
    assert buffers._thread is not None
    buffers._thread.join()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def loaded(path: Path) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
    store.load(path, found)
    return found


def test_training_does_not_wait_for_pinning(driver: Driver, tmp_path: Path) -> None:
    live = values(1)
    with make_writer(tmp_path, keep=9) as saving:
        saving.prepare(live)
        driver.is_pinning.wait()
        saving.save(1, live, {}, set(live))
        saving.release()  # the update may change the weights now
        for name, tensor in values(2).items():
            live[name].copy_(tensor)
        saving.finish()
        assert driver.pinned == 0
        driver.may_pin.set()
        # The buffer that was being pinned is used; the others are pinned after the next save.
        wait(saving._buffers)
        assert driver.calls == 1
        saving.save(2, live, {}, set(live))
        saving.release()
        assert saving._pending is not None
        saving._pending.thread.join()
        saving.is_due(2)
        wait(saving._buffers)
        assert driver.pinned == driver.calls == 4
        assert all(saving._buffers.like(name, 0, live[name]).pinned for name in live)
        saving.save(3, live, {}, set(live))
    assert driver.calls == 4, "memory that is pinned is used again"
    for step in (1, 2):
        assert_equal(loaded(tmp_path / f"step-{step:06d}"), values(step))
    assert_equal(loaded(tmp_path / "step-000003"), values(2))
    gc.collect()
    assert driver.pinned == 0


def test_memory_is_pinned_before_the_first_save(driver: Driver) -> None:
    driver.may_pin.set()
    live, buffers = values(1), HostBuffers()
    pin(live, buffers)
    memory = {name: buffers.like(name, 0, live[name]) for name in live}
    assert all(buffer.pinned for buffer in memory.values())
    found = take(live, buffers)
    assert_equal(found, values(1))
    assert all(found[name] is memory[name].tensor for name in live)
    buffers.start_pinning()
    assert driver.calls == 4, "all memory is pinned already"


def test_a_rank_pins_memory_only_for_what_it_writes(driver: Driver, tmp_path: Path) -> None:
    driver.may_pin.set()
    pinned: list[set[str]] = []
    for rank in (0, 1):
        world = World(rank, 2, torch.device("cpu"), None)
        saving = CheckpointWriter(
            CheckpointConfig(), tmp_path, world, timeout_seconds=60, log=[].append
        )
        saving.prepare(values(1))
        wait(saving._buffers)
        pinned.append({name for name, _ in saving._buffers._to_pin})
        saving._buffers.close(timeout=None)
    assert pinned[0] | pinned[1] == values(1).keys()
    assert not pinned[0] & pinned[1]


def test_pinned_memory_replaces_what_a_save_used(driver: Driver) -> None:
    driver.may_pin.set()
    live, buffers = values(1), HostBuffers()
    used = [weakref.ref(tensor) for tensor in take(live, buffers).values()]
    buffers.start_pinning()
    gc.collect()
    assert not any(tensor() is not None for tensor in used), "twice the memory"
    wait(buffers)
    assert_equal(take(live, buffers), values(1))
    assert all(buffers.like(name, 0, live[name]).pinned for name in live)


def test_a_tensor_of_another_size_gets_memory_that_is_pinned_later(driver: Driver) -> None:
    driver.may_pin.set()
    live, buffers = values(1), HostBuffers()
    pin(live, buffers)
    live["weight 0"] = torch.arange(7, dtype=torch.float64)
    live["weight 9"] = torch.ones(2)
    assert torch.equal(take(live, buffers)["weight 0"], torch.arange(7, dtype=torch.float64))
    gc.collect()
    assert driver.pinned == 3, "the memory of the former size is released"
    pinned = {name: buffers.like(name, 0, live[name]).pinned for name in live}
    assert [name for name in live if not pinned[name]] == ["weight 0", "weight 9"]
    pin(live, buffers)
    assert all(buffers.like(name, 0, live[name]).pinned for name in live)
    assert_equal(take(live, buffers), live)


def test_a_tensor_of_another_dtype_is_not_converted() -> None:
    buffers = HostBuffers()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        live = {"weight": torch.full((3,), 1 + 2**-7, dtype=dtype)}
        found = take(live, buffers)
        assert found["weight"].dtype == dtype
        assert_equal(found, live)


def test_a_size_may_change_during_pinning(driver: Driver) -> None:
    buffers = HostBuffers()
    expect({"weight": torch.ones(3)}, buffers)
    buffers.start_pinning()
    driver.is_pinning.wait()
    live = {"weight": torch.ones(5)}
    assert_equal(take(live, buffers), live)
    driver.may_pin.set()
    buffers.start_pinning()  # the second thread waits for the first
    wait(buffers)
    assert buffers.like("weight", 0, live["weight"]).pinned
    gc.collect()
    assert driver.pinned == 1


def test_two_pinning_threads_share_the_work(driver: Driver) -> None:
    buffers = HostBuffers()
    expect({"first": torch.ones(3), "second": torch.ones(3)}, buffers)
    buffers.start_pinning()
    driver.is_pinning.wait()
    live = {"first": torch.ones(3), "second": torch.ones(5)}
    expect(live, buffers)
    buffers.start_pinning()
    assert buffers._thread is not None
    buffers._thread.join(0.05)  # time to pin memory without waiting for the first thread
    driver.may_pin.set()
    wait(buffers)
    assert all(buffers.like(name, 0, live[name]).pinned for name in live)
    assert driver.calls == 2


def test_every_part_of_a_tensor_is_pinned(driver: Driver) -> None:
    driver.may_pin.set()
    # The end of a row and the start of the next one.
    shard = FlatShard.of(torch.arange(6.0), torch.Size([4, 6]), 3)
    buffers = HostBuffers()
    pin({"shard": shard}, buffers)
    copied = take({"shard": shard}, buffers)["shard"]
    assert isinstance(copied, HostParts)
    assert torch.equal(torch.cat([part.flatten() for part in copied.parts]), torch.arange(6.0))
    assert driver.calls == driver.pinned == 2


def _no_lock(driver: Driver, _: pytest.MonkeyPatch) -> None:
    driver.error = RuntimeError("CUDA error: out of memory")


def _no_memory(_: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "free_host_bytes", lambda: 2**30 + 59)


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (_no_lock, "RuntimeError: CUDA error: out of memory"),
        (_no_memory, "MemoryError: 60 B needed, 1.0 GiB free"),
    ],
)
def test_memory_that_cannot_be_pinned_is_reported_once(
    fail: Callable[[Driver, pytest.MonkeyPatch], None],
    cause: str,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail(driver, monkeypatch)
    driver.may_pin.set()
    live, buffers = values(1), HostBuffers()
    with caplog.at_level(logging.WARNING, logger="distmp"):
        for _ in range(3):
            expect(live, buffers)
            buffers.start_pinning()
            wait(buffers)
            found = take(live, buffers)
            assert_equal(found, values(1))
    assert caplog.messages == [
        "host memory for checkpoints of cpu is not pinned, so the update after each save waits "
        f"longer for its copy ({cause}); free host memory, or set checkpoint.asynchronous to false"
    ]
    assert driver.calls <= 1
    assert all(buffers.like(name, 0, live[name]).tensor is found[name] for name in live)


@pytest.mark.parametrize("in_time", [True, False])
def test_nothing_stays_pinned_after_the_end(
    in_time: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = HostBuffers()
    expect(values(1), buffers)
    buffers.start_pinning()
    driver.is_pinning.wait()
    if in_time:
        # The driver returns while `close` waits for the thread.
        join = threading.Thread.join
        monkeypatch.setattr(
            threading.Thread, "join", lambda *args: driver.may_pin.set() or join(*args)
        )
        buffers.close(timeout=None)
        monkeypatch.undo()
    else:
        buffers.close(timeout=0.0)
        driver.may_pin.set()
        wait(buffers)
    assert buffers._thread is not None
    assert not buffers._thread.is_alive()
    assert driver.calls == 1, "the other buffers are not pinned"
    gc.collect()
    assert driver.pinned == 0


def test_pinning_ends_between_two_pieces(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.may_pin.set()
    monkeypatch.setattr(host_buffers, "PIECE_BYTES", 16)
    stop = threading.Event()
    tensor = torch.ones(10, dtype=torch.int32)
    assert _clear(tensor, stop)
    assert not tensor.any()
    stop.set()
    assert not _clear(tensor.fill_(1), stop)
    assert tensor.all()
    assert _pinned(_Spec.of(tensor), stop) is None
    assert driver.calls == 0


def test_random_saves_during_pinning(driver: Driver) -> None:
    """Every snapshot has the values of its step, no matter how much memory is pinned."""
    driver.may_pin.set()
    generator = random.Random(0)
    buffers = HostBuffers()
    for step in range(300):
        live = {
            f"weight {n}": torch.full((generator.choice([5, 70_000]),), float(step + n))
            for n in range(3)
        }
        if generator.random() < 0.3:
            expect(live, buffers)
        if generator.random() < 0.5:
            buffers.start_pinning()
        if generator.random() < 0.5:
            buffers.stop_pinning()
        assert_equal(take(live, buffers), live)
    buffers.close(timeout=None)
    del live
    gc.collect()
    assert driver.calls > 10
    assert driver.pinned == 0


def test_pinning_gives_way_to_training_and_to_the_end(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[threading.Thread] = []
    monkeypatch.setattr(
        host_buffers, "lower_priority", lambda: lowered.append(threading.current_thread())
    )
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    driver.may_pin.set()
    buffers = HostBuffers()
    expect(values(1), buffers)
    buffers._device = torch.device("cuda", 1)
    buffers.start_pinning()
    wait(buffers)
    assert devices == [torch.device("cuda", 1)], "a new thread uses the first device"
    assert lowered == [buffers._thread]
    assert lowered[0].daemon, "a driver call that hangs would keep a failed rank alive"


def test_memory_of_the_host_is_not_pinned() -> None:
    live, buffers = values(1), HostBuffers()
    expect(live, buffers)
    buffers.start_pinning()
    assert buffers._thread is None
    assert_equal(take(live, buffers), live)
    buffers.close(timeout=None)


def test_training_continues_if_no_thread_can_be_started(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    live, buffers = values(1), HostBuffers()
    expect(live, buffers)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        buffers.start_pinning()
    assert "is not pinned" in caplog.text
    assert "can't start new thread" in caplog.text
    assert_equal(take(live, buffers), live)
    buffers.close(timeout=None)
    assert driver.calls == 0


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
def test_memory_to_be_pinned_is_page_aligned(dtype: torch.dtype) -> None:
    source = torch.arange(701 * 3).view(701, 3).to(dtype)
    spec = _Spec.of(source)
    assert spec.nbytes == source.nbytes
    found = _page_aligned(spec)
    assert found.data_ptr() % mmap.PAGESIZE == 0
    # DCP copies a tensor that is a view of a larger storage.
    assert found.untyped_storage().nbytes() == source.nbytes
    assert torch.equal(found.copy_(source), source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_for_copies_from_a_gpu_is_pinned_while_it_lives() -> None:
    for elements in (100, 3 << 18):
        source = {"x": torch.arange(elements, device="cuda")}
        for _ in range(3):  # pinned again at the same address
            buffers = HostBuffers()
            assert_equal(take(source, buffers), {"x": source["x"].cpu()})
            assert not buffers.like("x", 0, source["x"]).pinned
            pin(source, buffers)
            buffer = buffers.like("x", 0, source["x"])
            assert buffer.pinned
            assert buffer.tensor.is_pinned()
            assert_equal(take(source, buffers), {"x": source["x"].cpu()})
            buffers.close(timeout=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_gpu_is_that_of_its_step() -> None:
    """Tensors are written right before and after it, and the host does not wait for them."""
    held, other = torch.zeros(300, device="cuda"), torch.zeros(20, device="cuda")
    live, buffers = {"held": held, "other": other}, HostBuffers()
    pin(live, buffers)
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
    buffers.close(timeout=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_to_memory_that_is_not_pinned_waits_for_the_stream_that_trains() -> None:
    weight, buffers = torch.zeros(300, device="cuda"), HostBuffers()
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
    buffers.close(timeout=None)
