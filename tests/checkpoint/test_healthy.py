"""An unhealthy checkpoint is marked, displaces no healthy one, and is passed over."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distmp.checkpoint import manifest, recovery, saving
from distmp.checkpoint.dcp import is_finite
from distmp.checkpoint.manifest import STATE_FILE, Health
from distmp.checkpoint.settings import CheckpointConfig, Retention
from distmp.checkpoint.storage import INDEX_FILE, prepare, publish
from distmp.checkpoint.writer import CheckpointWriter
from distmp.distributed.world import World
from distmp.errors import CheckpointError, TrainingError
from distmp.training.trainer import checkpoint_before
from tests.checkpoint.test_recovery import messages_in
from tests.ranks import ranks

MARK = "NaN or infinite values in weight"
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_found_in_every_dtype(dtype: torch.dtype, bad: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert is_finite(values.to(dtype))
    values[777] = bad
    assert not is_finite(values.to(dtype))


def test_large_values_with_overflowing_sum_are_finite() -> None:
    assert is_finite(torch.full((64, 64), 6e4, dtype=torch.float16))
    assert is_finite(torch.full((4,), 3e38).expand(1000, 4).t())


def test_integers_and_empty_tensors_are_finite() -> None:
    assert is_finite(torch.arange(5))
    assert is_finite(torch.empty(0, 3))
    assert is_finite(torch.tensor(True))


def state(weight: float = 1.0, buffer: float = 1.0) -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([0.0, weight]),
        "buffer": torch.tensor([buffer]),
        "step": torch.tensor(1),
    }


def save(directory: Path, step: int, weight: float = 1.0, keep: int = 2) -> None:
    saving.save(directory, step, state(weight), {"step": step}, keep, finite={"weight", "step"})


def left(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def marks(directory: Path) -> dict[int, str | None]:
    return {
        step: manifest.read(directory / f"step-{step:06d}").health.problem
        for step in left(directory)
    }


def test_manifest_marks_non_finite_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    assert messages_in(caplog) == []
    save(tmp_path, 2, weight=math.nan)
    save(tmp_path / "other", 3, weight=-math.inf)
    assert marks(tmp_path) == {1: None, 2: MARK}
    assert marks(tmp_path / "other") == {3: MARK}
    assert messages_in(caplog) == [
        f"{path} is marked as unhealthy: {MARK}; it does not count for checkpoint.keep, and "
        "--resume auto and rollbacks skip it"
        for path in (tmp_path / "step-000002", tmp_path / "other" / "step-000003")
    ]


def test_mark_keeps_number_of_skipped_steps(tmp_path: Path) -> None:
    health = Health(skipped_in_a_row=3)
    saving.save(tmp_path, 9, state(math.nan), {}, 2, finite={"weight"}, health=health)
    assert manifest.read(tmp_path / "step-000009").health == Health(MARK, 3)


def test_infinite_buffers_are_healthy(tmp_path: Path) -> None:
    saving.save(tmp_path, 1, state(buffer=-math.inf), {}, 2, finite={"weight"})
    assert marks(tmp_path) == {1: None}


def test_checksum_covers_mark(tmp_path: Path) -> None:
    save(tmp_path, 1, weight=math.nan)
    file = tmp_path / "step-000001" / STATE_FILE
    content = json.loads(file.read_text())
    del content["unhealthy"]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        manifest.read(file.parent)


@ranks(2)
def test_values_of_one_rank_mark_checkpoint_on_all(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(4, 3)
    whole[3, 1] = math.nan  # in the shard of rank 1
    tensors = {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "other": torch.ones(2)}
    saving.save(tmp_path, 1, tensors, {}, 2, finite=set(tensors))
    dist.barrier()
    assert marks(tmp_path) == {1: MARK}
    with pytest.raises(CheckpointError, match=MARK):
        recovery.resolve("auto", tmp_path)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_writer_checks_values_updated_by_optimizer(tmp_path: Path, asynchronous: bool) -> None:
    writer = CheckpointWriter(
        CheckpointConfig(asynchronous=asynchronous, keep=3),
        tmp_path,
        World.current("cpu"),
        timeout_seconds=60,
        log=print,
    )
    with writer:
        for step, (weight, buffer, known) in enumerate(
            [(1.0, math.inf, None), (math.nan, 1.0, None), (1.0, 1.0, "10 steps were skipped")], 1
        ):
            writer.save(step, state(weight, buffer), {"step": step}, {"weight"}, Health(known))
            writer.finish()
            assert marks(tmp_path)[step] == [None, MARK, "10 steps were skipped"][step - 1]


def test_unhealthy_checkpoints_do_not_replace_healthy_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (40, 50, 60):
        save(tmp_path, step, weight=math.nan)
        assert left(tmp_path) == [20, 30, step], "only the latest is kept for examination"
    save(tmp_path, 70)
    assert left(tmp_path) == [30, 70]


@pytest.mark.parametrize("resume", ["auto", "its directory"])
def test_run_continues_from_last_healthy_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, weight=math.nan)
    caplog.clear()
    found = recovery.resolve("auto" if resume == "auto" else str(tmp_path), tmp_path)
    assert found is not None
    assert found.path == tmp_path / "step-000001"
    assert messages_in(caplog) == [
        f"{tmp_path / 'step-000002'} is marked as unhealthy: {MARK}; continuing from {found}"
    ]
    assert recovery.newest_healthy(tmp_path) == found.path


def test_named_unhealthy_checkpoint_is_used_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, weight=math.nan)
    caplog.clear()
    path = tmp_path / "step-000002"
    found = recovery.resolve(str(path), tmp_path)
    assert found is not None
    assert found.path == path
    assert messages_in(caplog) == [
        f"{path} is marked as unhealthy: {MARK}; it is used because it was named"
    ]


def test_missing_healthy_checkpoint_is_one_message(tmp_path: Path) -> None:
    save(tmp_path, 1, weight=math.nan)
    with pytest.raises(CheckpointError) as caught:
        recovery.resolve("auto", tmp_path)
    assert str(caught.value) == (
        f"no checkpoint in {tmp_path} can be used: {tmp_path / 'step-000001'} is marked as "
        f"unhealthy: {MARK}; start again, for example with a lower learning rate, or name an "
        "unhealthy one by its path to use it anyway"
    )
    assert recovery.newest_healthy(tmp_path) is None


def test_rollback_skips_unhealthy_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, weight=math.nan)
    assert checkpoint_before(tmp_path, 3).path == tmp_path / "step-000001"
    with pytest.raises(TrainingError, match="has no healthy checkpoint before step 1"):
        checkpoint_before(tmp_path, 1)


def manifest_only(directory: Path, step: int, skipped: int, retention: Retention) -> None:
    """Save a checkpoint whose only file is `state.json`, and apply the retention rules."""
    writing = prepare(directory, step)
    mark = f"the last {skipped} steps were all skipped" if skipped >= 10 else None
    (writing / STATE_FILE).write_bytes(manifest.encode(step, {}, {}, Health(mark, skipped)))
    (writing / INDEX_FILE).touch()
    publish(writing)
    saving.tidy(directory, step, retention)


def test_skipped_steps_count_until_next_update(tmp_path: Path) -> None:
    retention = Retention(last=1, every=100)
    for step, skipped in [(100, 0), (200, 1), (205, 6)]:
        manifest_only(tmp_path, step, skipped, retention)
    assert left(tmp_path) == [100, 205], "200 has the weights of 205, which are not proven good"
    for step, skipped in [(250, 2), (300, 0), (350, 0)]:
        manifest_only(tmp_path, step, skipped, retention)
    assert left(tmp_path) == [100, 205, 300, 350], "205 is the first checkpoint of its interval"


def test_checkpoints_kept_if_all_follow_skipped_steps(tmp_path: Path) -> None:
    for step, skipped in [(100, 1), (200, 1), (300, 1), (310, 11), (320, 21)]:
        manifest_only(tmp_path, step, skipped, Retention(last=2))
    assert left(tmp_path) == [100, 200, 320]
    assert recovery.newest_healthy(tmp_path) == tmp_path / "step-000200"


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([0, 7, 20]),
)
@example(streaks=[(1, 0), (1, 10), (1, 10)], every=1, keep=2, keep_every=0)
def test_checkpoints_kept_after_streaks_of_skipped_steps(
    streaks: list[tuple[int, int]], every: int, keep: int, keep_every: int
) -> None:
    """Each streak is a number of applied updates, then one of skipped steps."""
    with tempfile.TemporaryDirectory() as temporary:
        directory, step, skipped = Path(temporary), 0, 0
        saved: dict[int, int] = {}
        for is_skipped in [s for a, b in streaks for s in [False] * a + [True] * b]:
            step, skipped = step + 1, skipped + 1 if is_skipped else 0
            if step % every:
                continue
            manifest_only(directory, step, skipped, Retention(keep, keep_every))
            saved[step] = skipped
            remaining = left(directory)
            # An update follows: their weights can no longer turn out to be unhealthy.
            proven = {s for s, t in itertools.pairwise(saved) if saved[s] < 10 and t - saved[t] > s}
            counted = sorted(proven | {s for s in saved if saved[s] == 0})
            windows = {s // keep_every: s for s in reversed(counted)} if keep_every else {}
            permanent = {s for window, s in windows.items() if window > 0}
            assert remaining == sorted({*counted[-keep:], *permanent, step})
            found = recovery.newest_healthy(directory)
            if skipped < 10:
                assert found == directory / f"step-{step:06d}", "it may turn out to be healthy"
                continue
            healthy = [s for s in remaining if s < step - skipped]
            assert found == (directory / f"step-{healthy[-1]:06d}" if healthy else None)
            if keep > 1 and proven:
                # The one before an earlier streak is proven, too, and may be newer.
                newest = directory / f"step-{max(proven):06d}"
                assert found is not None
                assert found >= newest, "it must not be lost"


def test_checkpoints_with_weights_of_marked_one_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_after(step: int, skipped: int, problem: str | None = None) -> None:
        numbers = {"step": step}
        saving.save(tmp_path, step, state(), numbers, 9, health=Health(problem, skipped))

    for step, skipped in [(1, 0), (2, 1), (3, 0), (8, 5)]:
        save_after(step, skipped)
        found = recovery.resolve("auto", tmp_path)
        assert found is not None
        assert found.path == tmp_path / f"step-{step:06d}", "a skipped step alone is no reason"
    save_after(13, 10, "the last 10 steps were all skipped")
    caplog.clear()
    found = recovery.resolve("auto", tmp_path)
    assert found is not None
    assert found.path == tmp_path / "step-000002"
    marked = tmp_path / "step-000013"
    assert messages_in(caplog) == [
        f"{marked} is marked as unhealthy: the last 10 steps were all skipped; continuing from "
        f"{found}",
        f"{tmp_path / 'step-000003'} holds the same weights as {marked}, which is marked as "
        f"unhealthy: the last 10 steps were all skipped; continuing from {found}",
    ]
    caplog.clear()
    assert recovery.resolve(str(tmp_path / "step-000003"), tmp_path) is not None
    assert messages_in(caplog) == [
        f"{tmp_path / 'step-000003'} holds the same weights as {marked}, which is marked as "
        "unhealthy: the last 10 steps were all skipped; it is used because it was named"
    ]
    assert left(tmp_path) == [1, 2, 3, 13], "8 has displaced no other; after 2 came an update"
    assert recovery.newest_healthy(tmp_path) == found.path


def test_checksum_covers_number_of_skipped_steps(tmp_path: Path) -> None:
    saving.save(tmp_path, 4, state(), {}, 2, health=Health(skipped_in_a_row=3))
    read = manifest.read(tmp_path / "step-000004")
    assert (read.health.skipped_in_a_row, read.updated_at) == (3, 1)
    file = tmp_path / "step-000004" / STATE_FILE
    file.write_text(file.read_text().replace('"skipped_in_a_row": 3', '"skipped_in_a_row": 0'))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        manifest.read(file.parent)
