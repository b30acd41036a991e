from __future__ import annotations

import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from distmp.checkpoint import dcp, saving, storage
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.errors import CheckpointError
from tests.checkpoint import listing
from tests.disks import disk
from tests.ranks import ranks, run_ranks

NUMBERS = {"step": 7, "loss": 0.1 + 0.2, "name": "run", "nested": {"list": [1, None, True]}}


def plain_tensors() -> dict[str, Tensor]:
    """Tensors of every kind in a training state, with values that bfloat16 or FP32 would round."""
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(7, 5, generator=generator),
        "layer.half": torch.randn(6, 4, generator=generator).bfloat16(),
        "optimizer.0.exp_avg": torch.randn(9, generator=generator, dtype=torch.float64),
        "optimizer.step": torch.tensor(2**60 + 1),
        "scale": torch.tensor(65536.0),
        "empty": torch.empty(0, 3),
        "random state": torch.arange(100, dtype=torch.uint8),
        "transposed": torch.randn(3, 8, generator=generator).t(),
        "view": torch.randn(100, generator=generator)[10:13],
        "parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
    }


def distributed(tensors: dict[str, Tensor], placement: Placement) -> dict[str, Tensor]:
    """Make DTensors of the first three; the others stay plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = ("layer.weight", "layer.half", "optimizer.0.exp_avg")
    return {
        name: distribute_tensor(tensor, mesh, [placement]) if name in sharded else tensor
        for name, tensor in tensors.items()
    }


def zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_all_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            whole(found[name]), expected[name].detach(), rtol=0, atol=0, msg=name
        )


def test_round_trip_without_process_group(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = saving.save(tmp_path / "run", 7, plain_tensors(), NUMBERS, keep=1)
    assert path == listing.latest(tmp_path / "run") == tmp_path / "run" / "step-000007"
    found = zeros(plain_tensors())
    addresses = {name: tensor.data_ptr() for name, tensor in found.items()}
    assert StoredCheckpoint(path).load(found) == []
    assert_all_equal(found, plain_tensors())
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == addresses
    assert StoredCheckpoint(path).state.numbers == NUMBERS
    assert [str(warning.message) for warning in recwarn] == []


def test_checkpoint_without_tensors_loads(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, {}, {}, keep=1)
    assert StoredCheckpoint(path).load({}) == []


def test_stored_tensors_list_shapes_and_dtypes(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, plain_tensors(), {}, keep=1)
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in plain_tensors().items()}
    assert StoredCheckpoint(path).tensors == expected


def test_files_are_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)

    def recording_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    path = saving.save(tmp_path, 1, plain_tensors(), {}, keep=1)

    published = events.index("step-000001.writing -> step-000001")
    files = {".metadata.tmp" if file.name == ".metadata" else file.name for file in path.iterdir()}
    assert files | {"step-000001.writing"} <= set(events[:published])
    assert events[published + 1] == tmp_path.name


@ranks(2)
def test_round_trip(tmp_path: Path) -> None:
    numbers = {"rank": dist.get_rank()}
    tensors = distributed(plain_tensors(), Shard(0))
    path = saving.save(tmp_path, 1, tensors, numbers, keep=1)
    found = zeros(tensors)
    StoredCheckpoint(path).load(found)
    assert_all_equal(found, plain_tensors())
    assert StoredCheckpoint(path).state.numbers == {"rank": 0}


PLACEMENTS = (Shard(0), Replicate())


def _save_sharded(directory: Path) -> None:
    for saved in PLACEMENTS:
        tensors = distributed(plain_tensors(), saved)
        saving.save(directory / str(saved), 1, tensors, {}, keep=1)


def _load_sharded(directory: Path) -> None:
    """Load what either placement has saved as plain tensors and with each placement."""
    for saved, loaded in itertools.product(PLACEMENTS, (None, *PLACEMENTS)):
        tensors = zeros(plain_tensors())
        if loaded is not None:
            tensors = distributed(tensors, loaded)
        StoredCheckpoint(directory / str(saved) / "step-000001").load(tensors)
        assert_all_equal(tensors, plain_tensors())


def test_load_at_other_world_size_and_sharding(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, tmp_path)
    for world_size in (1, 4):
        run_ranks(_load_sharded, world_size, tmp_path)


def test_plain_tensors_load_into_shards_of_other_dimension(tmp_path: Path) -> None:
    expected = torch.randn(6, 5)
    saving.save(tmp_path, 1, {"weight": expected}, {}, keep=1)
    columns = run_ranks(_load_columns, 2, tmp_path)
    assert torch.equal(torch.cat(columns, dim=1), expected)


def _load_columns(directory: Path) -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(6, 5), mesh, [Shard(1)])
    StoredCheckpoint(directory / "step-000001").load({"weight": weight})
    return weight.to_local()


@ranks(2)
def test_replicated_tensors_are_written_once(tmp_path: Path) -> None:
    tensors = {f"weight {i}": torch.zeros(1000, 250) for i in range(4)}
    path = saving.save(tmp_path, 1, tensors, {}, keep=1)
    written = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(written) == 2
    assert 4_000_000 < sum(written) < 4_100_000


@ranks(2)
def test_save_in_thread_during_collectives(tmp_path: Path) -> None:
    group = dist.new_group()
    tensors = distributed(plain_tensors(), Shard(0))
    with ThreadPoolExecutor(1) as executor:
        task = executor.submit(saving.save, tmp_path, 1, tensors, {}, keep=1, group=group)
        rounds = 0
        while not (rounds > 20 and agreed(task.done())):
            rounds += 1
    found = zeros(tensors)
    StoredCheckpoint(task.result()).load(found)
    assert_all_equal(found, plain_tensors())


def agreed(done: bool) -> bool:
    """Return whether it is true on all ranks, with a collective of the default group."""
    count = torch.tensor(float(done))
    dist.all_reduce(count)
    return count.item() == dist.get_world_size()


# Errors


def test_misfits_are_listed_in_one_error(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, {"a": torch.ones(2, 3), "b": torch.ones(1)}, {}, keep=1)
    tensors = {"a": torch.zeros(3, 2), "b": torch.zeros(1), "c": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        StoredCheckpoint(path).load(tensors)
    misfits = "'a' has shape [2, 3] in it, not [3, 2]; there is no 'c' in it"
    assert str(error.value) == f"cannot load {path}: it does not fit: {misfits}"
    assert torch.equal(tensors["b"], torch.zeros(1)), "nothing may be read"


def test_at_most_five_misfits_are_listed(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, {"a": torch.ones(1)}, {}, keep=1)
    with pytest.raises(CheckpointError, match=r"no '4' in it; and more$"):
        StoredCheckpoint(path).load({str(i): torch.zeros(1) for i in range(6)})


def test_tensor_without_memory_is_refused(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, {"a": torch.ones(1)}, {}, keep=1)
    with pytest.raises(CheckpointError, match="'a' is to be loaded but has no memory"):
        StoredCheckpoint(path).load({"a": torch.zeros(1, device="meta")})


def test_extra_names_are_returned(tmp_path: Path) -> None:
    tensors = {name: torch.ones(1) for name in ("c", "b", "a")}
    path = saving.save(tmp_path, 1, tensors, {}, keep=1)
    assert StoredCheckpoint(path).load({"b": torch.zeros(1)}) == ["a", "c"]


def test_conversion_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saving.save(tmp_path, 1, {"a": torch.tensor([1 / 3]), "b": torch.ones(1)}, {}, keep=1)
    found = {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1)}
    with caplog.at_level(logging.WARNING, logger="distmp"):
        StoredCheckpoint(path).load(found)
    assert torch.equal(found["a"], torch.tensor([1 / 3]).bfloat16())
    assert "converted from torch.float32 to torch.bfloat16" in caplog.text


def test_conversion_is_logged_once_for_all_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saving.save(tmp_path, 1, {"a": torch.ones(1), "b": torch.ones(1)}, {}, keep=1)
    checkpoint = StoredCheckpoint(path)
    with caplog.at_level(logging.WARNING, logger="distmp"):
        for name, dtype in (("a", torch.bfloat16), ("b", torch.bfloat16), ("b", torch.float16)):
            checkpoint.load({name: torch.zeros(1, dtype=dtype)})
    messages = [record.getMessage() for record in caplog.records]
    converted = [m.partition(" to ")[2] for m in messages if "are converted from" in m]
    assert converted == ["torch.bfloat16", "torch.float16"]


def _fail(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def _save_and_fail(directory: Path, point: str, failing_rank: int) -> tuple[str, float]:
    """Save step 1, then step 2 with a failure; return the error and the loaded tensors."""
    tensors = distributed(plain_tensors(), Shard(0))
    saving.save(directory, 1, tensors | {"mark": torch.tensor(1.0)}, {}, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing_rank:
            owners: list[Any] = [saving, storage, dcp.filesystem.FileSystemWriter]
            patch.setattr(next(owner for owner in owners if hasattr(owner, point)), point, _fail)
        with pytest.raises(CheckpointError) as error:
            saving.save(directory, 2, tensors | {"mark": torch.tensor(2.0)}, {}, keep=1)
    found = {"mark": torch.tensor(0.0)}
    latest = listing.latest(directory)
    assert latest is not None
    StoredCheckpoint(latest).load(found)
    return str(error.value), found["mark"].item()


FAILURES = {
    "prepare": 0,
    "prepare_local_plan": 1,
    "write_data": 1,
    "finish": 0,
    "synchronize": 0,
    "publish": 0,
}


def _save_and_fail_everywhere(directory: Path) -> list[tuple[str, float]]:
    return [_save_and_fail(directory / point, point, rank) for point, rank in FAILURES.items()]


def test_failure_leaves_previous_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(_save_and_fail_everywhere, 2, tmp_path)
    for (point, rank), *seen in zip(FAILURES.items(), *results, strict=True):
        path = tmp_path / point / "step-000002"
        error = f"cannot save {path}: rank {rank}: OSError: [Errno 28] No space left on device"
        assert seen == [(error, 1.0)] * 2
        left = [p.name for p in path.parent.glob("step-*") if p.suffix != ".writing"]
        assert left == ["step-000001"]


def test_disk_that_fills_during_a_save_is_named(tmp_path: Path) -> None:
    cause = r"OSError: \[Errno 28\] No space left on device"
    with (
        disk(tmp_path / "disk", "size=1m") as directory,
        pytest.raises(CheckpointError, match=cause),
    ):
        saving.save(directory, 1, {"large": torch.zeros(2**20)}, {}, keep=1)


def _save_step_3(directory: Path) -> None:
    saving.save(directory, 3, {"mark": torch.tensor(3.0)}, {}, keep=1)


def test_save_after_failure_cleans_up(tmp_path: Path) -> None:
    run_ranks(_save_and_fail, 2, tmp_path, "write_data", 1)
    assert (tmp_path / "step-000002.writing").is_dir()
    run_ranks(_save_step_3, 2, tmp_path)
    assert os.listdir(tmp_path) == ["step-000003"]


def _save_to_storage_of_its_own(directory: Path) -> str:
    """Rank 1 writes to a directory that rank 0 does not see."""
    tensors = {f"weight {i}": torch.zeros(10) for i in range(4)}
    if dist.get_rank() == 1:
        directory = directory / "other host"
    with pytest.raises(CheckpointError) as error:
        saving.save(directory, 1, tensors, {}, keep=1)
    return str(error.value)


def test_directory_without_shared_storage_is_refused(tmp_path: Path) -> None:
    messages = run_ranks(_save_to_storage_of_its_own, 2, tmp_path)
    assert "all hosts must write to the same, shared storage" in messages[0]
    assert listing.latest(tmp_path) is None


def test_numbers_must_fit_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        saving.save(tmp_path, 1, {}, {"tensor": torch.ones(1)}, keep=1)
    assert listing.latest(tmp_path) is None


@ranks(2)
def test_damage_seen_by_one_rank_fails_all(tmp_path: Path) -> None:
    path = saving.save(tmp_path, 1, plain_tensors(), {}, keep=1)
    tensors = {"layer.weight": torch.zeros(7, 5 + dist.get_rank())}
    with pytest.raises(CheckpointError, match=r"rank 1: it does not fit: 'layer\.weight'"):
        StoredCheckpoint(path).load(tensors)
