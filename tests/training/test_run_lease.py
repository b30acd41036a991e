"""Exactly one job owns a run directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from distmp.checkpoint import lease as leases
from distmp.checkpoint.lease import Lease, Owner
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.settings import CheckpointConfig
from distmp.config import RunConfig, load
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.telemetry.console import Console
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training.run_directory import RunDirectory
from distmp.training.run_lease import DirectoryChoice, LostLeaseError, RunLease
from distmp.training.trainer import Trainer
from distmp.utils.processes import ProcessIdentity
from tests.checkpoint import listing
from tests.elastic import Job, run_jobs
from tests.progress import kill_all, wait_until
from tests.reference import assert_same_bits
from tests.torchrun import environment, python, run, tiny

ELSEWHERE = ProcessIdentity("another machine", 7, "1")


def other(job: str, *scheduled: Any) -> Owner:
    return Owner(job, "node9", ELSEWHERE._replace(started=job), *scheduled)


def trainer(directory: Path, *arguments: str) -> Trainer:
    config = load(tiny(directory, f"--run-dir={directory / 'run'}", *arguments))
    return Trainer(config, World.current("cpu"), Console(config.log))


# Jobs in processes


@contextmanager
def job(directory: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a job; kill it and what it has started at the end."""
    with (directory / "stdout").open("w") as stdout:
        process = subprocess.Popen(
            python(*command),
            cwd=directory,
            env=environment(),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        with process:
            kill_all(process)


def records(directory: Path) -> list[int]:
    path = directory / "run" / "steps.jsonl"
    return [record.step for record in read_records(path)] if path.exists() else []


@pytest.mark.nightly
def test_second_equal_command_does_not_train(tmp_path: Path) -> None:
    options = ["--resume=auto", "--steps=20000", "--checkpoint.every=5"]
    arguments = ["distmp.train", *tiny(tmp_path, *options)]
    with job(tmp_path, "-m", *arguments) as first:
        wait_until(lambda: first.poll() is not None or len(records(tmp_path)) > 6)
        second = run(python("-m", *arguments), tmp_path)
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 75
        errors = first.stderr.read() if first.stderr else ""
    assert second.returncode == 2, second.stderr
    (message,) = [line for line in second.stderr.splitlines() if "distmp: run_dir" in line]
    begin = f"distmp: run_dir = '{tmp_path}/run': belongs to another job, which is running"
    assert message.startswith(begin)
    assert f"process {first.pid} on {os.uname().nodename}" in message
    assert "set another run_dir" in message
    done = records(tmp_path)
    assert done == list(range(1, len(done) + 1))
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.abandoned"))
    assert "vanished" not in errors + second.stderr


@pytest.mark.nightly
def test_stop_request_ends_wait_for_lease(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    Lease(tmp_path / "run", other("a")).claim()
    with job(tmp_path, "-m", "distmp.train", *tiny(tmp_path, "--resume=auto")) as waiting:
        output = tmp_path / "stdout"
        wait_until(lambda: waiting.poll() is not None or "; waiting until" in output.read_text())
        waiting.send_signal(signal.SIGTERM)
        errors = waiting.communicate()[1]
    assert waiting.returncode == 75, errors
    assert f"SIGTERM while waiting for run_dir = '{tmp_path}/run' (exit code 75)" in errors
    assert not (tmp_path / "run" / "lease-000002.json").exists()


@pytest.mark.nightly
def test_job_continues_after_killed_launcher(tmp_path: Path) -> None:
    """Its ranks save and end, and the next job waits for them; the result is that of one job."""
    arguments = tiny(tmp_path, "--steps=150", "--resume=auto")
    arguments += ["--checkpoint.every=10", "--preflight=never"]
    again = [*arguments, f"--run-dir={tmp_path / 'run'}"]
    with job(tmp_path, "-m", "distmp", "launch", "--", *again) as killed:
        wait_until(lambda: killed.poll() is not None or len(records(tmp_path)) > 10)
        ranks = _ranks(killed.pid)
        killed.kill()
        whole = [*arguments, f"--run-dir={tmp_path / 'whole'}"]
        continued, undisturbed = run_jobs([Job(again), Job(whole)], tmp_path)
    assert (continued.exit_codes, undisturbed.exit_codes) == ({}, {})
    assert "vanished" not in continued.stderr
    assert "(its launcher has ended); continue with" in (tmp_path / "stdout").read_text()
    assert len(ranks) == 2
    assert not [rank for rank in ranks if rank.is_running()]
    assert records(tmp_path) == list(range(1, 151))
    expected, found = (listing.final_state(tmp_path / name) for name in ("whole", "run"))
    assert_same_bits(found, expected)


def _ranks(launcher: int) -> list[psutil.Process]:
    children = psutil.Process(launcher).children()
    return [child for child in children if "RANK" in child.environ()]


STUCK = """
import time, torch
from pathlib import Path

class Stuck(torch.nn.Linear):
    calls = 0

    def __init__(self):
        super().__init__(4, 1)

    def forward(self, inputs):
        self.calls += 1
        if self.calls > 5:
            Path(f"stuck-{torch.distributed.get_rank()}").touch()
            while True:
                time.sleep(1)
        return super().forward(inputs)

def samples(split, sequence_length):
    return [(torch.ones(4), torch.ones(1))] * 64 if split == "train" else None

def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
"""


@pytest.mark.nightly
def test_ranks_blocked_in_step_end(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch += ["-m", "distmp.train", "--model.name=stuck:Stuck", "--model.loss=stuck:squared"]
    launch += ["--data.source=stuck:samples", "--batch.global-batch-size=8", "--run-dir=run"]
    launch += ["--batch.microbatch-size=4", "--precision.policy=fp32", "--preflight=never"]
    with job(tmp_path, *launch) as killed:
        wait_until(lambda: killed.poll() is not None or len(list(tmp_path.glob("stuck-*"))) == 2)
        ranks = _ranks(killed.pid)
        assert len(ranks) == 2
        killed.kill()
        errors = killed.communicate()[1]  # until the last rank has closed it
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    assert errors.count("has ended; its ranks end within 10 s") == 1


# One process


def test_replaced_job_ends_without_writing(tmp_path: Path) -> None:
    displaced = trainer(tmp_path, "--steps=50", "--checkpoint.every=1")
    assert displaced.lease is not None
    taken = Lease(displaced.directory.path, other("b"))
    step = displaced.engine.step

    def take(*arguments: Any, **options: Any) -> Any:
        if displaced.progress.step == 3:
            assert displaced.lease is not None
            assert taken._create(2)
            for own in displaced.lease._leases:
                own.renew()
        return step(*arguments, **options)

    displaced.engine.step = take  # type: ignore[method-assign]
    message = r"^run_dir = '.*/run' was taken over by another job \(process 7 on node9\), because"
    with pytest.raises(LostLeaseError, match=message):
        displaced.run(StopSignals())
    assert records(tmp_path) == [1, 2, 3]
    names = {path.name for path in displaced.directory.checkpoints.iterdir()}
    assert "step-000004" not in names
    assert leases.last_owner(displaced.directory.path) == taken._content.owner
    assert taken.is_valid


def test_checkpoint_of_replaced_job_does_not_appear(tmp_path: Path) -> None:
    displaced = trainer(tmp_path, "--steps=50")
    assert displaced.lease is not None
    displaced.checkpointing.save_now(displaced)
    assert Lease(displaced.directory.path, other("b"))._create(2)
    displaced.lease._leases[0].renew()
    displaced.progress.step = 1
    displaced.checkpointing.save_now(displaced)
    assert displaced.checkpointing.writer.saved_step == 0
    names = [path.name for path in displaced.directory.checkpoints.iterdir()]
    assert names == ["step-000000"]
    displaced.lease.release()


def test_ended_run_releases_its_directory(tmp_path: Path) -> None:
    first = trainer(tmp_path, "--steps=2")
    assert first.run(StopSignals())
    owner = leases.last_owner(tmp_path / "run")
    assert owner is not None
    assert owner.process == ProcessIdentity.of_this_process()
    assert b'"released"' in (tmp_path / "run" / "lease-000001.json").read_bytes()


def choice(directory: Path, job: Owner, resume: str | None = "auto") -> DirectoryChoice:
    return DirectoryChoice(RunConfig(run_dir=str(directory / "run"), resume=resume), job, str)


def begin(chosen: DirectoryChoice) -> RunDirectory:
    """Choose as `build_run` does; a directory to continue is one with a checkpoint."""
    directory = chosen.continued(None)
    if directory is None:
        directory = chosen.final(None)
        saved(directory)
    return directory


def saved(run: RunDirectory, step: int = 1) -> Path:
    """Create the directory of a checkpoint."""
    path = run.checkpoints / f"step-{step:06d}"
    path.mkdir(parents=True)
    return path


def test_run_does_not_continue_from_checkpoints_of_another_run(tmp_path: Path) -> None:
    """Two runs of the same name in different places, with one `checkpoint.path`."""
    place = CheckpointConfig(path=str(tmp_path / "shared"))

    def chosen(project: str, resume: str | None) -> DirectoryChoice:
        config = RunConfig(run_dir=str(tmp_path / project / "run"), resume=resume, checkpoint=place)
        return DirectoryChoice(config, other(project), str)

    first = chosen("first", None)
    assert first.final(None).checkpoints == tmp_path / "shared" / "run"
    first.release()
    message = f"shared/run has the checkpoints of the run {tmp_path}/first/run, and this is the run"
    with pytest.raises(ConfigError, match=message):
        chosen("second", "auto").continued(None)
    second = chosen("second", None)
    assert second.final(None).checkpoints == tmp_path / "shared" / "run-2"
    second.release()
    for project, name in (("first", "run"), ("second", "run-2")):
        again = chosen(project, "auto")
        continued = again.continued(None)
        assert continued is not None
        assert continued.path == tmp_path / project / name
        again.release()


@pytest.mark.parametrize(("again", "directory"), [(("1", 1), "run"), (("3", 0), "run-2")])
def test_requeued_job_continues_its_own_directory(
    again: tuple[str, int], directory: str, tmp_path: Path
) -> None:
    for name in ("1", "2"):
        job = choice(tmp_path, other(name, name, 0), resume=None)
        begin(job)
        job.release()
    third = choice(tmp_path, other("3", *again))
    assert begin(third).path.name == directory
    third.release()


def test_two_new_runs_use_two_directories(tmp_path: Path) -> None:
    jobs = [choice(tmp_path, other(name), resume=None) for name in "ab"]
    assert [begin(job).path.name for job in jobs] == ["run", "run-2"]
    for job in jobs:
        job.release()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LOOKS", 3000)
    monkeypatch.setattr(leases, "RENEWALS", 3000)


@pytest.mark.usefixtures("_patient")
def test_concurrent_start_in_same_directory_is_refused(tmp_path: Path) -> None:
    first, second = (choice(tmp_path, other(name)) for name in "ab")
    assert first.continued(None) is None
    assert second.continued(None) is None
    assert first.final(None).path.name == "run"
    with pytest.raises(ConfigError, match="process 7 on node9"):
        second.final(None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    first.release()


def test_late_start_after_ended_run_is_refused(tmp_path: Path) -> None:
    first, second = (choice(tmp_path, other(name)) for name in "ab")
    assert first.continued(None) is None
    assert second.continued(None) is None
    assert first.final(None).path.name == "run"
    first.release()
    with pytest.raises(ConfigError, match="has ended; start this one again to continue"):
        second.final(None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert second.lease is None


def messages_of(chosen: DirectoryChoice) -> list[str]:
    lines: list[str] = []
    chosen._log = lines.append
    return lines


def start(directory: Path, name: str, resume: str | None = None) -> RunDirectory:
    """Choose a directory as a job that ends without a step."""
    job = choice(directory, other(name), resume)
    job.continued(None)
    found = job.final(None)
    job.release()
    return found


def test_refused_run_leaves_directory_to_next_one(tmp_path: Path) -> None:
    for name in "ab":
        refused = start(tmp_path, name)
        assert refused.path.name == "run"
    refused.checkpoints.mkdir()
    for early in (refused.config, refused.manifest, refused.log(0)):
        early.parent.mkdir(exist_ok=True)
        early.write_text("{}")
    refused.records.touch()
    for name, resume in (("c", "auto"), ("d", None)):
        job = choice(tmp_path, other(name), resume)
        lines = messages_of(job)
        job.continued(None)
        assert job.final(None).path == refused.path
        job.release()
        assert lines == []
    (refused.path / "notes.txt").touch()
    assert start(tmp_path, "e").path.name == "run-2"


@pytest.mark.parametrize("used", ["a step", "a checkpoint", "a job"])
def test_used_directory_is_not_taken(used: str, tmp_path: Path) -> None:
    first = choice(tmp_path, other("a"), resume=None)
    run = first.final(None)
    if used == "a step":
        run.records.write_text("{}\n")
    if used == "a checkpoint":
        saved(run)
    if used != "a job":
        first.release()
    second = choice(tmp_path, other("b"), resume=None)
    lines = messages_of(second)
    assert second.final(None).path.name == "run-2"
    assert lines == [f"{tmp_path}/run is taken; this run writes to {tmp_path}/run-2"]
    for job in (first, second):
        job.release()


def test_newest_run_with_checkpoint_is_continued(tmp_path: Path) -> None:
    first = start(tmp_path, "a")
    saved(first)
    refused = choice(tmp_path, other("b"), resume=None)
    later = refused.final(None)
    later.records.write_text("{}\n")
    saved(later, step=0)
    again = choice(tmp_path, other("c"))
    lines = messages_of(again)
    refused.release()
    continued = again.continued(None)
    assert continued is not None
    assert continued.path == first.path
    assert lines == [f"{later.path} has no checkpoint; continuing in {first.path}"]
    again.release()


@pytest.mark.usefixtures("_patient")
def test_run_without_checkpoint_is_not_passed_over_while_it_trains(tmp_path: Path) -> None:
    saved(start(tmp_path, "a"))
    running = choice(tmp_path, other("b"), resume=None)
    assert running.final(None).path.name == "run-2"
    with pytest.raises(ConfigError, match="run-2': belongs to another job"):
        choice(tmp_path, other("c")).continued(None)
    running.release()


def test_named_checkpoint_is_continued_in_its_directory(tmp_path: Path) -> None:
    path = saved(start(tmp_path, "a"))
    for number in (2, 3):
        found = start(tmp_path, f"b{number}")
        saved(found)
    assert found.path.name == "run-3"
    job = choice(tmp_path, other("c"), resume=str(tmp_path / "run"))
    assert job.continued(None) is None
    assert job.final(StoredCheckpoint(path)).path == tmp_path / "run"
    job.release()


def test_refused_checkpoint_path_does_not_train_without_lease(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x"
    assert main(tiny(tmp_path, f"--run-dir={tmp_path / 'run'}", f"--checkpoint.path={path}")) == 2
    assert capsys.readouterr().err.startswith(f"distmp: checkpoint.path = {str(path)!r}: cannot")
    assert not caplog.records


def test_records_without_checkpoint_warn(tmp_path: Path) -> None:
    first = choice(tmp_path, other("a"), resume=None)
    earlier = first.final(None)
    earlier.records.write_text("{}\n")
    first.release()
    lines: list[str] = []
    config = RunConfig(run_dir=str(tmp_path / "run"), resume="auto")
    again = DirectoryChoice(config, other("b"), lines.append)
    continued = again.continued(None)
    assert continued is not None
    assert continued.path == earlier.path
    assert again.final(None).path.name == "run-2"
    again.release()
    assert lines == [
        f"{earlier.path} is taken, but has no checkpoint to continue from, so training starts from "
        f"the beginning; this run writes to {earlier.path}-2"
    ]


@pytest.mark.usefixtures("_patient")
def test_directory_without_checkpoint_stays_leased_until_save(tmp_path: Path) -> None:
    """Of two jobs that continue a run that never saved, one trains."""
    (tmp_path / "run").mkdir()
    first, second = (choice(tmp_path, other(name)) for name in "ab")
    assert first.continued(None) is not None
    with pytest.raises(ConfigError, match="belongs to another job"):
        second.continued(None)
    assert first.final(None).path.name == "run"
    with pytest.raises(ConfigError, match="belongs to another job"):
        second.continued(None)
    first.release()


@pytest.mark.usefixtures("_patient")
def test_checkpoints_in_other_directory_have_lease(tmp_path: Path) -> None:
    """Two machines whose run directories are on their own disks."""
    shared = str(tmp_path / "shared")
    here, there = (
        RunDirectory(tmp_path / machine / "run", shared) for machine in ("here", "there")
    )
    first = RunLease(here, other("a"))
    first.claim(str)
    with pytest.raises(ConfigError, match="belongs to another job"):
        RunLease(there, other("b")).claim(str)
    first.release()
    second = RunLease(there, other("b"))
    second.claim(pytest.fail)
    second.release()


def test_training_continues_if_lease_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    lease = RunLease(RunDirectory(tmp_path / "file" / "run"), other("a"))
    lease.claim(pytest.fail)
    lease.check()
    lease.release()
    assert "a second job with this run_dir is not detected" in caplog.text
