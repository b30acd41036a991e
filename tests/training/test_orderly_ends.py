"""Runs that are asked to stop: the real trainer on real ranks, and jobs in processes."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import load
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training import train_as_rank
from distmp.training.callbacks import stopping
from distmp.training.callbacks.stopping import TimeLimit
from distmp.training.restarts import Restarts
from distmp.training.trainer import Trainer
from tests.checkpoint import listing
from tests.elastic import Job, run_jobs
from tests.ports import reserved_port
from tests.progress import wait_until
from tests.ranks import ranks, run_ranks
from tests.reference import assert_same_bits, snapshot
from tests.torchrun import TINY, corpus, environment, python, run
from tests.toys import trainer_of

STEPS = 8


def trainer(directory: Path, *arguments: str) -> Trainer:
    config = load(
        [
            *TINY,
            f"--data.path={directory / 'corpus'}",
            f"--run-dir={directory / 'run'}",
            f"--steps={STEPS}",
            *arguments,
        ]
    )
    return trainer_of(config)


def time_limit(trainer: Trainer) -> TimeLimit:
    return next(found for found in trainer.callbacks if isinstance(found, TimeLimit))


def set_time(trainer: Trainer, minutes: float, clock: Callable[[], float]) -> None:
    """Set the time limit of a job that started at 0 s, and what the time is."""
    limit = time_limit(trainer)
    limit._minutes, limit._job_started, limit._first_save = minutes, 0.0, 2.0
    stopping.time = SimpleNamespace(time=clock)  # type: ignore[assignment]


def around(function: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        before()
        return function(*arguments, **options)

    return wrapped


def uninterrupted(directory: Path) -> dict[str, torch.Tensor]:
    whole = trainer(directory, f"--run-dir={directory / 'whole'}")
    assert whole.run(StopSignals())
    return snapshot(whole.engine)


def stopped_and_resumed(directory: Path, number: int, target: int, step: int) -> None:
    """Signal one rank during a step, and again in the middle of the save that follows."""
    world = World.current("cpu")

    def send() -> None:
        if world.rank == target:
            os.kill(os.getpid(), number)

    with StopSignals() as stop:
        stopped = trainer(directory)
        stopped.engine.step = around(  # type: ignore[method-assign]
            stopped.engine.step, lambda: send() if stopped.progress.step + 1 == step else None
        )
        stopped.engine.state_dict = around(  # type: ignore[method-assign]
            stopped.engine.state_dict, lambda: send() if stopped.progress.step > step else None
        )
        assert not stopped.run(stop)
    assert (stop.received == number) == (world.rank == target)
    # The signal came after the step began: the next one passes the request to all ranks.
    assert stopped.progress.step == step + 1
    resumed = trainer(directory, "--resume=auto")
    assert resumed.progress.step == step + 1
    assert resumed.run(StopSignals())
    assert_same_bits(snapshot(resumed.engine), uninterrupted(directory))
    if world.rank == 0:
        records = read_records(directory / "run" / "steps.jsonl")
        assert [record.step for record in records] == [*range(1, STEPS + 1)]


def test_signal_to_any_rank_stops_and_saves_all(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    number = random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    target, step = random.randrange(2), random.randrange(1, STEPS - 1)
    sys.stdout.write(f"signal {number!r} to rank {target} in step {step}\n")
    run_ranks(stopped_and_resumed, 2, tmp_path, number, target, step)


@ranks(2)
def test_ranks_have_same_exit_code_after_ctrl_c_on_one() -> None:
    world, stop = World.current("cpu"), StopSignals()
    stop.received = (None, signal.SIGINT)[world.rank]
    assert train_as_rank._stopped(Restarts(None, 0, 0, 2), stop, world) == 130


@ranks(2)
def _time_is_over_on_rank_1(directory: Path) -> None:
    limited = trainer(directory, "--max-minutes=5")
    minutes = 5.0 if limited.world.rank == 1 else math.inf
    # A minute per step: in the fifth there is not enough time left for a save.
    set_time(limited, minutes, lambda: 60.0 * limited.progress.step)
    assert not limited.run(StopSignals())
    assert limited.progress.step == 6
    assert limited.checkpointing.writer.saved_step == 6
    # A job without any time left takes no step.
    late = trainer(directory, "--max-minutes=5", "--resume=auto")
    set_time(late, 5.0, lambda: 600.0)
    late.engine.step = lambda *_, **__: pytest.fail("a step")  # type: ignore[method-assign]
    assert not late.run(StopSignals())


def test_time_limit_stops_all_ranks(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    _time_is_over_on_rank_1(tmp_path)


def test_time_limit_is_reported_although_the_last_save_took_less_than_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus(tmp_path / "corpus")
    limited = trainer(tmp_path, "--max-minutes=5")
    monkeypatch.setattr(stopping, "time", stopping.time)  # restored at the end
    set_time(limited, 5.0, lambda: 200.0 if limited.progress.step >= 2 else 0.0)
    time_limit(limited)._first_save = 100.0  # until the first save is measured
    assert not limited.run(StopSignals())
    assert time_limit(limited).stop_reason(limited) is None
    assert "stopped after step 3 (max_minutes = 5)" in capsys.readouterr().out


@ranks(2)
def _stop_in_the_last_validation(directory: Path) -> None:
    stop = StopSignals()
    asked = trainer(directory)

    def ask() -> None:
        if asked.world.rank == 1 and asked.progress.step == STEPS:
            stop.received = signal.SIGTERM

    evaluate = asked.engine.evaluate_metrics
    asked.engine.evaluate_metrics = around(evaluate, ask)  # type: ignore[method-assign]
    assert not asked.run(stop)
    assert asked.progress.step == STEPS
    if asked.world.rank == 0:
        assert read_records(directory / "run" / "steps.jsonl")[-1].validation_loss is None
    resumed = trainer(directory, "--resume=auto")
    assert resumed.run(StopSignals())
    whole = trainer(directory, f"--run-dir={directory / 'whole'}")
    assert whole.run(StopSignals())
    if asked.world.rank == 0:
        *_, last = read_records(directory / "run" / "steps.jsonl")
        *_, expected = read_records(directory / "whole" / "steps.jsonl")
        assert (last.step, last.validation_loss) == (STEPS, expected.validation_loss)


@pytest.mark.nightly
def test_stopped_validation_is_repeated_after_resume(tmp_path: Path) -> None:
    corpus(tmp_path / "corpus")
    _stop_in_the_last_validation(tmp_path)


SIGNALLING = """
import os
import signal
from pathlib import Path

import torch

class Samples:
    def __init__(self, target, number):
        self.target, self.number, self.read = target, number, 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.read += 1
        # The fourth step of 8 samples on two ranks, which have compared 8 samples, read twice.
        if self.read == 29 and os.environ.get("RANK", "0") == str(self.target):
            with Path("signals").open("a") as file:
                file.write("sent ")
            os.kill(os.getpid(), self.number)
        return torch.randn(4), torch.randn(1)

def samples(split, sequence_length, target, number):
    return Samples(target, number) if split == "train" else None

def linear():
    return torch.nn.Linear(4, 1)

def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
"""


def signalling(directory: Path, target: int, number: int) -> list[str]:
    """A run on data that sends a signal to the rank that reads it."""
    (directory / "signalling.py").write_text(SIGNALLING)
    return [
        "--data.source=signalling:samples",
        f"--data.options={{target: {target}, number: {number}}}",
        "--model.name=signalling:linear",
        "--model.loss=signalling:squared",
        "--batch.global-batch-size=8",
        "--batch.microbatch-size=4",
        "--precision.policy=fp32",
        "--schedule.warmup-steps=0",
        "--steps=500",
        "--run-dir=run",
    ]


@pytest.mark.nightly
def test_ranks_restarted_after_stop_do_not_train(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    directory.mkdir()
    arguments = signalling(directory, random.randrange(2), signal.SIGUSR1)
    (done,) = run_jobs([Job(arguments, max_restarts=1)], tmp_path)
    assert_stopped_once(directory, done.stdout)
    assert 75 in done.exit_codes.values()
    assert "the run was stopped after a checkpoint and is not restarted" in done.stdout


@pytest.mark.nightly
def test_launch_returns_exit_code_of_ranks(tmp_path: Path) -> None:
    arguments = signalling(tmp_path, random.randrange(2), signal.SIGUSR1)
    launch = python("-m", "distmp", "launch", "--max-restarts=1", "--", *arguments)
    done = run(launch, tmp_path)
    assert_stopped_once(tmp_path, done.stdout)
    assert done.returncode == 75, done.stderr
    assert "distmp launch: stopped after a checkpoint" in done.stderr
    assert "Traceback" not in done.stderr


def assert_stopped_once(directory: Path, output: str) -> None:
    assert (directory / "signals").read_text() == "sent ", output
    checkpoint = listing.latest(directory / "run" / "checkpoints")
    assert checkpoint is not None
    step = StoredCheckpoint(checkpoint).state.numbers["step"]
    assert 4 <= step < 10
    assert f"stopped after step {step} (" in output
    assert not (directory / "run-2").exists()


@pytest.mark.nightly
def test_rank_waiting_for_others_ends_immediately(tmp_path: Path) -> None:
    """torchrun would wait half a minute for it, and let others start without it."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    command = python("-m", "distmp.train", *TINY, "--preflight=never")
    with reserved_port() as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables = {**environment(), **place, **where}
        with subprocess.Popen(command, cwd=tmp_path, env=variables) as rank:
            wait_until(lambda: rank.poll() is not None or _listens(port))
            assert rank.poll() is None
            rank.send_signal(signal.SIGTERM)
            try:
                assert rank.wait(30) == -signal.SIGTERM
            finally:
                rank.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)]
)
def test_single_process_exit_codes(
    number: int,
    expected: int,
    cwd: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(cwd)
    assert main(signalling(cwd, 0, number)) == expected
    assert (
        f"({signal.Signals(number).name}); continue with --resume auto" in capsys.readouterr().out
    )
    assert listing.latest(cwd / "run" / "checkpoints") is not None
