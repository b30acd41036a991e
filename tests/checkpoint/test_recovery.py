from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distmp.checkpoint import manifest, recovery, saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.storage import INDEX_FILE
from distmp.errors import CheckpointError, ConfigError
from distmp.telemetry.records import read_records
from distmp.train import main
from tests.ranks import ranks
from tests.torchrun import tiny


def save(directory: Path, *steps: int) -> list[Path]:
    """Save checkpoints and keep all of them; return their directories."""
    for step in steps:
        saving.save(directory, step, {"step": torch.tensor(step)}, {}, keep=9)
    return [directory / f"step-{step:06d}" for step in steps]


def damage(path: Path) -> str:
    """Change a bit; return the start of the message about it."""
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return f"{path} cannot be used: {file} does not hold what was written (its CRC-32 is "


def resolved(resume: str, directory: Path) -> Path | None:
    checkpoint = recovery.resolve(resume, directory)
    return None if checkpoint is None else checkpoint.path


def messages_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "distmp"]


# auto


def test_auto_is_none_without_checkpoints(tmp_path: Path) -> None:
    assert resolved("auto", tmp_path / "missing") is None
    assert resolved("auto", tmp_path) is None


def test_auto_selects_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    *_, newest = save(tmp_path, 1, 2)
    assert resolved("auto", tmp_path) == newest
    assert messages_in(caplog) == []


@pytest.mark.parametrize("resume", ["auto", "its path"])
def test_damaged_checkpoint_is_reported_and_previous_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    first, second, third = save(tmp_path, 1, 2, 3)
    reports = [damage(third), damage(second)]
    resume = "auto" if resume == "auto" else str(tmp_path)
    assert resolved(resume, tmp_path) == first
    messages = messages_in(caplog)
    assert len(messages) == 2
    for message, report in zip(messages, reports, strict=True):
        assert message.startswith(report)
        assert message.endswith(f"; continuing from {first}")


def test_unfinished_checkpoint_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-000002.writing").mkdir()
    assert resolved("auto", tmp_path) is None
    assert "step-000002.writing was not finished; continuing from the beginning" in caplog.text
    [first] = save(tmp_path, 1)
    (tmp_path / "step-000002.writing").mkdir()
    assert resolved("auto", tmp_path) == first
    assert f"step-000002.writing was not finished; continuing from {first}" in caplog.text


def test_run_with_only_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    reports = [damage(path) for path in reversed(save(tmp_path, 1, 2))]
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(CheckpointError) as error:
            recovery.resolve(resume, tmp_path)
        assert str(error.value).startswith(f"no checkpoint in {tmp_path} can be used: {reports[0]}")
        assert reports[1] in str(error.value)


def test_usable_checkpoint_before_step(tmp_path: Path) -> None:
    first, second, third = save(tmp_path, 1, 2, 3)
    assert recovery.usable(tmp_path, before=3).checkpoint.path == second
    damage(second)
    assert recovery.usable(tmp_path, before=3).checkpoint.path == first
    assert recovery.usable(tmp_path, before=1).checkpoint is None
    assert recovery.usable(tmp_path).checkpoint.path == third


# A path


def test_resume_from_path(tmp_path: Path) -> None:
    first, second = save(tmp_path / "run", 1, 2)
    elsewhere = tmp_path / "other"
    assert resolved(str(first), elsewhere) == first
    assert resolved(str(tmp_path / "run"), elsewhere) == second
    (nested,) = save(tmp_path / "run" / "checkpoints", 3)
    assert resolved(str(tmp_path / "run"), elsewhere) == second
    shutil.copytree(nested.parent, tmp_path / "trainer" / "checkpoints")
    found = resolved(str(tmp_path / "trainer"), elsewhere)
    assert found == tmp_path / "trainer" / "checkpoints" / nested.name
    run = tmp_path / "elsewhere"
    run.mkdir()
    (run / "config.yaml").write_text(f"checkpoint: {{path: {tmp_path / 'disk'}}}\n")
    (on_disk,) = save(tmp_path / "disk" / run.name, 4)
    assert resolved(str(run), elsewhere) == on_disk
    (tmp_path / "linked").symlink_to(run)
    (of_link,) = save(tmp_path / "disk" / "linked", 5)
    assert resolved(str(tmp_path / "linked"), elsewhere) == of_link
    (tmp_path / "latest").symlink_to(run)
    assert resolved(str(tmp_path / "latest"), elsewhere) == on_disk
    (run / "config.yaml").write_text("- !of_another_program x\n")
    with pytest.raises(ConfigError, match="contains none"):
        resolved(str(run), elsewhere)
    kept = tmp_path / "the one of the paper"
    shutil.copytree(first, kept)
    assert resolved(str(kept), elsewhere) == kept


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "does not exist; use auto to start a new run"),
        ("", "contains none"),
        ("atuo", "does not exist; did you mean 'auto'"),
    ],
)
def test_path_without_checkpoint_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        recovery.resolve(name if name == "atuo" else str(tmp_path / name), tmp_path)
    assert error.value.setting == "resume"


def test_only_resume_can_be_auto(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"^directory = 'auto': .*auto does not exist$"):
        recovery.resolve("auto", tmp_path, setting="directory")


def test_named_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    _, second = save(tmp_path, 1, 2)
    report = damage(second)
    with pytest.raises(CheckpointError) as error:
        recovery.resolve(str(second), tmp_path)
    assert str(error.value).startswith(report)


def test_named_empty_checkpoint_is_damaged(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1, 2)
    shutil.rmtree(second)
    second.mkdir()
    (first / "state.json").unlink()
    for path in (first, second):
        with pytest.raises(CheckpointError, match=r"state\.json is missing"):
            recovery.resolve(str(path), tmp_path)


# The ranks


@ranks(2)
def test_damage_seen_by_one_rank_counts_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(tmp_path, 1, 2)
    if dist.get_rank() == 1:
        verify_file = manifest.verify_file

        def failing(path: Path, *args: Any) -> Any:
            if path.parent == second:
                raise OSError(5, "Input/output error")
            return verify_file(path, *args)

        monkeypatch.setattr(manifest, "verify_file", failing)
    found = recovery.usable(tmp_path)
    assert found.checkpoint.path == first
    assert found.damaged == [f"{second} cannot be used: OSError: [Errno 5] Input/output error"]
    tensors = {"step": torch.tensor(0)}
    with pytest.raises(CheckpointError, match="Input/output error"):
        StoredCheckpoint(second).load(tensors)
    assert tensors["step"] == 0


@ranks(2)
def test_checkpoints_that_differ_between_ranks_are_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = save(tmp_path, 1)
    if dist.get_rank() == 1:
        other = manifest.read(path)
        monkeypatch.setattr(manifest, "read", lambda _: replace(other, crc32=other.crc32 ^ 1))
    with pytest.raises(CheckpointError, match="is not the same on all ranks"):
        StoredCheckpoint(path).verify()


@ranks(2)
def test_every_file_is_read_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"weight {i}": torch.randn(10) for i in range(4)}
    path = saving.save(tmp_path, 1, tensors, {}, keep=1)
    read: list[str] = []
    verify_file = manifest.verify_file

    def recording(path: Path, *args: Any) -> Any:
        read.append(path.name)
        return verify_file(path, *args)

    monkeypatch.setattr(manifest, "verify_file", recording)
    StoredCheckpoint(path).verify()
    expected = [["__0_0.distcp", INDEX_FILE], ["__1_0.distcp"]]
    assert read == expected[dist.get_rank()]


@ranks(2)
def test_only_rank_0_logs(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1, 2)
    if dist.get_rank() == 0:
        damage(second)
    dist.barrier()
    messages: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = messages.append  # type: ignore[method-assign]
    logging.getLogger("distmp").addHandler(handler)
    assert resolved("auto", tmp_path) == first
    assert len(messages) == (1 if dist.get_rank() == 0 else 0)


# A run


def test_run_continues_from_checkpoint_before_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = tiny(tmp_path, f"--run-dir={run}", "--steps=4")
    assert main([*arguments, "--checkpoint.every=2"]) == 0
    records = run / "steps.jsonl"
    losses = [record.loss for record in read_records(records)]
    checkpoints = run / "checkpoints"
    last = checkpoints / "step-000004"
    report = damage(last)

    assert main([*arguments, f"--resume={last}"]) == 1
    assert report in capsys.readouterr().err
    assert main([*arguments, "--resume=auto"]) == 0
    assert report in "".join(messages_in(caplog))
    assert [record.loss for record in read_records(records)] == losses
    assert recovery.usable(checkpoints).checkpoint.path == last
