from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distmp.checkpoint import saving
from distmp.checkpoint import snapshot as snapshot_module
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.snapshot import HostBuffers, HostParts, Snapshot, _Copy, written_here
from distmp.errors import CheckpointError
from distmp.utils.flat_shard import FlatShard
from tests.checkpoint.test_saving import assert_all_equal, plain_tensors
from tests.ranks import from_all_ranks, ranks

NO_MEMORY = r"could not be copied to host memory \(MemoryError: not"


def uneven(rank: int, whole: Tensor) -> FlatShard:
    """Return the shard of a tensor on rank 0 (a few elements) or rank 1 (the others)."""
    cut = whole.numel() // 3
    part = slice(0, cut) if rank == 0 else slice(cut, whole.numel())
    return FlatShard.of(whole.flatten()[part].clone(), whole.shape, part.start)


def every_kind(rank: int) -> dict[str, Tensor]:
    """Tensors of every kind and sharding, on two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    found = plain_tensors()
    for name in ("layer.weight", "layer.half"):
        for placement in (Shard(0), Shard(1), Replicate()):
            found[f"{name} {placement}"] = distribute_tensor(found[name].clone(), mesh, [placement])
        found[f"{name} slice"] = uneven(rank, found[name])
    found["short"] = distribute_tensor(torch.randn(1, 3), mesh, [Shard(0)])  # rank 1 has no row
    return found


def expected() -> dict[str, Tensor]:
    values = plain_tensors()
    for name in ("layer.weight", "layer.half"):
        for kind in (Shard(0), Shard(1), Replicate(), "slice"):
            values[f"{name} {kind}"] = values[name]
    return values


def complete(snapshot: Snapshot) -> dict[str, Tensor]:
    snapshot_of: list[Any] = []

    def work() -> None:
        try:
            snapshot_of.append(snapshot.complete())
        except CheckpointError as error:
            snapshot_of.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    snapshot.release()
    thread.join()
    if isinstance(snapshot_of[0], CheckpointError):
        raise snapshot_of[0]
    return snapshot_of[0]


@pytest.mark.parametrize("held", [False, True])
@ranks(2)
def test_snapshot_saves_every_kind_of_tensor_unchanged(held: bool, tmp_path: Path) -> None:
    rank = dist.get_rank()
    live = every_kind(rank)
    short = live["short"].full_tensor()  # type: ignore[attr-defined]
    buffers = HostBuffers()
    for step in (1, 2):  # the second time into the buffers of the first
        written = written_here(live, rank, 2)
        snapshot = Snapshot(written, set(live) if held else (), buffers)
        copied = complete(snapshot)
        with torch.no_grad():
            for tensor in live.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        path = saving.save(tmp_path, step, copied, {}, keep=2)
        found = {name: torch.zeros_like(tensor) for name, tensor in expected().items()}
        found["short"] = torch.zeros(1, 3)
        assert StoredCheckpoint(path).load(found) == []
        assert_all_equal(found, {**expected(), "short": short})
        fresh = every_kind(rank)
        with torch.no_grad():
            for name, tensor in live.items():
                if name == "short":
                    tensor.copy_(distribute_tensor(short, tensor.device_mesh, [Shard(0)]))  # type: ignore[attr-defined]
                else:
                    tensor.copy_(fresh[name])


@ranks(2)
def test_snapshot_memory_is_rank_share_and_is_reused() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    live: dict[str, Tensor] = {f"plain {n}": torch.randn(1000) for n in range(6)}
    live["sharded"] = distribute_tensor(torch.randn(200, 10), mesh, [Shard(0)])
    live["slice"] = FlatShard.of(torch.randn(1000), torch.Size([2000]), 1000 * rank)
    buffers = HostBuffers()
    copied = complete(Snapshot(written_here(live, rank, 2), set(live), buffers))
    for tensor in copied.values():
        for part in tensor.parts if isinstance(tensor, HostParts) else [tensor]:
            # DCP copies other tensors, and keeps the copies until a file is written.
            assert part.untyped_storage().nbytes() == part.nbytes
    # Half of everything.
    assert sum(buffer.tensor.nbytes for buffer in buffers._buffers.values()) == 4 * (
        3 * 1000 + 1000 + 1000
    )
    before = {id(buffer) for buffer in buffers._buffers.values()}
    complete(Snapshot(written_here(live, rank, 2), set(live), buffers))
    assert {id(buffer) for buffer in buffers._buffers.values()} == before


@ranks(4)
def test_ranks_write_their_shares_once() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    live: dict[str, Tensor] = {f"plain {n}": torch.zeros(100 + n) for n in range(8)}
    for n in range(4):
        whole = torch.zeros(10, 7)
        live[f"hybrid {n}"] = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        live[f"copied {n}"] = distribute_tensor(whole, mesh, [Replicate(), Replicate()])
    written = written_here(live, rank, 4)
    elements = sum(
        (t.to_local() if isinstance(t, DTensor) else t).numel() for t in written.values()
    )
    everybody = from_all_ranks(([*written], elements))
    times = {name: sum(name in names for names, _ in everybody) for name in live}
    # Two ranks have different halves of a hybrid tensor.
    assert times == {name: 2 if name.startswith("hybrid") else 1 for name in live}
    counts = [count for _, count in everybody]
    assert sum(counts) == sum(100 + n for n in range(8)) + 8 * 70
    assert max(counts) <= sum(counts) / 4 + 110


def test_release_returns_after_copying_held_tensors() -> None:
    live = {"weight": torch.zeros(10), "buffer": torch.zeros(10)}
    snapshot = Snapshot(live, {"weight"}, HostBuffers())
    live["buffer"].fill_(1)  # not held: copied already
    found: list[dict[str, Tensor]] = []
    worker = threading.Timer(0.05, lambda: found.append(snapshot.complete()))
    worker.start()
    snapshot.release()
    live["weight"].fill_(1)
    worker.join()
    assert {name: tensor.sum().item() for name, tensor in found[0].items()} == {
        "weight": 0,
        "buffer": 0,
    }


def test_changed_held_tensor_fails_snapshot() -> None:
    live = {"first": torch.zeros(10), "weight": torch.zeros(10)}
    snapshot = Snapshot(live, set(live), HostBuffers())
    live["weight"].fill_(1)
    with pytest.raises(CheckpointError, match=r"^weight was changed .* checkpoint\.asynchronous"):
        complete(snapshot)


def test_snapshot_completes_without_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "SETTLED_SECONDS", 0.01)
    live = {"weight": torch.ones(10)}
    snapshot = Snapshot(live, set(live), HostBuffers())
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(snapshot.complete).result(30)["weight"].sum() == 10
        finally:
            snapshot.release()
        live["weight"].fill_(1)  # too late to change the copy
        snapshot = Snapshot(live, set(live), HostBuffers())
        live["weight"].fill_(2)
        with pytest.raises(CheckpointError, match="weight was changed"):
            pool.submit(snapshot.complete).result(30)


def test_slow_copy_fails_snapshot() -> None:
    tensor = torch.ones(3)
    snapshot = Snapshot({"a": tensor}, {"a"}, HostBuffers())
    snapshot.release(timeout=0.0)
    tensor.zero_()
    with pytest.raises(CheckpointError, match="training ended before the state was copied"):
        snapshot.complete()


def test_snapshot_does_not_reference_its_sources() -> None:
    live = {"weight": torch.zeros(10)}
    source = weakref.ref(live["weight"].untyped_storage())
    snapshot = Snapshot(live, {"weight"}, HostBuffers())
    complete(snapshot)
    live.clear()
    assert source() is None


def test_failed_copy_does_not_block_or_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = Snapshot({"weight": torch.zeros(10)}, {"weight"}, HostBuffers())
    monkeypatch.setattr(_Copy, "start", _no_memory)
    training = threading.Thread(target=snapshot.release, args=(5.0,))
    training.start()
    with pytest.raises(CheckpointError, match=NO_MEMORY):
        snapshot.complete()
    training.join()


def test_missing_memory_fails_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = HostBuffers()
    monkeypatch.setattr(buffers, "like", _no_memory)
    snapshot = Snapshot({"weight": torch.zeros(10)}, (), buffers)
    with pytest.raises(CheckpointError, match=NO_MEMORY):
        complete(snapshot)


def _no_memory(*_: Any) -> Tensor:
    raise MemoryError("not enough memory")
