from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import get_args_parser

from distmp.errors import ConfigError
from distmp.launcher import local, orderly_stop
from distmp.launcher.local import default_ranks, launch, plan_here
from distmp.launcher.orderly_stop import OrderlyStop
from distmp.utils import processes
from tests.marks import nightly
from tests.progress import finished, kill_all, wait_until

LAUNCHER = """
import os, sys
from distmp.errors import DistmpError
from distmp.launcher import orderly_stop
from distmp.launcher.local import launch
orderly_stop._EXIT_SECONDS = float(os.environ.get("EXIT_SECONDS", orderly_stop._EXIT_SECONDS))
try:
    code = launch(sys.argv[1:-2], "tests.launcher.worker", sys.argv[-2:])
except DistmpError as error:
    sys.exit(f"distmp launch: {error}")
sys.exit(code)
"""
# A launch takes seconds (it imports torch), a stop one second of the worker; the machine may be
# busy. torchrun itself kills ranks after 30 seconds.
START_SECONDS = 60
STOP_SECONDS = 25
# What the launcher adds for one machine.
ALONE = "--standalone --local-addr=127.0.0.1"


@dataclass
class Launched:
    process: subprocess.Popen[str]
    directory: Path

    def ranks(self) -> list[int]:
        """Wait until both ranks have started and return their process ids."""
        wait_until(lambda: self.process.poll() is not None or len(self._started()) == 2)
        assert self.process.poll() is None, self.process.communicate()
        return [int(file.read_text().split()[0]) for file in self._started()]

    def _started(self) -> list[Path]:
        return [*self.directory.glob("*.rank")]

    def wait_for_signals(self, count: int) -> None:
        """Wait until both ranks of a worker that ignores signals have recorded `count` of them."""
        received = [self.directory / f"{rank}.received" for rank in range(2)]
        wait_until(lambda: all(f.exists() and len(f.read_text()) >= count for f in received))

    def finish(self, seconds: float = START_SECONDS) -> tuple[int, str]:
        """Return the launcher's exit code and the output of it and its ranks.

        Args:
            seconds: Without progress, see `tests.progress`, after which the test fails.
        """
        output, _ = finished(self.process, seconds)
        return self.process.returncode, output


@contextlib.contextmanager
def launched(ending: str, directory: Path, *torchrun_arguments: str) -> Iterator[Launched]:
    """Run the launcher as a process in a new session, as a terminal would."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *torchrun_arguments, ending, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        start_new_session=True,
    )
    try:
        yield Launched(process, directory)
    finally:
        kill_all(process)
        process.communicate()


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_successful_launch_returns_zero(tmp_path: Path) -> None:
    with launched("succeed", tmp_path, "--nproc-per-node", "2") as run:
        code, output = run.finish()
    assert code == 0
    threads = {file.read_text().split()[1] for file in tmp_path.glob("*.rank")}
    assert threads == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    # Only the command is logged: no banner of torchrun.
    command = f"torchrun {ALONE} --nproc-per-node 2 -m tests.launcher.worker succeed"
    interfaces = "GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME='=lo'"
    assert output.splitlines() == [
        f"distmp launch: OMP_NUM_THREADS={threads.pop()} {interfaces} {command} {tmp_path}"
    ]


@pytest.mark.parametrize(
    ("ending", "expected", "message"),
    [
        ("4", 4, "rank 1 failed with exit code 4"),
        nightly("2", 2, "rank 1 failed with exit code 2"),
        nightly("killed", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_failing_rank_is_named(ending: str, expected: int, message: str, tmp_path: Path) -> None:
    with launched(ending, tmp_path, "--nproc-per-node", "2") as run:
        ranks = run.ranks()
        code, output = run.finish()
    assert code == expected
    assert message in last_line(output)
    assert len(output.splitlines()) == 2, output
    assert not any(map(psutil.pid_exists, ranks))


def test_rank_exception_is_shown_once(tmp_path: Path) -> None:
    with launched("raise", tmp_path, "--nproc-per-node", "2") as run:
        code, output = run.finish()
    assert code == 1
    assert output.count("RuntimeError: the worker's own error") == 1
    assert output.count("Traceback") == 1
    assert "rank 1 failed with exit code 1" in last_line(output)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("", 0)) as server:
        yield server


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("127.0.0.1", []),
        nightly("localhost", ["--nnodes", "1:1"]),
        nightly(socket.gethostname(), ["--nnodes", "1"]),
        nightly(socket.gethostname(), ["--nnodes", "1:2"]),
        nightly("localhost", ["--rdzv-backend", "c10d"]),
    ],
)
def test_busy_port_is_one_message(
    head: str, options: list[str], listener: socket.socket, tmp_path: Path
) -> None:
    port = listener.getsockname()[1]
    arguments = ["--nproc-per-node", "2", "--rdzv-endpoint", f"{head}:{port}", *options]
    with launched("succeed", tmp_path, *arguments) as run:
        code, output = run.finish()
    assert code == 1
    assert "Traceback" not in output
    assert f"rendezvous port {port} of this machine is in use; end the process" in output
    assert "choose another" in output
    assert not list(tmp_path.glob("*.rank"))


@pytest.mark.parametrize(
    ("number", "everywhere", "expected"),
    [
        pytest.param(signal.SIGINT, True, 130, id="SIGINT to launcher and ranks"),
        nightly(signal.SIGINT, False, 130),
        pytest.param(signal.SIGTERM, False, 75, id="SIGTERM to the launcher"),
        nightly(signal.SIGUSR1, False, 75),
    ],
)
def test_signal_stops_ranks_orderly(
    number: signal.Signals, everywhere: bool, expected: int, tmp_path: Path
) -> None:
    # Neither torchrun's timeout nor its restarts apply.
    arguments = ["--nproc-per-node", "2", "--max-restarts", "2"]
    with launched("obey", tmp_path, *arguments) as run:
        ranks = run.ranks()
        for process in (run.process.pid, *ranks):
            os.kill(process, signal.SIGHUP)  # the terminal closes
        if everywhere:
            for rank in ranks:
                os.kill(rank, number)
        os.killpg(run.process.pid, number)
        code, output = run.finish(STOP_SECONDS)
    assert code == expected
    assert f"stopped by {number.name}" in last_line(output)
    assert "Traceback" not in output
    assert len(output.splitlines()) == 2, output
    assert not any(map(psutil.pid_exists, ranks))
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]
    # Each rank exited by itself.
    for file in ("0.stopped", "1.stopped"):
        assert str(int(number)) in (tmp_path / file).read_text().split()


@pytest.mark.nightly
def test_rank_that_stops_ends_all_without_restart(tmp_path: Path) -> None:
    """This happens on machines other than the one that received the signal."""
    arguments = ["--nproc-per-node", "2", "--max-restarts", "2"]
    with launched("obey", tmp_path, *arguments) as run:
        for rank in run.ranks():
            os.kill(rank, signal.SIGUSR2)
        code, output = run.finish(STOP_SECONDS)
    assert code == 75, output
    assert "stopped after a checkpoint" in last_line(output)
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        # torchrun sends SIGTERM too: only at the end is it known who sent it.
        (signal.SIGTERM, "was stopped by SIGTERM before it had started"),
        nightly(signal.SIGUSR1, "stopped by SIGUSR1; continue the run"),
    ],
)
def test_rank_killed_by_stop_signal_stopped_orderly(
    number: signal.Signals, message: str, tmp_path: Path
) -> None:
    """This happens to a rank that is still importing torch."""
    restarts = "0" if number == signal.SIGTERM else "2"
    arguments = ["--nproc-per-node", "2", "--max-restarts", restarts]
    with launched("sleep", tmp_path, *arguments) as run:
        os.kill(run.ranks()[0], number)
        code, output = run.finish()
    assert code == 75, output
    assert message in last_line(output)
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]


@pytest.mark.parametrize(
    ("ending", "expected", "message"),
    [
        ("obey", 75, "continue the run with --resume auto"),
        nightly("stop", 143, "ranks that did not exit in time were killed"),
    ],
)
def test_suspended_rank_is_continued_then_killed(
    ending: str, expected: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXIT_SECONDS", "1" if ending == "stop" else "60")
    with launched(ending, tmp_path, "--nproc-per-node", "2") as run:
        ranks = run.ranks()
        os.kill(ranks[1], signal.SIGSTOP)
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish(STOP_SECONDS / 3)
    assert code == expected, output
    assert message in last_line(output)
    assert not any(map(psutil.pid_exists, ranks))


def test_suspended_rank_ends_with_rank_that_fails(tmp_path: Path) -> None:
    with launched("sleep", tmp_path, "--nproc-per-node", "2") as run:
        ranks = run.ranks()
        os.kill(ranks[0], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGKILL)
        code, output = run.finish(STOP_SECONDS / 3)
    assert code == 128 + signal.SIGKILL, output
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.parametrize(
    ("received", "code", "cause"),
    [
        (signal.SIGTERM, 75, "by SIGTERM"),
        (None, 75, "after a checkpoint"),
        # A KeyboardInterrupt in a rank writes no checkpoint.
        (None, 130, "by SIGINT or KeyboardInterrupt in a rank"),
    ],
)
def test_stop_without_checkpoint_claims_none(
    received: signal.Signals | None, code: int, cause: str
) -> None:
    assert orderly_stop.cause_of_stop(received, code) == cause


def test_rank_that_ends_first_does_not_delay_signals_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, signalled = OrderlyStop(Namespace()), []

    def kill(rank: int, number: int) -> None:
        signalled.append(rank)
        stop._on_child_exit(signal.SIGCHLD, None)  # it has ended

    monkeypatch.setattr(orderly_stop, "_EXIT_SECONDS", 0.2)
    monkeypatch.setattr(orderly_stop, "running_ranks", lambda: [1, 2])
    monkeypatch.setattr(
        orderly_stop, "_exit_codes", lambda: {n: 75 if n in signalled else None for n in (1, 2)}
    )
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    with pytest.raises(SignalException):
        stop._forward(signal.SIGTERM, None)
    assert signalled == [1, 2]


SAVING = "trap 'sleep 1; echo > {0}.saved; exit' TERM; echo > {0}; while :; do sleep .1; done"


@pytest.mark.parametrize(("state", "saves"), [("HEALTHY", True), ("FAILED", False)])
def test_ranks_save_before_more_machines_join(state: str, saves: bool, tmp_path: Path) -> None:
    saved: list[bool] = []
    stop = OrderlyStop(Namespace(shutdown_timeout=30.0)).saving_first(
        lambda agent, group: saved.append((tmp_path / "rank.saved").exists())
    )
    words = ["sh", "-c", SAVING.format(tmp_path / "rank")]
    with subprocess.Popen(words, start_new_session=True) as rank:
        wait_until((tmp_path / "rank").exists)
        stop(None, Namespace(state=WorkerState[state]))
        rank.terminate()
    assert saved == [saves]


@pytest.mark.nightly
def test_rank_failing_after_orderly_stop_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The launcher waits for the ranks: torchrun would kill the second one immediately.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    with launched("fail late", tmp_path, "--nproc-per-node", "2") as run:
        run.ranks()
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish(2 * STOP_SECONDS)
    assert code == 4, output
    assert "stopped by SIGTERM, and a rank failed with exit code 4" in last_line(output)


@pytest.mark.nightly
def test_two_interrupts_return_interrupt_exit_code(tmp_path: Path) -> None:
    with launched("give up", tmp_path, "--nproc-per-node", "2") as run:
        run.ranks()
        run.process.send_signal(signal.SIGINT)
        run.wait_for_signals(1)
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish(STOP_SECONDS)
    assert code == 130, output
    assert "stopped by SIGINT" in last_line(output)


def test_repeated_signal_ends_all_ranks(tmp_path: Path) -> None:
    with launched("ignore", tmp_path, "--nproc-per-node", "2") as run:
        ranks = run.ranks()
        for count in (1, 2):
            run.process.send_signal(signal.SIGINT)
            run.wait_for_signals(count)  # two pending signals would merge into one
        run.process.send_signal(signal.SIGINT)
        code, output = run.finish(STOP_SECONDS)
    assert code == 130
    assert "Traceback" not in output
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.skipif(
    not any("--shutdown-timeout" in action.option_strings for action in get_args_parser()._actions),
    reason="this torchrun waits for half a minute",
)
@pytest.mark.nightly
def test_forced_stop_is_reported(tmp_path: Path) -> None:
    with launched("ignore", tmp_path, "--nproc-per-node", "2", "--shutdown-timeout", "1") as run:
        run.ranks()
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish(STOP_SECONDS)
    assert code == 143
    assert "ranks that did not exit in time were killed" in last_line(output)


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the variables that a launcher reads; those that it sets are restored at the end."""
    for name in [*os.environ]:
        if name.startswith(("PET_", "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "JOB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    return monkeypatch


def commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the torchrun command for these options of torchrun, without running it."""
    assert launch(arguments, "distmp.train", ["--seed", "1"]) == 0
    return last_line(capsys.readouterr().err).partition("torchrun ")[2]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], f"--nproc-per-node=3 {ALONE}"),
        (["--nproc_per_node", "2"], f"{ALONE} --nproc_per_node 2"),
        (["--standalone"], "--nproc-per-node=3 --local-addr=127.0.0.1 --standalone"),
        (["--nnodes", "1"], f"--nproc-per-node=3 {ALONE} --nnodes 1"),
        (["--master-port", "1234"], "--nproc-per-node=3 --master-port 1234"),
        (
            ["--rdzv-endpoint=localhost:0"],
            "--nproc-per-node=3 --local-addr=127.0.0.1 --rdzv-endpoint=localhost:0",
        ),
        (["--max-restarts", "1"], f"--nproc-per-node=3 {ALONE} --max-restarts 1"),
    ],
)
def test_torchrun_options_are_completed(
    arguments: list[str],
    command: str,
    unset: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unset.setattr(local, "default_ranks", lambda: (3, "for this test"))
    unset.setattr(local, "_run", lambda options: 0)
    assert commands(arguments, capsys) == f"{command} -m distmp.train --seed 1"


def test_number_of_ranks_follows_environment(
    unset: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unset.setattr(local, "_run", lambda options: int(options.nproc_per_node) - 4)
    unset.setenv("PET_NPROC_PER_NODE", "4")
    assert commands([], capsys).startswith(f"{ALONE} -m")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nproc-per-nod"], "expected one argument"),
        (["--nproc-per-node", "many"], "many"),
        (["--nproc-per-node", "0"], "at least 1"),
        (["--node-rank", "-1"], "must be 0 for the first machine"),
        (["--nnodes", "x"], "x"),
        (["--nnodes", "3:2"], "MIN <= MAX"),
        (["--optim.lr", "1"], "--optim.lr"),
        (["script.py"], "'script.py' is not an option"),
        ([f"--={5000 * 'x'}"], "ambiguous option"),
        (["--log-dir", "/proc/none"], "'/proc/none'"),
        (["--standalone", "--nnodes", "2"], "leave out --standalone"),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--local-ranks-filter", "x"], "must be a comma-separated list"),
    ],
)
def test_wrong_torchrun_options_are_one_message(
    arguments: list[str],
    problem: str,
    unset: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unset.setattr(local, "_run", lambda options: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError) as error:
        launch(arguments, "distmp.train", [])
    assert problem in str(error.value)
    assert len(str(error.value)) < 1000
    assert "usage" not in capsys.readouterr().err


def test_wrong_variable_of_torchrun_is_named(unset: pytest.MonkeyPatch) -> None:
    unset.setenv("PET_NNODES", "x")
    with pytest.raises(ConfigError, match="PET_NNODES=x"):
        launch([], "distmp.train", [])


@pytest.mark.parametrize(
    ("devices", "cores", "expected"), [(8, 64, 8), (1, 64, 1), (0, 64, 2), (0, 1, 1)]
)
def test_default_number_of_ranks(
    devices: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    ranks, reason = default_ranks()
    assert ranks == expected
    assert "CUDA" in reason


@pytest.mark.parametrize(
    ("devices", "cores", "given", "expected"),
    [(0, 8, None, "4"), (0, 1, None, "1"), (8, 4, None, "1"), (0, 8, "3", "3")],
)
def test_threads_per_rank_follow_cores(
    devices: int, cores: int, given: str | None, expected: str, unset: pytest.MonkeyPatch
) -> None:
    unset.setattr(torch.cuda, "is_available", lambda: devices > 0)
    unset.setattr(torch.cuda, "device_count", lambda: devices)
    unset.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    unset.setattr(local, "_run", lambda options: 0)
    if given is None:
        unset.delenv("OMP_NUM_THREADS")
    else:
        unset.setenv("OMP_NUM_THREADS", given)
    launch([], "distmp.train", [])
    assert os.environ["OMP_NUM_THREADS"] == expected


@dataclass
class Failure:
    exitcode: int
    timestamp: int


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        pytest.param([(1, 7), (-9, 7)], "rank 1 was killed by SIGKILL", id="the peer of a crash"),
        pytest.param([(3, 7), (1, 8)], "rank 1 failed with exit code 1", id="a lost peer"),
        pytest.param([(3, 7), (2, 7)], "or those of rank 0 on the first machine", id="set-up"),
        pytest.param([(3, 7)], "rank 0 ended because another rank was lost", id="another machine"),
        pytest.param([(143, 7), (143, 7)], "rank 0 was stopped by SIGTERM", id="orderly stop"),
        pytest.param([(255, 7)], "rank 0 failed with exit code 255", id="no such signal"),
        pytest.param([(-6, 7), (5, 7)], "rank 1 failed with exit code 5", id="NCCL's watchdog"),
        pytest.param([(-15, 7), (5, 7)], "rank 1 failed with exit code 5", id="torchrun's stop"),
        pytest.param([(-9, 40), (5, 7)], "rank 1 failed with exit code 5", id="torchrun's kill"),
        pytest.param([(5, 7), (5, 7)], "rank 0 failed with exit code 5", id="the first seen"),
        pytest.param([(-9, 7), (4, 6)], "rank 1 failed with exit code 4", id="a hang, then killed"),
        pytest.param([(-11, 7)], "rank 0 was killed by SIGSEGV; native code crashed", id="a crash"),
        pytest.param(
            [(-7, 7)],
            "rank 0 was killed by SIGBUS; usually shared memory is full on ",
            id="/dev/shm",
        ),
        pytest.param(
            [(-9, 7)], f"memory runs out (see dmesg on {os.uname().nodename})", id="a kill"
        ),
        pytest.param([(-3, 7)], "rank 0 was killed by SIGQUIT\n", id="no likely reason"),
        pytest.param(
            [(-15, 7), (-15, 7)],
            "rank 0 was stopped by SIGTERM before it had started",
            id="an early stop",
        ),
    ],
)
def test_exit_cause_is_reported(
    failures: list[tuple[int, int]], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    local._report({rank: Failure(*failure) for rank, failure in enumerate(failures)})  # type: ignore[misc]
    assert expected in capsys.readouterr().err


def test_ranks_and_threads_follow_cgroup_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)
    for quota, ranks, threads in ((None, 2, "4"), (3.5, 2, "1"), (0.5, 1, "1")):
        monkeypatch.setattr(processes, "core_quota", lambda root, quota=quota: quota)
        assert default_ranks()[0] == ranks
        plan = plan_here([])
        assert plan.variables["OMP_NUM_THREADS"].value == threads


def test_child_that_ignores_signals_is_killed() -> None:
    child = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    launcher = f"""
import subprocess, sys
from distmp.launcher import local
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
local._give_up("no machine has this address")
"""
    ended = subprocess.run([sys.executable, "-c", launcher], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == 1
    pid = int(ended.stdout)
    survives = psutil.pid_exists(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert not survives
