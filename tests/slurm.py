"""A real Slurm cluster of two nodes on this machine, `node1` and `node2` of tests/two_hosts.py."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import two_hosts
from tests.two_hosts import NAMES, TwoHosts

_DAEMONS = ("munged", "slurmctld", "slurmd")

# The "GPUs" of the two nodes are plain files that are never opened.
_GPUS = 8

# Final states of a job.
_ENDS = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=node1
NodeName=node[1-2] CPUs={cores} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES
AuthType=auth/munge
# A requeued job starts again after its old credential has expired.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
GresTypes=gpu
SelectType=select/cons_tres
ProctrackType=proctrack/linuxproc
# The job file requests it.
JobRequeue=0
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=5
"""


def why_not() -> str | None:
    """Return why a cluster cannot be started, or None."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    if missing:
        return f"Slurm needs {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "starting a Slurm cluster needs root"
    return two_hosts.why_not()


# Several times what Slurm needs on a quiet machine.
PATIENCE_SECONDS = 600


class Cluster:
    """Runs Slurm commands like a user on the first node."""

    def __init__(self, hosts: TwoHosts, directory: Path) -> None:
        self.directory = directory
        self._hosts = hosts
        self._environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a command on the first node, with additional environment variables."""
        environment = {**self._environment, **variables}
        return self._hosts.run(0, *command, cwd=cwd, env=environment)

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, Reason, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, state: str) -> dict[str, str]:
        """Wait until a job is in a state, and return what Slurm knows of it then.

        Raises:
            AssertionError: If it ends in another state, or takes longer; with all logs.
        """
        awaited = {state, *_ENDS}
        wait_until(lambda: self.job(number)["JobState"] in awaited, self.logs)
        job = self.job(number)
        assert job["JobState"] == state, f"{job}\n{Path(job['StdOut']).read_text()}\n{self.logs()}"
        return job

    def nodes(self) -> list[str]:
        """Return the state of each node."""
        return self.run("sinfo", "--Node", "--noheader", "--format=%T").split()

    def logs(self) -> str:
        """Return the logs of Slurm's daemons, for the message of a failed test."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name} ---\n{log.read_text()}" for log in logs)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start munged, slurmctld and a slurmd on each node; all of them end with the hosts."""
    with (
        # Not in pytest's directories: the path of a socket is limited to 107 characters.
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name,
        two_hosts.two_hosts() as hosts,
    ):
        directory = Path(name)
        _configure(directory)
        ours = Cluster(hosts, directory)
        ours.run(*_munged(directory))
        ours.run("slurmctld", "-c")
        for host in range(len(NAMES)):
            environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
            hosts.run(host, "slurmd", env=environment)
        wait_until(
            lambda: ours.run("sinfo", "-hN", "-o", "%T").split() == ["idle", "idle"], ours.logs
        )
        yield ours


def _configure(directory: Path) -> None:
    (directory / "slurm.conf").write_text(
        _CONFIGURATION.format(directory=directory, gpus=_GPUS, cores=os.cpu_count())
    )
    gpus = directory / "gpus"
    gpus.mkdir()
    for number in range(_GPUS):
        (gpus / f"gpu{number}").touch()
    (directory / "gres.conf").write_text(f"Name=gpu File={gpus}/gpu[0-{_GPUS - 1}]\n")
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def _munged(directory: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    files["seed-file"] = "seed"
    # --force: the directory above, /tmp, may be written by all.
    return [
        "munged",
        "--force",
        *(f"--{name}={directory}/munge.{end}" for name, end in files.items()),
    ]


def wait_until(condition: Callable[[], bool], state: Callable[[], str] = str) -> None:
    """Wait for a condition.

    Slurm's daemons are no children of ours whose progress could be seen, so the time is limited,
    to several times what Slurm needs on a busy machine.

    Raises:
        AssertionError: If it does not come true in time; `state` describes the situation.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {PATIENCE_SECONDS} s:\n{state()}"
        time.sleep(0.1)
