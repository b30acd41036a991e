"""Runs that are killed and restarted give the result of runs that are not."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from distmp.checkpoint import saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.settings import CheckpointConfig
from distmp.config import RunConfig
from distmp.distributed.progress import current_phase
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rendezvous_store import HashStore, PrefixStore, for_attempt
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.errors import ConfigError, TrainingError
from distmp.faults.watchdog import Ending, Watchdog
from distmp.optim.settings import OptimizerConfig
from distmp.telemetry.console import Console
from distmp.telemetry.records import RecordError, RecordWriter, read_records
from distmp.telemetry.settings import LogConfig
from distmp.training.restarts import MORE_MACHINES, RESTARTS_WITHOUT_GAIN, Restarts
from distmp.training.run import _Builder
from distmp.training.run_directory import RunDirectory, create_run
from distmp.training.run_lease import DirectoryChoice, this_job
from distmp.training.trainer import Trainer
from tests import elastic, faulty_runs
from tests.checkpoint import listing
from tests.elastic import Job, run_jobs
from tests.progress import kill_all, wait_until
from tests.ranks import ranks
from tests.reference import assert_same_bits
from tests.telemetry.samples import record
from tests.torchrun import environment, tiny, torchrun
from tests.training.test_resume import configuration, train

KILLS = 50
STEPS = 450
SEED = 20261121
LONG = [
    *(word for word in faulty_runs.ARGUMENTS if not word.startswith("--steps")),
    f"--steps={STEPS}",
    "--checkpoint.every=2",
    "--log.every=100",
    "--model.name=tests.training.test_restarts:Noisy",
]


class Noisy(torch.nn.Sequential):
    """A model whose loss depends on the random numbers of every step."""

    def __init__(self) -> None:
        width = 16
        super().__init__(
            torch.nn.Linear(faulty_runs.SIZE, width),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, faulty_runs.SIZE),
        )


def killed(arguments: list[str]) -> None:
    """Run a rank of `distmp.train`; in each of the first attempts one of the ranks is killed."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    chance = random.Random(SEED + attempt)
    victim = chance.randrange(int(os.environ["WORLD_SIZE"]))
    delay = chance.random()
    if attempt < KILLS and os.environ["RANK"] == str(victim):
        if attempt % 10 == 5:
            _kill_after(0.5 * delay, "start")
        elif attempt % 2:
            _kill_in_save(0.05 * delay)
        else:
            threading.Thread(target=_kill_in_step, args=(0.05 * delay,), daemon=True).start()
    elastic.train(arguments)


def _kill_after(seconds: float, when: str) -> None:
    def die() -> None:
        with Path("kills").open("a") as file:
            file.write(f"{when}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def _kill_in_save(seconds: float) -> None:
    """Kill this rank some time after the start of the attempt's second save."""
    own, saves = saving.save, []

    def save(*args: Any, **options: Any) -> Any:
        saves.append(args)
        if len(saves) == 2:
            _kill_after(seconds, "save")
        return own(*args, **options)

    saving.save = save  # type: ignore[assignment]


def _kill_in_step(seconds: float) -> None:
    """Kill this rank some time after the start of a step that no attempt has reached before.

    Too many attempts without a gain would end the run.
    """
    records = Path("run/steps.jsonl")
    reached = len(records.read_text().splitlines()) if records.exists() else 0
    first = 0
    while not first or current_phase.now.step < max(first, reached) + 3:
        first = first or current_phase.now.step
        time.sleep(0.001)
    _kill_after(seconds, "step")


@pytest.mark.nightly
def test_run_with_fifty_kills_agrees_with_uninterrupted(tmp_path: Path) -> None:
    jobs = [
        Job(LONG),
        Job(LONG, entry="tests.training.test_restarts:killed", max_restarts=KILLS + 10),
    ]
    uninterrupted, restarted = run_jobs(jobs, tmp_path, timeout=570)
    assert uninterrupted.exit_codes == {}
    assert restarted.exit_codes == {}, restarted.stderr
    kills = (tmp_path / "1" / "kills").read_text().split()
    assert len(kills) == KILLS
    assert set(kills) == {"start", "save", "step"}
    assert [path.name for path in (tmp_path / "1").glob("run*")] == ["run"]
    assert f"restart {KILLS} of {KILLS + 10}: " in restarted.stdout
    first, second = (listing.final_state(tmp_path / number / "run") for number in "01")
    assert_same_bits(second, first)
    for number in "01":
        checkpoint = listing.latest(tmp_path / number / "run" / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.name == f"step-{STEPS:06d}"
    losses = [
        [(entry.step, entry.loss) for entry in read_records(tmp_path / number / "run/steps.jsonl")]
        for number in "01"
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[1]] == list(range(1, STEPS + 1))


@pytest.mark.nightly
def test_torchrun_restarts_failed_run(tmp_path: Path) -> None:
    command = torchrun(*tiny(tmp_path, "--steps=60", "--checkpoint.every=5"))
    command.insert(command.index("-m", 3), "--max-restarts=3")
    with (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            for kill in range(2):
                _kill_a_rank(job, tmp_path / "run", after_step=12 + 20 * kill, rank=kill)
            assert job.wait() == 0
        finally:
            kill_all(job)
            job.wait()
        log.seek(0)
        output = log.read()
    assert re.search(r"restart 1 of 3: .*; continuing from step [1-9]", output), output
    assert re.search(r"restart 2 of 3: .*; continuing from step [1-9]", output), output
    assert "Traceback" not in output
    records = read_records(tmp_path / "run" / "steps.jsonl")
    assert [entry.step for entry in records] == list(range(1, 61))
    assert not (tmp_path / "run-2").exists()


def _kill_a_rank(job: subprocess.Popen[bytes], run: Path, after_step: int, rank: int) -> None:
    """Kill a rank once the run has reached a step."""
    records, line = run / "steps.jsonl", f'"step":{after_step},'
    wait_until(lambda: job.poll() is not None or (records.exists() and line in records.read_text()))
    assert job.poll() is None, "the run ended by itself"
    for process in psutil.Process(job.pid).children():
        if process.environ().get("RANK") == str(rank):
            process.kill()


@pytest.mark.nightly
def test_recurring_fault_ends_restarts(tmp_path: Path) -> None:
    job = Job(
        [*faulty_runs.ARGUMENTS, "--checkpoint.every=1"],
        entry="tests.faulty_runs:train",
        max_restarts=RESTARTS_WITHOUT_GAIN + 4,
        variables={"FAULT": "1 forward raise"},
    )
    # The fault comes in the third step of each attempt: with checkpoints the run advances.
    without = replace(job, arguments=[*job.arguments, "--checkpoint.every=0"])
    lucky, failed = run_jobs([job, without], tmp_path, timeout=150)
    assert lucky.exit_codes == {}
    assert 1 in failed.exit_codes.values()
    message = (
        f"{RESTARTS_WITHOUT_GAIN + 1} times in a row the run ended without a step beyond 2, the "
        "last time because of: ValueError: a fault of the model"
    )
    assert failed.stderr.count(message) == 1
    assert failed.stderr.count("Traceback") == RESTARTS_WITHOUT_GAIN + 1
    for restart in range(1, RESTARTS_WITHOUT_GAIN):
        line = f"restart {restart} of {job.max_restarts}: ValueError: a fault of the model; "
        assert failed.stdout.count(f"{line}there was no checkpoint yet") == 1
    assert [path.name for path in (tmp_path / "1").glob("run*")] == ["run"]


def attempt(memory: HashStore, count: int) -> Restarts:
    return Restarts(memory, count, 9, world_size=2)


def begun(directory: Path) -> tuple[RunDirectory, HashStore]:
    """Begin the first attempt of a new run."""
    run, memory = create_run(str(directory / "run")), HashStore()
    attempt(memory, 0).begin(run, None)
    return run, memory


def test_first_attempt_prints_no_message(tmp_path: Path) -> None:
    alone = Restarts.of_this_job(world_size=1)
    assert alone.resumes() is None
    assert alone.describe_attempt(3) is None
    assert alone.given_up() is None
    alone.begin(RunDirectory(tmp_path), None)


def test_restarted_run_continues_only_in_its_directory(tmp_path: Path) -> None:
    memory = HashStore()
    first = attempt(memory, 0)
    assert first.directory is None
    mine = create_run(str(tmp_path / "run"))
    first.begin(mine, None)
    # An unrelated run of the same name, newer and with a checkpoint.
    other = create_run(str(tmp_path / "run"))
    _pretend_checkpoint(other, 70)
    second = attempt(memory, 1)
    assert second.directory is not None
    assert second.directory.path == mine.path
    assert second.resumes() == ["auto"]
    second.begin(mine, None)
    assert attempt(memory, 2).resumes() == ["auto"]


def test_restart_uses_first_configuration(caplog: pytest.LogCaptureFixture) -> None:
    memory, place = HashStore(), CheckpointConfig(path="/first")
    secret = OptimizerConfig(options={"api_key": "hidden", "eps": 1e-8})
    first = RunConfig(steps=7, checkpoint=place, optim=secret)
    assert attempt(memory, 0).configuration(first, 0) is first
    other = replace(first, seed=2)  # on another machine: the preflight reports it
    assert attempt(memory, 0).configuration(other, 1) is other
    assert "hidden" not in str(attempt(memory, 1)._stored_value("configuration"))
    assert attempt(memory, 1).configuration(first, 1) is first
    assert not caplog.messages
    changed = replace(first, steps=9, checkpoint=CheckpointConfig(path="/second"))
    again = attempt(memory, 2)
    assert again.configuration(changed, 0) == first
    assert again.checkpoint_path == "/first"
    assert "changed since this job started (steps, checkpoint.path)" in caplog.text
    shorter = replace(first, optim=OptimizerConfig(options={"api_key": "hidden"}))
    assert attempt(memory, 3).configuration(shorter, 0) == first
    assert "changed since this job started (optim.options.eps)" in caplog.text


def test_restart_uses_current_secrets_in_lists_and_texts() -> None:
    def config(power: int, target: str) -> RunConfig:
        entries = [{"name": "m:C", "options": {"api_key": "k", "power": power}}]
        return RunConfig(callbacks=(*entries, {"name": "m:D", "options": {"target": target}}))

    memory, first = HashStore(), config(1, "host=db password=abc")
    attempt(memory, 0).configuration(first, 0)
    renewed = replace(config(2, "host=db password=new"), steps=9)
    assert attempt(memory, 1).configuration(renewed, 0) == config(1, "host=db password=new")
    changed = config(1, "host=other password=abc")
    message = r"^callbacks\[1\].options.target = 'host=db password=\*\*\*': .*change it back"
    with pytest.raises(ConfigError, match=message):
        attempt(memory, 2).configuration(changed, 0)
    shorter = replace(first, callbacks=first.callbacks[:1])
    with pytest.raises(ConfigError, match=r"^callbacks = .*which does not store secrets"):
        attempt(memory, 3).configuration(shorter, 0)


def test_second_run_of_one_process_is_refused() -> None:
    """The store has the keys of its first run, on which the ranks would wait forever."""
    memory, config = HashStore(), RunConfig()
    for count in range(2):
        attempt(memory, count).configuration(config, rank=1)
        with pytest.raises(ConfigError, match=r"second call.*new processes"):
            attempt(memory, count).configuration(config, rank=1)


def test_restart_before_first_save_uses_original_checkpoint(tmp_path: Path) -> None:
    """A run that resumed from an earlier checkpoint does not jump to a later one."""
    run, memory = create_run(str(tmp_path / "run")), HashStore()
    early, _ = _pretend_checkpoint(run, 10), _pretend_checkpoint(run, 30)
    attempt(memory, 0).begin(run, early)
    assert attempt(memory, 1).resumes() == [str(early)]
    # The process may be killed before its main thread notices that the save has ended.
    _pretend_checkpoint(run, 20, attempt(memory, 1).job())
    assert attempt(memory, 2).resumes() == ["auto", str(early)]


def test_restart_recognizes_checkpoints_of_its_job(tmp_path: Path) -> None:
    memory, config = HashStore(), configuration(tmp_path / "run", steps=3)
    train(config)
    resumed = replace(config, steps=4, resume="auto")
    console = Console(LogConfig(), quiet=True)
    run = Trainer(resumed, World.current("cpu"), console, restarts=attempt(memory, 0))
    (first,) = attempt(memory, 1).resumes() or []
    assert first.endswith("step-000003")
    assert run.run(StopSignals())
    assert attempt(memory, 1).resumes() == ["auto", first]


@ranks(2)
def test_rank_0_selects_checkpoint_of_restart(tmp_path: Path) -> None:
    """A process of the last attempt may save between the reads of two ranks."""
    rank, run, memory = dist.get_rank(), RunDirectory(tmp_path), HashStore()
    job = World.current("cpu").ranks.gather(attempt(memory, 0).job())[1]
    early, _ = _pretend_checkpoint(run, 10), _pretend_checkpoint(run, 20, job)
    attempt(memory, 0).begin(run, StoredCheckpoint(early))
    config, console = RunConfig(run_dir=str(tmp_path)), Console(LogConfig(), quiet=True)
    choice = DirectoryChoice(config, this_job("job"), str) if rank == 0 else None
    builder = _Builder(config, World.current("cpu"), console, attempt(memory, 1), choice)
    found = builder._find_checkpoint()
    assert found is not None
    assert found.path == early


def test_cause_of_last_attempt_is_reported(tmp_path: Path) -> None:
    memory = HashStore()
    attempt(memory, 0).begin(RunDirectory(tmp_path), None)
    assert "ranks were killed" in str(attempt(memory, 1).describe_attempt(0))
    store = PrefixStore("peers", for_attempt(memory, 0))
    Watchdog(store, RankEnvironment(1, 1, 2, 2), 9, 9).end_run(Ending(1, "a cause", 1))
    assert (
        attempt(memory, 1).describe_attempt(3) == "restart 1 of 9: a cause; continuing from step 3"
    )
    assert "a cause" not in str(attempt(memory, 2).describe_attempt(3))


def test_only_restarts_without_progress_count(tmp_path: Path) -> None:
    """Attempts that reach these steps, one after the other; the last one exceeds the limit."""
    run, memory = begun(tmp_path)
    reached = [5, 5, 3, 6, 6, 2, 6]
    for count, step in enumerate(reached, 1):
        run.records.unlink(missing_ok=True)
        with closing(RecordWriter(run.records, resume_after_step=0, warn=pytest.fail)) as records:
            records.write(record(step))
        if count < len(reached):
            attempt(memory, count).begin(run, None)
            assert attempt(memory, count).given_up() is None
        else:
            with pytest.raises(
                TrainingError, match=r"4 times in a row .* without a step beyond 6, the"
            ):
                attempt(memory, count).begin(run, None)
    assert attempt(memory, len(reached) + 1).given_up() == 1


def test_checkpoints_count_as_progress_where_no_record_can_be_written(tmp_path: Path) -> None:
    run, memory = begun(tmp_path)
    for count in range(1, 3 + RESTARTS_WITHOUT_GAIN):
        checkpoint: Any = SimpleNamespace(state=SimpleNamespace(step=10 * count))
        attempt(memory, count).begin(run, checkpoint)
        assert attempt(memory, count).given_up() is None


def test_attempt_that_is_killed_while_it_stores_its_progress_counts(tmp_path: Path) -> None:
    run, memory = begun(tmp_path)
    attempt(memory, 1)._store_value("reached", 5)
    attempt(memory, 2).begin(run, None)
    assert attempt(memory, 2)._stored_value("futile") == 1


def test_joining_and_leaving_machines_are_no_failures(tmp_path: Path) -> None:
    run, memory = begun(tmp_path)
    for count in range(1, 2 * RESTARTS_WITHOUT_GAIN):
        Restarts(memory, count, 9, world_size=1 + count % 2).begin(run, None)
        assert attempt(memory, count).given_up() is None


@pytest.mark.parametrize(
    ("received", "place", "follows"),
    [
        ((None, signal.SIGTERM), "wait_list", True),
        ((None, None), "wait_list", False),  # by `max_minutes` or a callback
        ((signal.SIGINT, signal.SIGTERM), "wait_list", False),
        ((signal.SIGTERM,), "redundancy_list", False),  # more than `--nnodes` admits
    ],
)
def test_stopped_run_starts_again_for_machines_that_torchrun_admits(
    received: tuple[int | None, ...], place: str, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, state = HashStore(), dynamic_rendezvous._RendezvousState()
    getattr(state, place).add(dynamic_rendezvous._NodeDesc("127.0.0.2", 1, 0))
    C10dRendezvousBackend(memory, "job").set_state(pickle.dumps(state))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert attempt(memory, 0).follows(received) is follows
    assert (attempt(memory, 1).cause() == MORE_MACHINES) is follows


def test_damaged_restart_record_is_reported_with_line(tmp_path: Path) -> None:
    run, memory = begun(tmp_path)
    run.records.write_text("damaged\n")
    with pytest.raises(RecordError, match=r"steps.jsonl, line 1: .* fix or delete that line"):
        attempt(memory, 1).begin(run, None)
    assert attempt(memory, 2).given_up() == 1


def _pretend_checkpoint(run: RunDirectory, step: int, job: str = "another job") -> Path:
    assert isinstance(run.checkpoints, Path)
    numbers = {"step": step, "job": job}
    found = saving.save(run.checkpoints, step, {"weight": torch.ones(1)}, numbers, keep=9)
    assert isinstance(found, Path)
    return found
