from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from distmp.checkpoint import saving, storage, writer
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.settings import CheckpointConfig
from distmp.checkpoint.snapshot import Snapshot, _Copy
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import CheckpointError, DataError
from distmp.utils.flat_shard import FlatShard
from tests import reference
from tests.checkpoint import listing
from tests.parallel.sharding import sharded
from tests.progress import wait_until
from tests.ranks import ranks, run_ranks
from tests.reference import TWO_RANKS, fused_adamw, loss, make_model, microbatches, snapshot
from tests.torchrun import run


def make_writer(
    directory: Path, messages: list[str] | None = None, **settings: Any
) -> CheckpointWriter:
    return CheckpointWriter(
        CheckpointConfig(**settings),
        directory,
        World.current("cpu"),
        timeout_seconds=60,
        log=[].append if messages is None else messages.append,
    )


# Training

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp, fp32": {"strategy": "ddp", "policy": "fp32"},
    "ddp, bf16": {"strategy": "ddp", "policy": "bf16"},
    "ddp, sharded optimizer": {
        "strategy": "ddp",
        "policy": "bf16",
        "shard_optimizer": True,
        "model": "with buffers",
    },
    "fsdp": {**sharded("fsdp"), "policy": "fp32"},
    "hsdp": {**sharded("hsdp", shard_size=1), "policy": "fp32"},
    "buffers": {"strategy": "ddp", "policy": "fp32", "model": "with buffers"},
    "not fused": {"strategy": "ddp", "policy": "fp32", "optimizer": torch.optim.AdamW},
}
STEPS = 5


class Summing(nn.Module):
    """Returns its input, and changes a buffer in forward; has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        return x


def make_engine(options: dict[str, Any]) -> Engine:
    options = {"optimizer": fused_adamw, "device": "cpu", **options}
    torch.manual_seed(0)
    model = make_model()
    if options.pop("model", None):
        return Engine(nn.Sequential(Summing(), model), loss, **options)
    return Engine(model, loss, **options)


def trained(
    options: dict[str, Any], writing: CheckpointWriter | None, steps: int = STEPS
) -> dict[int, dict[str, Tensor]]:
    """Train and save after steps 2 and 4; return the state after each step."""
    engine = make_engine(options)
    if writing is not None:
        writing.guard(engine.optimizer)
    states = {}
    for step in range(1, steps + 1):
        batches = microbatches(step, TWO_RANKS[step % len(TWO_RANKS)], dist.get_rank())
        engine.step(batches)
        states[step] = snapshot(engine)
        if writing is not None and step % 2 == 0:
            numbers = {"step": step}
            writing.save(step, engine.state_dict(), numbers, engine.updated_by_optimizer())
        MORE_TRAINED.release()
    return states


# Counts the steps of `trained`, for a copy that waits until training has continued.
MORE_TRAINED = threading.Semaphore(0)


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the copy, and write when training is two steps further."""
    complete, save = Snapshot.complete, saving.save

    def complete_later(snapshot: Snapshot) -> dict[str, Tensor]:
        while MORE_TRAINED.acquire(blocking=False):
            pass
        time.sleep(0.02)
        return complete(snapshot)

    def save_later(directory: Path, step: int, *args: Any, **options: Any) -> Path:
        if step + 2 <= STEPS:
            MORE_TRAINED.acquire()
        return save(directory, step, *args, **options)

    monkeypatch.setattr(Snapshot, "complete", complete_later)
    monkeypatch.setattr(writer.saving, "save", save_later)


def assert_same(case: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), case
    for name in expected:
        assert torch.equal(found[name], expected[name]), (case, name)


@pytest.mark.nightly
@ranks(2, timeout=200)
def test_save_holds_state_of_its_step(tmp_path: Path) -> None:
    for name, options in STRATEGIES.items():
        _check_saving(name, options, tmp_path / name)


def _check_saving(name: str, options: dict[str, Any], directory: Path) -> None:
    alone = trained(options, None)
    with make_writer(directory / "blocking", asynchronous=False) as writing:
        blocking = trained(options, writing)
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow(monkeypatch)
        with make_writer(directory / "asynchronous") as writing:
            asynchronous = trained(options, writing)
    for step in range(1, STEPS + 1):
        assert_same(name, blocking[step], alone[step])
        assert_same(name, asynchronous[step], alone[step])
    for way in ("blocking", "asynchronous"):
        for step in (2, 4):
            path = directory / way / f"step-{step:06d}"
            engine = make_engine(options)
            engine.prepare_to_load(StoredCheckpoint(path).tensors)
            state = engine.state_dict()
            assert StoredCheckpoint(path).load(state) == []
            engine.load_state_dict(state)
            assert_same(name, snapshot(engine), alone[step])
            assert StoredCheckpoint(path).state.numbers == {"step": step}


@pytest.mark.gpu
def test_gpu_state_is_copied_during_training(tmp_path: Path) -> None:
    # Its copy takes longer than a step on a real device; fake ones replay each operation.
    width = 64 if "FAKE_CUDA_DEVICES" in os.environ else 2048
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 2))
    engine = reference.make_engine(
        model=model, loss=reference.sum_of_squares, strategy="single", device="cuda"
    )
    batch = torch.ones(4, width)
    engine.step([batch])
    with make_writer(tmp_path, keep=9) as writing:
        writing.guard(engine.optimizer)
        expected = {}
        for step in (1, 2, 3):
            expected[step] = snapshot(engine)
            writing.save(step, engine.state_dict(), {}, engine.updated_by_optimizer())
            for _ in range(3):
                engine.step([batch])
            writing.finish()
    for step, state in expected.items():
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        StoredCheckpoint(tmp_path / f"step-{step:06d}").load(found)
        assert_same("cuda", found, state)


# One after the other


def _save_often(directory: Path) -> tuple[list[int], int]:
    """Return the saved steps, and the maximum number of simultaneous saves."""
    active, most, saved = 0, 0, []
    save = saving.save

    def noting(directory: Path, step: int, *args: Any, **options: Any) -> Path:
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.05)
        path = save(directory, step, *args, **options)
        active -= 1
        saved.append(step)
        return path

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(writer.saving, "save", noting)
        with make_writer(directory, keep=9) as writing:
            for step in (1, 2, 3):
                writing.save(step, {"step": torch.tensor(step)}, {})
                assert len(saved) == step - 1, "it waits for the save before"
            writing.save(4, {"step": torch.tensor(4)}, {}, wait=True)
    return saved, most


def test_saves_run_one_after_another(tmp_path: Path) -> None:
    assert run_ranks(_save_often, 2, tmp_path) == [([1, 2, 3, 4], 1)] * 2
    for step in (1, 2, 3, 4):
        found = {"step": torch.tensor(0)}
        StoredCheckpoint(tmp_path / f"step-{step:06d}").load(found)
        assert found["step"] == step


def test_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    with make_writer(tmp_path) as writing:
        writing.save(3, {"a": torch.ones(1)}, {"first": True})
        writing.save(3, {"a": torch.ones(1)}, {"first": False}, wait=True)
        assert writing.saved_step == 3
        assert StoredCheckpoint(tmp_path / "step-000003").state.numbers == {"first": True}
        # The run has gone back, and reaches step 3 with another state.
        writing.resumed(1, saved=True)
        writing.save(3, {"a": torch.ones(1)}, {"first": False}, wait=True)
        assert StoredCheckpoint(tmp_path / "step-000003").state.numbers == {"first": False}
        aside = StoredCheckpoint(tmp_path / "step-000003.abandoned")
        assert aside.state.numbers == {"first": True}


@pytest.mark.parametrize("error", [None, CheckpointError("of all ranks"), ValueError("of one")])
def test_writer_exit_finishes_save(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = saving.save
    monkeypatch.setattr(writer.saving, "save", lambda *a, **k: time.sleep(0.2) or save(*a, **k))
    with contextlib.suppress(CheckpointError, ValueError), make_writer(tmp_path) as writing:
        writing.save(1, {"a": torch.ones(1)}, {})
        if error is not None:
            raise error
    assert listing.latest(tmp_path) is not None


@ranks(2)
def test_error_of_one_rank_leaves_checkpoint(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    with contextlib.suppress(DataError), make_writer(tmp_path) as writing:
        writing.save(1, {f"weight {n}": torch.ones(3) for n in range(4)}, {}, {"weight 0"})
        if dist.get_rank() == 1:
            raise DataError("a file of this rank")
        wait_until(ended.exists)  # as in a collective of a step, which the other rank never calls
    ended.touch()
    assert listing.latest(tmp_path) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of one rank")])
def test_hanging_save_does_not_keep_failed_rank_alive(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()
    monkeypatch.setattr(writer.saving, "save", lambda *_, **__: leave.wait())
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.1)
    messages: list[str] = []
    with (
        contextlib.suppress(KeyboardInterrupt, ValueError),
        make_writer(tmp_path, messages) as writing,
    ):
        writing.save(1, {"a": torch.ones(1)}, {})
        raise error
    leave.set()
    assert messages == ["the checkpoint of step 1 was not finished"]


def test_hanging_copy_does_not_keep_failed_rank_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose collectives wait for another rank."""
    leave = threading.Event()
    monkeypatch.setattr(_Copy, "start", lambda _: leave.wait(40))
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.1)
    messages: list[str] = []
    started = time.monotonic()
    with contextlib.suppress(ValueError), make_writer(tmp_path, messages) as writing:
        writing.save(1, {"a": torch.ones(1)}, {}, held={"a"})
        raise ValueError("of one rank")
    seconds = time.monotonic() - started
    leave.set()
    assert messages == ["the checkpoint of step 1 was not finished"]
    assert seconds < 30


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_writer_has_lower_priority_than_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []
    monkeypatch.setattr(writer.saving, "save", lambda *_, **__: found.append(priority()))
    before = priority()
    with make_writer(tmp_path) as writing:
        writing.save(1, {"a": torch.ones(1)}, {})
    assert found == [min(before + 10, 19)]
    assert priority() == before


# Failures


def _fail_in_both_ways(directory: Path) -> dict[bool, dict[str, Any]]:
    return {
        asynchronous: _fail_once(directory / str(asynchronous), asynchronous)
        for asynchronous in (True, False)
    }


def _fail_once(directory: Path, asynchronous: bool) -> dict[str, Any]:
    """Save steps 1 to 3, the second on a disk that is full for rank 1; return the results."""
    messages: list[str] = []
    with make_writer(directory, messages, asynchronous=asynchronous, keep=1) as writing:
        for step in (1, 2, 3):
            with pytest.MonkeyPatch.context() as monkeypatch:
                if step == 2 and dist.get_rank() == 1:
                    monkeypatch.setattr(FileSystemWriter, "write_data", _disk_full)
                tensors = {f"weight {n}": torch.full((5,), float(step)) for n in range(4)}
                writing.save(step, tensors, {"step": step}, wait=step == 3)
                writing.finish()
            if step == 2:
                with pytest.raises(CheckpointError) as error:
                    writing.check()
        writing.check()
        left = sorted(path.name for path in directory.iterdir())
    dist.barrier()
    return {"said": messages, "error": str(error.value), "left": left}


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_failed_save_is_reported_on_all_ranks(tmp_path: Path) -> None:
    for seen_on_rank in run_ranks(_fail_in_both_ways, 2, tmp_path):
        for asynchronous, seen in seen_on_rank.items():
            directory = tmp_path / str(asynchronous)
            cause = (
                f"cannot save {directory / 'step-000002'}: rank 1: OSError: [Errno 28] No space "
                "left on device; the last checkpoint is of step 1"
            )
            assert seen["said"] == [f"NOT SAVED: {cause}"]
            assert seen["error"] == cause
            # The third save has removed the first one, and the files of the failed second one.
            assert seen["left"] == ["step-000003"]


def test_failed_save_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_writer(tmp_path) as writing:
        writing.save(1, {"a": torch.ones(1)}, {}, wait=True)
        monkeypatch.setattr(storage, "publish", _disk_full)
        writing.save(2, {"a": torch.ones(1)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_failed_save_of_best_checkpoint_leaves_the_one_before(tmp_path: Path) -> None:
    with make_writer(tmp_path, keep=1) as writing:
        for step in (1, 2, 3, 4):
            writing.best_step = min(step, 2)
            with pytest.MonkeyPatch.context() as patch:
                if step == 2:
                    patch.setattr(storage, "publish", _disk_full)
                writing.save(step, {"a": torch.ones(1)}, {}, wait=True)
    assert [*listing.checkpoints(tmp_path)] == [1, 4]


@pytest.mark.parametrize("reported", ["is_due", "finish"])
def test_save_failure_is_reported_at_next_step(
    reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "publish", _disk_full)
    messages: list[str] = []
    with make_writer(tmp_path, messages) as writing:
        writing.save(1, {"a": torch.ones(1)}, {})
        if reported == "is_due":
            wait_until(lambda: writing.is_due(2) or bool(messages))
        else:
            writing.finish()
        assert len(messages) == 1
        assert messages[0].endswith("left on device; no checkpoint has been saved yet")


def test_weights_changed_in_forward_are_reported_with_remedy(tmp_path: Path) -> None:
    weight = torch.ones(3)
    messages: list[str] = []
    with make_writer(tmp_path, messages) as writing:
        writing.save(1, {"model/weight": weight}, {}, held={"model/weight"})
        weight.mul_(2)
    assert "model/weight was changed" in messages[0]
    assert "set checkpoint.asynchronous to false" in messages[0]
    assert listing.latest(tmp_path) is None


@ranks(2)
def test_tensors_that_differ_between_ranks_are_not_saved(tmp_path: Path) -> None:
    messages: list[str] = []
    rank = dist.get_rank()
    weights = {f"model/{n}": torch.ones(3) for n in range(4)}
    for step, own in enumerate(({"callbacks/Own/a": torch.ones(2)}, {"model/0": torch.ones(4)}), 1):
        with make_writer(tmp_path, messages) as writing:
            writing.save(step, weights | (own if rank == 1 else {}), {})
    assert "callbacks/Own/a = nothing on rank 0; (2,) float32 on rank 1: differs" in messages[0]
    assert "model/0 = (3,) float32 on rank 0; (4,) float32 on rank 1: differs" in messages[1]
    assert listing.latest(tmp_path) is None
    with make_writer(tmp_path) as writing:  # in another order, and a shard of each rank
        shard = FlatShard.of(torch.ones(2 + rank), torch.Size([5]), 2 * rank)
        writing.save(3, dict(sorted({**weights, "shard": shard}.items(), reverse=rank == 1)), {})
    assert listing.latest(tmp_path) is not None


@ranks(2)
def test_rank_without_memory_fails_save_on_all(tmp_path: Path) -> None:
    messages: list[str] = []
    with make_writer(tmp_path, messages) as writing:
        if dist.get_rank() == 1:
            writing._buffers.like = _no_memory  # type: ignore[method-assign]
        writing.save(1, {f"weight {n}": torch.ones(3) for n in range(4)}, {})
    assert f"cannot save {tmp_path / 'step-000001'}" in messages[0]
    assert "the state could not be copied to host memory (MemoryError: not enough)" in messages[0]
    assert listing.latest(tmp_path) is None


def _no_memory(*_: Any) -> Tensor:
    raise MemoryError("not enough")


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from distmp.checkpoint import storage
from tests.checkpoint.test_writer import make_writer

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def save(directory, owner, point):
    writing = make_writer(directory)
    writing.save(1, {"a": torch.ones(4)}, {})
    writing.finish()
    setattr(owner, point, kill)
    writing.save(2, {"a": torch.zeros(4)}, {})
    writing.finish()

points = (FileSystemWriter, "write_data"), (FileSystemWriter, "finish"), (storage, "publish")
for owner, point in points:
    child = os.fork()
    if child == 0:
        save(Path(sys.argv[1]) / point, owner, point)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.nightly
def test_kill_during_save_leaves_previous_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = run(command, Path(__file__).parent.parent.parent)
    assert done.stdout.split() == [str(-signal.SIGKILL.value)] * 3, done.stderr
    for point in ("write_data", "finish", "publish"):
        assert (tmp_path / point / "step-000002.writing").exists()
        latest = listing.latest(tmp_path / point)
        assert latest == tmp_path / point / "step-000001"
        found = {"a": torch.zeros(4)}
        StoredCheckpoint(latest).load(found)
        assert torch.equal(found["a"], torch.ones(4))


def test_save_failing_before_copies_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no priority")

    monkeypatch.setattr(writer, "lower_priority", fail)
    live = {"weight": torch.ones(100)}
    with make_writer(tmp_path) as writing:
        writing.save(1, live, {"step": 1}, held={"weight"})
        writing.finish()
        assert not (tmp_path / "step-000001").exists()
