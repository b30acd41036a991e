"""A run on simulated hosts, with handles on its launchers and ranks."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from tests.checkpoint import listing
from tests.launcher.two_hosts import NAMES, Agent, TwoHosts, two_hosts
from tests.progress import wait_until
from tests.torchrun import TINY, corpus, run, torchrun

CHECKPOINT_EVERY = 10


class Cluster:
    """The same run on each host.

    Args:
        hosts: The simulated hosts.
        count: Number of hosts.
        directory: Contains data, outputs and the run.
        options: Options of the launcher.
        settings: Settings of the run.

    Attributes:
        undo: Undoes a fault when it is time, and returns whether it has; None without a fault.
    """

    def __init__(
        self, hosts: TwoHosts, count: int, directory: Path, options: list[str], settings: list[str]
    ) -> None:
        self.count = count
        self.directory = directory
        self.undo: Callable[[], bool] | None = None
        self.agents: list[Agent] = []
        self.outputs: list[list[Path]] = [[] for _ in range(count)]
        self._hosts = hosts
        nodes = [] if any(o.startswith("--nnodes") for o in options) else [f"--nnodes={count}"]
        self._words = [*nodes, "--nproc-per-node=1", "--rdzv-endpoint=one:29400", *options]
        self._words += ["--", *settings_of(directory), *settings]

    def start(self) -> None:
        """Start the run on all hosts."""
        self.agents = [self._launch(host) for host in range(self.count)]

    def restart(self, host: int) -> None:
        """Start the run on one host again, as a scheduler does that replaces a machine."""
        self.agents[host] = self._launch(host)

    def cut(self, host: int) -> None:
        self._hosts.cut(host)

    def reconnect(self, host: int) -> None:
        self._hosts.reconnect(host)

    def on_host(self, host: int, *words: str) -> None:
        """Run a command on a host."""
        self._hosts.run(host, *words)

    def kill(self, host: int, what: str) -> None:
        """Kill the rank, the launcher, or all processes of a host."""
        processes = self.processes(host)
        for process in processes if what == "host" else [self.process(host, what)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def process(self, host: int, what: str) -> psutil.Process:
        """Return the "rank" or the "launcher" of a host.

        Raises:
            psutil.NoSuchProcess: If there is none.
        """
        for process in self.processes(host):
            with contextlib.suppress(psutil.Error):
                if (what == "rank") == ("RANK" in process.environ()):
                    return process
        raise psutil.NoSuchProcess(self.agents[host].process.pid)

    def processes(self, host: int) -> list[psutil.Process]:
        """Return the Python processes below the launcher of a host, the launcher first."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.agents[host].process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "distmp" in " ".join(process.cmdline()) and process.name() != "nsenter":
                        found.append(process)
        return found

    def running(self) -> list[int]:
        """Return the hosts whose launcher runs."""
        return [host for host, agent in enumerate(self.agents) if agent.process.poll() is None]

    def text(self, host: int) -> str:
        """Return what the launchers and ranks of a host have printed."""
        return "".join(path.read_text(errors="replace") for path in self.outputs[host])

    def report(self) -> str:
        """Return everything that was printed, for a failure."""
        return "\n".join(
            f"=== {NAMES[host]}\n{self.text(host)[-6000:]}" for host in range(self.count)
        )

    def step(self) -> int:
        """Return the last step that has a record."""
        return max((step for directory in self.runs() for step in steps(directory)), default=0)

    def runs(self) -> list[Path]:
        return sorted(self.directory.glob("run*"))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.report)

    def _launch(self, host: int) -> Agent:
        agent = self._hosts.launch(host, *self._words)
        self.outputs[host].append(agent.output)
        return agent


@contextlib.contextmanager
def cluster(
    count: int, directory: Path, options: list[str], settings: list[str]
) -> Iterator[Cluster]:
    """Yield a run on hosts; it is not started yet."""
    directory.mkdir(parents=True, exist_ok=True)
    with two_hosts(directory, NAMES[:count]) as hosts:
        yield Cluster(hosts, count, directory, options, settings)


def settings_of(directory: Path) -> list[str]:
    """Return the settings of a run in a directory. The batch fits one, two and three ranks."""
    return [
        *(word for word in TINY if not word.startswith("--batch.global")),
        "--batch.global-batch-size=12",
        f"--data.path={corpus(directory / 'data')}",
        f"--run-dir={directory / 'run'}",
        f"--checkpoint.every={CHECKPOINT_EVERY}",
        "--log.every=1000",
    ]


def undisturbed(directory: Path, ranks: int, settings: list[str]) -> dict[str, torch.Tensor]:
    """Return the final weights of a run on one machine that nothing disturbs."""
    directory.mkdir(parents=True)
    done = run(torchrun(*settings_of(directory), *settings, ranks=ranks), directory, timeout=300)
    assert done.returncode == 0, done.stderr
    return listing.final_state(directory / "run")


def check_result(cluster: Cluster, expected: dict[str, torch.Tensor], last_step: int) -> None:
    """Check that a finished run has lost nothing and has the weights of an undisturbed one."""
    (directory,) = [path for path in cluster.runs() if last_step in steps(path)]
    assert steps(directory) == list(range(1, last_step + 1)), f"steps are missing in {directory}"
    state = listing.final_state(directory)
    assert state.keys() == expected.keys()
    differing = [name for name in state if not torch.equal(state[name], expected[name])]
    assert not differing, f"other weights than those of an undisturbed run: {differing}"


def steps(directory: Path) -> list[int]:
    """Return the steps of a run that have a record."""
    file = directory / "steps.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def messages(text: str) -> list[str]:
    """Return the lines of an output that distmp printed about a problem."""
    return re.findall(r"^distmp(?: launch)?: (?!OMP_NUM|NCCL_|GLOO_).*", text, flags=re.MULTILINE)
