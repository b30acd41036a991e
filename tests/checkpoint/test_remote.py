"""Checkpoints on file systems that cannot rename folders, such as object stores."""

from __future__ import annotations

import itertools
import uuid
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distmp.checkpoint import store
from distmp.checkpoint.layout import discard
from distmp.checkpoint.location import Location, RemotePath, locate
from distmp.checkpoint.storage import storage
from distmp.errors import CheckpointError
from distmp.telemetry.records import read_records
from distmp.training.train import main
from tests.checkpoint import listing, tiny
from tests.checkpoint.objects import URL
from tests.ranks import ranks
from tests.torchrun import TINY, corpus


@pytest.fixture
def directory(tmp_path: Path) -> Location:
    return locate("checkpoint.path", f"memory://{uuid.uuid4().hex}/run")


def save(directory: Location, *steps: int, keep: int = 9, content: int = 0) -> Location:
    for step in steps:
        tensors = {"content": torch.tensor(100 * step + content)}
        path = store.save(directory, step, tensors, {"content": content}, keep=keep)
    return path


def content(path: Location) -> int:
    tensors = {"content": torch.tensor(-1)}
    store.load(path, tensors)
    return int(tensors["content"])


def names(directory: Location) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(directory: Location) -> None:
    assert listing.latest(directory) is None
    assert store.usable(directory) == (None, [], [], [])
    path = save(directory, 1)
    assert path == listing.latest(directory) == store.usable(directory).checkpoint.path
    assert str(path) == f"{directory}/step-000001"
    assert content(path) == 100
    assert store.StoredCheckpoint(path).numbers == {"content": 0}
    assert store.StoredCheckpoint(path).tensors == {"content": ((), torch.int64)}


def test_the_last_stay(directory: Location) -> None:
    save(directory, 1, 2, 3, 4, keep=2)
    assert names(directory) == ["step-000003", "step-000004"]


def test_the_same_step_again(directory: Location) -> None:
    save(directory, 1)
    for number in (1, 2):
        path = save(directory, 1, content=number)
        assert content(path) == content(listing.latest(directory)) == 100 + number
        assert len(names(directory)) == 1


def test_later_steps_are_set_aside(directory: Location) -> None:
    save(directory, 10, 20, 30)
    save(directory, 15)
    assert list(listing.checkpoints(directory)) == [10, 15]
    assert store.usable(directory).checkpoint.path == directory / "step-000015"
    assert content(store.resolve(f"{directory}/step-000030", directory).path) == 3000
    save(directory, 30, content=1)
    assert content(listing.latest(directory)) == 3001
    assert content(directory / "step-000030") == 3000


def test_all_attempts_of_a_later_step_are_set_aside(directory: Location) -> None:
    save(directory, 1, 4)
    with mock.patch.object(type(storage(directory)), "clean"):  # the process was killed before it
        save(directory, 4, content=1)
    assert len(names(directory)) == 3
    save(directory, 2)
    assert list(listing.checkpoints(directory)) == [1, 2]
    assert store.usable(directory).checkpoint.path == directory / "step-000002"
    finished = [entry.step for entry in storage(directory).entries() if entry.finished]
    assert finished == [2, 1]


def test_the_latest_of_those_set_aside_stay(directory: Location) -> None:
    save(directory, 10, 20, 30, 40)
    save(directory, 15, keep=2)
    assert names(directory) == ["step-000010", "step-000015", "step-000030", "step-000040"]
    save(directory, 16, keep=1)
    assert names(directory) == ["step-000016", "step-000040"]


def test_a_damaged_one_gives_way(directory: Location) -> None:
    first, second = save(directory, 1), save(directory, 2)
    data = bytearray((second / "__0_0.distcp").read_bytes())
    data[100] ^= 1
    (second / "__0_0.distcp").write_bytes(bytes(data))
    found = store.usable(directory)
    assert found.checkpoint.path == first
    [report] = found.damaged
    assert report.startswith(f"{second} cannot be used: {second}/__0_0.distcp does not hold")
    with pytest.raises(CheckpointError, match=f"{first} is intact"):
        store.resolve(str(second), directory)


def test_one_without_its_list_is_not_finished(directory: Location) -> None:
    first, second = save(directory, 1), save(directory, 2)
    (second / "state.json").unlink()
    found = store.usable(directory)
    assert found.checkpoint.path == first
    assert (found.damaged, found.unfinished) == ([], [f"{second} was not finished"])
    discard(directory, 1)
    assert names(directory) == ["step-000001", "step-000002"]
    save(directory, 3)
    assert names(directory) == ["step-000001", "step-000003"]
    (directory / "step-000003" / "state.json").unlink()
    discard(directory, 3)
    assert names(directory) == ["step-000001"]


class Killed(BaseException):
    """The process stops here."""


REMOVE_TREE = RemotePath.remove_tree
CHANGES = ("mkdir", "open", "write_bytes", "rename", "unlink", "remove_tree")


def killed_save(directory: Location, step: int, lives: int) -> bool:
    """Save, but be killed after so many operations; return whether killed."""
    countdown = itertools.count(lives, -1)

    def mortal(operation: object) -> object:
        def run(path: RemotePath, *args: object, **kwargs: object) -> object:
            if next(countdown) > 0:
                return operation(path, *args, **kwargs)  # type: ignore[operator]
            if operation is REMOVE_TREE:  # removes only a half
                (path / "__0_0.distcp")._file_system.rm_file((path / "__0_0.distcp")._path)
            raise Killed

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(RemotePath, name, mortal(getattr(RemotePath, name)))
        try:
            save(directory, step, keep=2, content=1)
        except (Killed, CheckpointError):  # DCP makes the latter of any exception
            return True
    return False


@pytest.mark.parametrize("step", [1, 2, 3])
def test_killed_at_any_operation(tmp_path: Path, step: int) -> None:
    """The newest is the old or the new one, complete, and the next save succeeds."""
    for lives in itertools.count():
        directory = locate("checkpoint.path", f"memory://{uuid.uuid4().hex}")
        save(directory, 1, 2)
        killed = killed_save(directory, step, lives)
        for path in listing.checkpoints(directory).values():
            store.StoredCheckpoint(path).verify()
        assert content(store.usable(directory).checkpoint.path) in (200, 100 * step + 1)
        save(directory, step, keep=1, content=2)
        assert content(store.usable(directory).checkpoint.path) == 100 * step + 2
        if not killed:
            break
    assert lives > 5


@ranks(2)
def test_several_ranks(tmp_path: Path) -> None:
    directory = locate("checkpoint.path", f"{URL}{tmp_path}/bucket/run")
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2, 2, 3):
        tiny.save(directory, step, mesh)
    assert names(directory) == ["step-000002.2", "step-000003"]
    dist.barrier()
    if dist.get_rank() == 0:
        file = directory / "step-000003" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    checkpoint, damaged, *_ = store.usable(directory)
    assert checkpoint.path == directory / "step-000002.2"
    assert len(damaged) == 1
    tensors = tiny.zeros(mesh)
    checkpoint.load(tensors)
    assert tiny.same_bits(tensors, tiny.values(2))


# A run


def test_a_run_and_its_continuation_on_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, place = corpus(tmp_path / "corpus"), f"memory://{uuid.uuid4().hex}"
    common = [*TINY, f"--data.path={data}", "--steps=4", f"--checkpoint.path={place}"]
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    which = ["--checkpoint.every=1", "--checkpoint.keep=1", "--checkpoint.keep-every=2"]
    assert main([*common, f"--run-dir={here}", *which]) == 0
    assert not (here / "checkpoints").exists()
    kept = locate("checkpoint.path", place) / "run"
    assert names(kept) == ["lease-000001.json", "step-000002", "step-000004"]
    assert isinstance(kept, RemotePath)
    (kept / "step-000004").remove_tree()

    assert main([*common, f"--run-dir={there}", "--resume=auto"]) == 0
    assert f"continuing from {place}/run/step-000002" in capsys.readouterr().out
    losses = [
        [record.loss for record in read_records(run / "steps.jsonl") if record.step > 2]
        for run in (here, there)
    ]
    assert losses[0] == losses[1]
    # A new run on a third machine does not change them.
    third = tmp_path / "third"
    assert main([*common, f"--run-dir={third / 'run'}"]) == 0
    assert [path.name for path in third.iterdir()] == ["run-2"]
    assert names(locate("checkpoint.path", place)) == ["run", "run-2"]
