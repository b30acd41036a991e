"""A rank that fails, hangs or dies ends all of them, and the cause is reported once."""

from __future__ import annotations

import os
import platform
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distmp.config import RunConfig
from distmp.distributed.failing_together import explain_lost_peers
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.stopping import StopSignals
from distmp.errors import HANG_EXIT_CODE, LOST_PEER_EXIT_CODE, CheckpointError, SetupError
from distmp.train import main
from distmp.training import failures
from tests import faulty_runs
from tests.elastic import Done, Job, run_jobs
from tests.marks import nightly
from tests.torchrun import python, run

FAILURE_SECONDS = 30
WATCHED = "--watchdog-seconds=4"

# The fault, options of the run, and the rank that causes the end.
FAILING = {
    "others in a collective": ("1 forward raise", [], 1),
    "others in the data loader": ("1 forward raise, 0 data sleep", ["--data.workers=1"], 1),
    "others in a save": ("1 save raise", ["--checkpoint.every=2"], 1),
}
FAILING_TOO = {
    "first rank": ("0 forward raise", ["--strategy=fsdp"], 0),
    "all ranks at once": ("0 forward raise, 1 forward raise", [], None),
    "others in user code": ("1 forward raise, 0 forward sleep", [], 1),
    "others in validation": ("1 validation raise", ["--validation.every=2"], 1),
}
SAVING = "--checkpoint.every=2"
HANGING = {
    "asleep": ("0 forward sleep", [], 0, "step 3, forward of microbatch 1"),
    "in its data": ("1 data sleep", ["--strategy=fsdp"], 1, "step 3, loading data"),
    "in a save": (
        "1 save sleep",
        [SAVING, "--checkpoint.asynchronous=false"],
        1,
        "step 2, saving a checkpoint",
    ),
    "in the background": ("1 save sleep", [SAVING], 1, "step 4, saving a checkpoint"),
    "stopped": ("1 forward stop", [], 1, "step 3, forward of microbatch 1"),
    "in native code": ("0 forward spin", [], 0, "step 3, forward of microbatch 1"),
}
# The call in which the other rank waits.
WAITING = {
    "asleep": "work.wait (finish, distmp/buckets/reduction.py:",
    "in its data": "all_gather_single (all_gather_on_stream, distmp/distributed/collectives.py:",
    "in a save": "all_gather_object (gather, distmp/distributed/failing_together.py:",
    "in the background": "all_gather_object (gather, distmp/distributed/failing_together.py:",
    "stopped": "work.wait (finish, distmp/buckets/reduction.py:",
    "in native code": "work.wait (finish, distmp/buckets/reduction.py:",
}


def job(fault: str, *arguments: str, ranks: int = 2) -> Job:
    return Job(
        [*faulty_runs.ARGUMENTS, *arguments],
        entry="tests.faulty_runs:train",
        ranks=ranks,
        variables={"FAULT": fault},
    )


def seconds_after_the_fault(done: Done, directory: Path) -> float:
    return done.ended - max(float(file.read_text()) for file in directory.glob("fault-*"))


@pytest.mark.parametrize("cases", [FAILING, nightly(FAILING_TOO)], ids=["some", "others"])
def test_exception_ends_all_ranks_and_is_reported_once(
    cases: dict[str, tuple[str, list[str], int | None]], tmp_path: Path
) -> None:
    jobs = [job(fault, *arguments) for fault, arguments, _ in cases.values()]
    done = run_jobs(jobs, tmp_path, timeout=280)
    for number, (name, (_, _, rank)) in enumerate(cases.items()):
        output = done[number].stderr
        assert seconds_after_the_fault(done[number], tmp_path / str(number)) < FAILURE_SECONDS, name
        assert output.count("ValueError: a fault of the model") == 1, (name, output)
        assert output.startswith("distmp: rank "), (name, output)
        assert output.count("distmp:") == 1, (name, output)
        if rank is not None:
            assert output.startswith(f"distmp: rank {rank} of 2 failed:\n"), (name, output)
            assert done[number].exit_codes[rank] == 1, name


def test_lost_connection_to_a_server_is_reported_as_cause(tmp_path: Path) -> None:
    """All ranks run, so it was none to another rank."""
    faults = ["1 forward reset", "1 save reset"]
    jobs = [job(fault, "--checkpoint.every=2") for fault in faults]
    for done in run_jobs(jobs, tmp_path):
        assert done.stderr.startswith("distmp: rank 1 of 2 failed:\n"), done
        assert done.stderr.count("RuntimeError: upload to a server failed: Connection reset") == 1
        assert "in _reset\n" in done.stderr
        assert "another rank" not in done.stderr
        assert done.exit_codes[1] == 1


def test_index_out_of_range_names_step_and_line(tmp_path: Path) -> None:
    (done,) = run_jobs([job("1 forward index")], tmp_path)
    expected = (
        "distmp: an index is out of range on rank 1 in step 3 (samples 16 to 23 of the run): "
        "index out of range in self\n"
    )
    assert done.stderr.startswith(expected), done
    assert f"it was raised in {faulty_runs.__file__}:" in done.stderr
    assert done.exit_codes[1] == 1


def test_interrupted_rank_is_reported_instead_of_its_loss(tmp_path: Path) -> None:
    (done,) = run_jobs([job("1 forward interrupt")], tmp_path)
    assert done.stderr == (
        "distmp: interrupted by a second Ctrl-C or a KeyboardInterrupt, without saving a "
        "checkpoint\n"
    )
    assert done.exit_codes[1] == 130


@pytest.mark.gpu
def test_device_side_assert_names_the_steps_that_were_running(tmp_path: Path) -> None:
    (done,) = run_jobs([job("1 forward index")], tmp_path)
    first = done.stderr.splitlines()[0]
    assert first.startswith("distmp: an index is out of range on rank 1 in step "), done
    assert "step 3 (samples 16 to 23 of the run)" in first
    assert "device-side assert triggered" in first
    assert "set CUDA_LAUNCH_BLOCKING=1 and run it again to find the line" in done.stderr
    assert done.stderr.count("distmp:") == 1
    assert done.exit_codes[1] == 1
    assert seconds_after_the_fault(done, tmp_path / "0") < FAILURE_SECONDS


@pytest.mark.nightly
def test_hang_is_detected_and_described(tmp_path: Path) -> None:
    jobs = [job(fault, WATCHED, *arguments) for fault, arguments, _, _ in HANGING.values()]
    done = run_jobs(jobs, tmp_path, timeout=280)
    for number, (name, (_, _, late, doing)) in enumerate(HANGING.items()):
        output = done[number].stderr
        assert output.count("distmp: no rank has made progress for ") == 1, (name, output)
        assert output.count("is late") == 1, (name, output)
        assert f"rank {late} of 2 on {platform.node()} is late" in output, (name, output)
        assert doing in output, (name, output)
        assert f"rank {1 - late} waits in {WAITING[name]}" in output, (name, output)
        is_counted = "does not answer" not in output
        assert ("it has not started collective " in output) is is_counted, (name, output)
        assert HANG_EXIT_CODE in done[number].exit_codes.values(), name
    asleep, _, _, background, stopped, native = (result.stderr for result in done)
    assert "in _sleep\n" in asleep
    assert "in _sleep\n" in background
    assert "does not answer: its process is stopped (SIGSTOP" in stopped
    assert "holds the GIL in native code" in native
    assert "in _spin\n" in native


def test_ranks_that_exit_with_zero_are_failures(tmp_path: Path) -> None:
    """Their exit code 0 is neither success nor the end of the message."""
    exited, left = run_jobs([job("1 forward exit"), job("1 forward quit")], tmp_path, timeout=180)
    assert exited.stderr.startswith("distmp: rank 1 of 2 failed:\n")
    assert "RuntimeError: a function of this run called sys.exit(0)" in exited.stderr
    assert exited.stderr.count("distmp:") == 1
    assert "in _exit\n" in exited.stderr
    assert exited.exit_codes[1] == 1
    assert left.stderr.startswith("distmp: rank 1 ended without a message (process ")
    assert "or called os._exit" in left.stderr
    assert left.exit_codes == {0: 3}


@pytest.mark.nightly
def test_kills_hangs_and_early_ends_are_reported(tmp_path: Path) -> None:
    """A kill, no memory, a single rank that hangs, and a slow run that does not hang."""
    jobs = [
        job("1 forward kill"),
        job("1 forward allocate"),
        job("0 forward sleep", WATCHED, ranks=1),
        job("0 validation pause, 1 forward pause", WATCHED, "--validation.every=1"),
    ]
    killed, full, alone, slow = run_jobs(jobs, tmp_path, timeout=180)
    assert killed.stderr.count("distmp:") == 1
    assert killed.stderr.startswith("distmp: rank 1 ended without a message (process ")
    assert killed.exit_codes[1] == -9
    assert full.stderr.count("distmp:") == 1
    assert "Traceback" not in full.stderr
    assert "rank 1 of 2 ran out of main memory in step 3, forward of microbatch 1" in full.stderr
    assert "allocate memory" in full.stderr
    assert "batch.microbatch_size = 1 instead of 2" in full.stderr
    assert (
        f"rank 0 of 1 on {platform.node()} is late: step 2, forward of microbatch 1" in alone.stderr
    )
    assert alone.exit_codes == {0: HANG_EXIT_CODE}
    assert slow.exit_codes == {}
    assert slow.stderr == ""


@pytest.mark.nightly
def test_rank_that_stops_before_it_connects_is_named(tmp_path: Path) -> None:
    launcher = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    command = [*launcher, "tests.faulty_runs", *faulty_runs.ARGUMENTS, WATCHED]
    done = run(command, tmp_path, variables={"FAULT": "1 connect stop"})
    assert done.returncode != 0
    late = f"rank 1 of 2 on {platform.node()} is late and does not answer"
    assert f"{late}: its process is stopped" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["distmp.train", "distmp train", "distmp calibrate"])
def test_native_crash_shows_python_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "0 forward crash")
    done = run(python("-m", *command.split(), *faulty_runs.ARGUMENTS), tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert "in _crash\n" in done.stderr


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:552] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Connection reset by peer"), True),
        (dist.DistNetworkError("recv failed"), True),
        (dist.DistBackendError("NCCL error: remote process exited\nncclRemoteError: A call"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_lost_connection_is_distinguished_from_cause(error: Exception, lost: bool) -> None:
    assert failures.is_lost_connection(error) is lost
    wrapped = KeyError("what DCP makes of it")
    wrapped.__cause__ = error
    assert failures.is_lost_connection(wrapped) is lost


def test_single_process_has_no_peer_to_lose() -> None:
    with pytest.raises(RuntimeError, match=r"^Connection reset by peer$"), explain_lost_peers(None):
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(
    ("error", "rank", "local_rank", "reports"),
    [
        (CheckpointError("no"), 0, 0, True),
        (CheckpointError("no"), 2, 0, True),
        (SetupError({0: "no"}, 2), 2, 0, False),
        (SetupError({0: "no"}, 2), 0, 0, True),
        (ValueError("no"), 3, 1, True),
    ],
)
def test_disconnected_ranks_do_not_repeat_messages(
    error: Exception,
    rank: int,
    local_rank: int,
    reports: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(failures, "GRACE_SECONDS", 0.01)
    failures.report(RankEnvironment(rank, local_rank, 4, 2), error)
    assert (capsys.readouterr().err != "") is reports


def test_rank_reports_peer_lost_without_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(failures, "MESSAGE_SECONDS", 0.01)
    error = RuntimeError("Connection closed by peer")
    assert failures.report(RankEnvironment(1, 0, 2, 1), error) == LOST_PEER_EXIT_CODE
    assert capsys.readouterr().err == (
        "distmp: rank 1 of 2 stopped because it lost another rank, which left no message\n"
        "RuntimeError: Connection closed by peer\n"
    )


@pytest.mark.usefixtures("cwd")
def test_sigterm_does_not_suppress_error_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SIGTERM that arrives after the training loop, before the error is reported."""
    received = []
    own = failures.report

    def report(*arguments: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        received.append(StopSignals.last)
        return own(*arguments)

    def ended(number: int, _frame: Any) -> None:
        received.append(number)

    monkeypatch.setenv("FAULT", "0 forward raise")
    monkeypatch.setattr(failures, "report", report)
    before = signal.signal(signal.SIGTERM, ended)
    try:
        assert main(faulty_runs.ARGUMENTS) == 1
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM, signal.SIGTERM]
    assert StopSignals.last is None


def test_exit_does_not_wait_for_ended_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GRACE_SECONDS", 600)
    monkeypatch.setattr(failures, "is_orphan", lambda: True)
    assert failures.wait_to_be_ended()
    monkeypatch.setattr(failures, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(failures, "is_orphan", lambda: False)
    assert not failures.wait_to_be_ended()


def test_watchdog_of_single_process_ends_with_it() -> None:
    failures.watch(RankEnvironment(), seconds=100, first_seconds=100)
    before = time.monotonic()
    failures.stop_watching()
    assert time.monotonic() - before < 60


def test_watchdog_seconds_set_hang_limit() -> None:
    assert RunConfig(timeout_minutes=4).hang_seconds == 120
    assert RunConfig(watchdog_seconds=7).hang_seconds == 7
    assert RunConfig(watchdog_seconds=0).hang_seconds == 0
    for seconds in (-1.0, 600.0, float("nan")):
        with pytest.raises(ValueError, match=r"watchdog_seconds = .*use 0, or a number from 2"):
            RunConfig(watchdog_seconds=seconds)
