"""Restoring opens each file of a checkpoint at most once per rank."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from distmp.checkpoint import store, stored
from distmp.checkpoint.location import Location, RemotePath, locate
from distmp.distributed.ranks import Ranks
from distmp.errors import CheckpointError
from distmp.training.setup import restore
from distmp.training.train import main
from distmp.utils import cgroups
from tests.checkpoint.objects import URL
from tests.ranks import ranks
from tests.reference import TWO_RANKS, assert_same_bits, make_engine, make_model, snapshot, train
from tests.torchrun import TINY, corpus


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of how often files are opened for reading or read at once, by name."""
    counts: Counter[str] = Counter()
    open_local, open_remote, fetch = Path.open, RemotePath.open, RemotePath.read_bytes

    def opening(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "r" in mode:
            counts[path.name] += 1
        opened = open_remote if isinstance(path, RemotePath) else open_local
        return opened(path, mode, *args, **options)

    def fetching(path: RemotePath) -> bytes:
        counts[path.name] += 1
        return fetch(path)

    monkeypatch.setattr(Path, "open", opening)
    monkeypatch.setattr(RemotePath, "open", opening)
    monkeypatch.setattr(RemotePath, "read_bytes", fetching)
    return counts


@pytest.mark.parametrize("remote", [False, True], ids=["local", "fsspec"])
def test_a_resumed_run_reads_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    run, data = tmp_path / "run", corpus(tmp_path / "corpus")
    arguments = [*TINY, f"--data.path={data}", f"--run-dir={run}", "--checkpoint.every=2"]
    if remote:
        arguments.append(f"--checkpoint.path=memory://{uuid.uuid4().hex}")
    assert main([*arguments, "--steps=2"]) == 0
    counts = count_reads(monkeypatch)
    # Already at its last step: nothing is trained, and no later checkpoint is written or read.
    assert main([*arguments, "--steps=2", "--resume=auto"]) == 0
    files = {"state.json", ".metadata", "__0_0.distcp"}
    assert {name: counts[name] for name in files} == dict.fromkeys(files, 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "fsspec"])
@ranks(2)
def test_two_ranks_read_each_file_at_most_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, strategy: str
) -> None:
    directory = locate("resume", f"{URL}{tmp_path}") if remote else tmp_path
    trained = make_engine(policy="bf16", strategy=strategy)
    train(trained, 2, TWO_RANKS)
    store.save(directory, 2, trained.state_dict(), {"step": 2, "samples": 0}, keep=1)

    engine = make_engine(model=make_model(seed=9), policy="bf16", strategy=strategy)
    counts = count_reads(monkeypatch)
    checkpoint = store.resolve("auto", directory)
    assert checkpoint is not None
    assert restore(engine, checkpoint).step == 2
    assert_same_bits(snapshot(engine), snapshot(trained))

    own, other = (f"__{rank}_0.distcp" for rank in (dist.get_rank(), 1 - dist.get_rank()))
    assert {name: counts[name] for name in ("state.json", ".metadata", own)} == {
        "state.json": 1,
        ".metadata": 1,
        own: 1,
    }
    # The parts of replicated tensors that the other rank has written.
    assert counts[other] <= 1


@pytest.mark.parametrize("spare", [0, 50, 10**9])
def test_remote_files_that_do_not_fit_into_memory_are_read_again(
    monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    directory = locate("resume", f"memory://{uuid.uuid4().hex}")
    tensors = {"weight": torch.arange(100.0)}
    store.save(directory, 1, tensors, {}, keep=1)
    monkeypatch.setattr(stored, "_spare_bytes", lambda ranks: spare)
    counts = count_reads(monkeypatch)
    checkpoint = store.resolve("auto", directory)
    assert checkpoint is not None
    found = {"weight": torch.zeros(100)}
    checkpoint.load(found)
    assert torch.equal(found["weight"], tensors["weight"])
    assert counts["__0_0.distcp"] == (1 if spare > 50 else 2)
    assert counts["state.json"] == counts[".metadata"] == 1


def test_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_memory_groups", lambda root: iter([(16_000, 0)]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert stored._spare_bytes(Ranks(None)) == 2_000


@pytest.mark.parametrize("then", ["load", "forget"])
def test_files_are_closed(tmp_path: Path, then: str) -> None:
    def opened() -> list[str]:
        return [file.path for file in psutil.Process().open_files() if str(tmp_path) in file.path]

    path = store.save(tmp_path, 1, {"weight": torch.ones(3)}, {}, keep=1)
    checkpoint = store.StoredCheckpoint(path)
    checkpoint.verify()
    assert opened()
    if then == "forget":
        del checkpoint
    else:
        for _ in range(2):  # the second time the files are opened again
            found = {"weight": torch.zeros(3)}
            checkpoint.load(found)
            assert found["weight"].tolist() == [1, 1, 1]
    assert opened() == []


def test_loading_verifies_unless_that_was_done(tmp_path: Path) -> None:
    path: Location = store.save(tmp_path, 1, {"weight": torch.ones(300)}, {}, keep=1)
    checkpoint = store.StoredCheckpoint(path)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(data))
    found = {"weight": torch.zeros(300)}
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        checkpoint.load(found)
    assert not found["weight"].any()
