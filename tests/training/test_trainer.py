"""Runs of the trainer whose disk fails, whose steps overflow, and when they save."""

from __future__ import annotations

import functools
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor, nn

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import load
from distmp.data import IGNORED
from distmp.data.order import sample_indices
from distmp.models.loss import next_token_loss
from distmp.telemetry.records import read_records
from distmp.train import main
from tests import faulty_runs
from tests.disks import disk, fill, mount, unmount
from tests.elastic import Job, run_jobs
from tests.marks import nightly
from tests.torchrun import TINY, python, run, tiny
from tests.toys import trainer_of
from tests.training.test_resume import SIZE, Samples, configuration, train

Batch = dict[str, Tensor]
# What happens to the disk, by the number of the training step whose loss is computed.
events: dict[int, Callable[[], object]] = {}
calls = 0


def eventful_loss(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
    """The loss of language models, at whose n-th call something may happen."""
    global calls
    if model.training and torch.is_grad_enabled():  # not what the first step tries out
        calls += 1
        if calls in events:
            for thread in threading.enumerate():
                if thread.name.startswith("checkpoint"):  # of two steps ago
                    thread.join()
            events[calls]()
    return next_token_loss(model, batch)


class CountingSGD(torch.optim.SGD):
    """Keeps a list in the state of the parameters."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = [*state.get("steps", []), group["lr"]]
        return super().step(closure)


class Opened(Samples):
    """Opens its file with the first sample that a process reads."""

    file: BinaryIO | None = None

    def __init__(self, path: str) -> None:
        super().__init__(False, 1.0)
        self.path = path

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.file is None:
            self.file = Path(self.path).open("rb", buffering=0)  # noqa: SIM115
        self.file.seek(index)
        time.sleep(0.002)
        assert self.file.read(1) == bytes([index])
        return super().__getitem__(index)


@functools.cache
def opened(path: str) -> Opened:
    return Opened(path)


def test_workers_share_no_file_that_validation_opens(tmp_path: Path) -> None:
    path = tmp_path / "indices"
    path.write_bytes(bytes(range(SIZE)))
    data = {"source": f"{__name__}:both", "options": {"path": str(path)}, "workers": 2}
    train(configuration(tmp_path / "run", data=data, steps=4))
    file = opened(str(path)).file
    assert file is not None
    file.close()


def both(split: str, sequence_length: int, path: str) -> Opened:
    return opened(path)


def test_optimizer_whose_state_cannot_be_saved_ends_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*tiny(tmp_path), f"--optim.name={__name__}:CountingSGD"]) == 1
    assert "CountingSGD keeps 'steps' of" in capsys.readouterr().err
    assert len(read_records(tmp_path / "run" / "steps.jsonl")) <= 1


def trained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what_happens: dict[int, Callable[[], object]],
    *arguments: str,
) -> int:
    """Train 10 steps of one microbatch in `tmp_path`/disk/run; return the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{__name__}.events", what_happens)
    monkeypatch.setattr(f"{__name__}.calls", 0)
    loss = f"--model.loss={__name__}:eventful_loss"
    fixed = [loss, "--batch.global-batch-size=2", "--steps=10", "--checkpoint.every=2"]
    return main(tiny(tmp_path, *fixed, "--run-dir=disk/run", *arguments))


def saved_steps(run_directory: Path) -> list[int]:
    """Return the steps of the checkpoints, all of which can be read."""
    steps = []
    for path in sorted((run_directory / "checkpoints").glob("step-*")):
        found = {"engine/counts": torch.zeros(3, dtype=torch.int64)}
        StoredCheckpoint(path).load(found)
        steps.append(StoredCheckpoint(path).state.numbers["step"])
        assert found["engine/counts"][0] == steps[-1]
    return steps


def failures(output: str) -> list[tuple[int, str, str]]:
    """Return step, cause and remaining checkpoint of each failed save that was reported."""
    lines = re.findall(r"NOT SAVED: cannot save \S+/step-(\d+): (.*?); (.*)", output)
    return [(int(step), cause, there_is) for step, cause, there_is in lines]


@pytest.mark.parametrize("asynchronous", ["asynchronous", nightly("no-asynchronous")])
def test_run_continues_on_full_disk_and_saves_later(
    asynchronous: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with disk(tmp_path / "disk", "size=8m") as directory:
        happens = {4: lambda: fill(directory), 8: lambda: (directory / "ballast").unlink()}
        code = trained(tmp_path, monkeypatch, happens, f"--checkpoint.{asynchronous}")
        output = capsys.readouterr().out
        assert code == 0, output
        failed = failures(output)
        assert [step for step, *_ in failed] == [4, 6]
        for _, cause, there_is in failed:
            assert "No space left on device" in cause
            assert there_is == "the last checkpoint is of step 2"
        assert saved_steps(directory / "run") == [8, 10]
        assert [r.step for r in read_records(directory / "run" / "steps.jsonl")] == [*range(1, 11)]


def test_run_without_final_checkpoint_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "disk", "size=8m") as directory:
        code = trained(tmp_path, monkeypatch, {6: lambda: fill(directory)})
        output = capsys.readouterr()
        assert code == 1, output.out
        assert [step for step, *_ in failures(output.out)] == [6, 8, 10]
        assert output.err.count("\n") == 1
        assert output.err.startswith("distmp: cannot save ")
        assert "the last checkpoint is of step 4" in output.err
        assert "held-out loss" in output.out, "the run continued to its end"
        assert saved_steps(directory / "run") == [2, 4]


@pytest.mark.nightly
def test_run_continues_while_directory_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "disk" / "run" / "checkpoints"
    happens = {6: lambda: mount(checkpoints, "ro"), 10: lambda: unmount(checkpoints)}
    try:
        assert trained(tmp_path, monkeypatch, happens) == 0
    finally:
        if checkpoints.is_mount():
            unmount(checkpoints)
    failed = failures(capsys.readouterr().out)
    assert [step for step, *_ in failed] == [6, 8]
    assert all("Read-only file system" in cause for _, cause, _ in failed)
    assert saved_steps(checkpoints.parent) == [4, 10]


@pytest.mark.nightly
def test_deleted_directory_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "disk" / "run"
    assert trained(tmp_path, monkeypatch, {6: lambda: shutil.rmtree(directory)}) == 0
    assert "steps.jsonl has vanished" in capsys.readouterr().out
    assert saved_steps(directory) == [8, 10]
    assert [record.step for record in read_records(directory / "steps.jsonl")] == [*range(6, 11)]


def test_run_starts_on_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "disk", "size=8m") as directory:
        (directory / "run").mkdir()
        fill(directory)
        assert trained(tmp_path, monkeypatch, {4: lambda: (directory / "ballast").unlink()}) == 0
        assert "config.yaml: [Errno 28]" in capsys.readouterr().out
        assert [r.step for r in read_records(directory / "run" / "steps.jsonl")] == [*range(1, 11)]


# What a training run prints and records about steps that overflow.


FP16 = ["--precision.policy=fp16", "--precision.loss-scale.init=16777216"]


def test_skipped_step_is_explained_in_record_and_console(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny(cwd, *FP16, "--steps=12")) == 0
    records = read_records(cwd / "run" / "steps.jsonl")
    skipped = [record for record in records if record.skipped]
    assert 0 < len(skipped) < len(records)
    output = capsys.readouterr().out.splitlines()
    for record in records:
        lines = [line for line in output if line.startswith(f"step {record.step} skipped: ")]
        assert len(lines) == (1 if record.skipped else 0)
        assert (record.overflow is not None) == record.skipped
    overflow = skipped[0].overflow
    assert overflow is not None
    assert (overflow["cause"], overflow["exact"]) == ("scale_too_high", True)
    assert overflow["parameters"][0]["name"].endswith("weight")
    assert f"step 1 skipped: {overflow['diagnosis']}; {overflow['advice']}" in output
    assert sum(line.count(overflow["advice"]) for line in output) == 1 < len(skipped)


def one_bad(split: str, sequence_length: int) -> list[tuple[Tensor, Tensor]]:
    samples = [(x.clone(), y) for x, y in faulty_runs.line("validation", sequence_length) * 8]
    if split == "train":
        samples[5][0].fill_(math.nan)
    return samples


def test_skipped_step_has_one_reason_and_finite_losses_no_warning(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"--data.source={__name__}:one_bad"
    assert main([*faulty_runs.ARGUMENTS, data, "--steps=8"]) == 0
    output = capsys.readouterr().out
    (line,) = (line for line in output.splitlines() if " skipped: " in line)
    assert "skipped: bad input: 4 inf or NaN among" in line
    place = re.search(r"on rank 0 in microbatch (\d+), first rows (\d+)$", line)
    (record,) = (record for record in read_records(cwd / "run" / "steps.jsonl") if record.skipped)
    assert place is not None
    # As the page on troubleshooting computes it.
    position = record.samples - 8 + 2 * int(place[1]) + int(place[2])
    assert sample_indices(load([]).seed, position, 1, 64) == [5]
    assert "the loss rose" not in output


def mean_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    loss, weight = faulty_runs.squared(model, batch)
    return loss / weight, weight


def test_mistakes_are_warnings_without_code(tmp_path: Path) -> None:
    options = ["--optim.lr=100", f"--model.loss={__name__}:mean_loss"]
    command = python("-m", "distmp.train", *faulty_runs.ARGUMENTS, *options)
    done = run([*command, "--steps=12"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("the loss looks like a mean, and its weight is 2, so ")
    assert done.stderr.count("\n") == 1, done.stderr
    rise = r"^warning: the loss rose from \S+ in step 1 to \S+ in step 12; lower optim\.lr = 100$"
    assert len(re.findall(rise, done.stdout, re.MULTILINE)) == 1, done.stdout
    resumed = run([*command, "--resume=auto", "--steps=15"], tmp_path)
    assert "the loss rose" not in resumed.stdout


@pytest.mark.nightly
def test_run_that_skips_every_step_names_layer(tmp_path: Path) -> None:
    fixed = "--precision.policy=fp16,loss_scale=16777216"
    (done,) = run_jobs([Job(tiny(tmp_path, *FP16, fixed, "--steps=60"))], tmp_path)
    assert 1 in done.exit_codes.values(), done
    messages = [line for line in done.stderr.splitlines() if line.startswith("distmp: ")]
    assert len(messages) == 1, done.stderr
    assert "max_consecutive_skips = 50: that many steps in a row" in messages[0]
    assert "loss scale 2^24 was too high" in messages[0]
    assert "first in the gradient of '" in messages[0]
    assert "on all 2 ranks" in messages[0]
    assert "lower the loss scale (init)" in messages[0]
    assert len(read_records(tmp_path / "0" / "run" / "steps.jsonl")) == 50


class AllIgnored:
    """Samples without a target that counts."""

    vocabulary_size = 50

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.arange(32), "targets": torch.full((32,), IGNORED)}


def all_ignored(split: str, sequence_length: int) -> AllIgnored:
    return AllIgnored()


@pytest.mark.usefixtures("cwd")
def test_run_without_targets_is_reported(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = [f"--data.source={__name__}:all_ignored"]
    assert main([*TINY, *data, "--steps=2", "--run-dir=run"]) == 1
    output, error = capsys.readouterr()
    lines = [line for line in output.splitlines() if " skipped: " in line]
    assert [line.split(":")[0] for line in lines] == ["step 1 skipped", "step 2 skipped"]
    assert all("the global weight is 0" in line for line in lines)
    assert ["check that batches have targets" in line for line in lines] == [True, False]
    assert "all 2 steps were skipped, so the weights after step 2 are the initial ones" in error
    assert "so start again without --resume" in error
    assert "all 2 steps were skipped" in caplog.records[-1].getMessage()


# When a run saves.


def saved(tmp_path: Path, *arguments: str) -> list[int]:
    """Train 6 steps; return the steps of the checkpoints."""
    assert main(tiny(tmp_path, "--steps=6", "--checkpoint.keep=99", *arguments)) == 0
    paths = sorted((tmp_path / "run" / "checkpoints").iterdir())
    return [StoredCheckpoint(path).state.numbers["step"] for path in paths]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [6]),
        nightly(["--checkpoint.every=4"], [4, 6]),
        nightly(["--checkpoint.every=3", "--checkpoint.no-asynchronous"], [3, 6]),
    ],
)
def test_checkpoints_are_saved_at_configured_steps(
    arguments: list[str], expected: list[int], cwd: Path
) -> None:
    assert saved(cwd, *arguments) == expected


def test_start_names_optimizer_and_its_weight_decay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = {"name": "sgd", "lr": 0.5}
    trainer_of(configuration(tmp_path, optim=optim, log={"console": "plain"}))
    assert "\noptimizer: sgd; lr 0.5, weight decay 0.1 of matrices\n" in capsys.readouterr().out
