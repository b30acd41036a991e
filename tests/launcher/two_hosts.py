"""`distmp launch` on simulated hosts whose connections can be cut."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import two_hosts as machine
from tests.progress import wait_until
from tests.torchrun import environment

# Generous, because the machine may be busy.
TIMEOUT_SECONDS = 240
NAMES = ("one", "two", "three")
_numbers = itertools.count()


class Agent:
    """`distmp launch` on one of the hosts."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process = process
        self.output = output

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until a text appears in the output of the agent or its ranks."""
        wait_until(lambda: self.process.poll() is not None or text in self.text(), self.text)
        assert text in self.text(), self.text()

    def finish(self, seconds: float = TIMEOUT_SECONDS) -> tuple[int, str]:
        """Return the exit code and the output of the agent and its ranks."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished after {seconds:g} s:\n{self.text()}", pytrace=False)
        return code, self.text()


class TwoHosts:
    """Hosts 0, 1 and so on, named one, two and so on; each resolves the others' names."""

    links = (machine.INTERFACE, machine.INTERFACE)

    def __init__(self, hosts: machine.TwoHosts, directory: Path) -> None:
        self.directory = directory
        self._hosts = hosts
        self._started: list[subprocess.Popen[str]] = []

    def launch(self, host: int, *words: str, mounts: str = "", **variables: str) -> Agent:
        """Start `distmp launch` on a host, after shell commands that change only its mounts."""
        output = self.directory / f"output-{next(_numbers)}"
        alone = ("unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh") if mounts else ()
        with output.open("w") as file:
            process = self._start(
                host,
                *(*alone, sys.executable, "-m", "distmp", "launch", *words),
                env={**_without_schedulers(environment()), **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Agent(process, output)

    def hold(self, host: int, *words: str) -> None:
        """Run a command on a host until the end of the test."""
        self._start(host, *words)

    def run(self, host: int, *words: str) -> str:
        """Run a command on a host and return its output."""
        return self._hosts.run(host, *words)

    def listening(self, host: int) -> set[str]:
        """Return the addresses on which the processes of a host listen."""
        lines = self._hosts.run(host, "ss", "-tlnH").splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    def cut(self, host: int = 1) -> None:
        """Take the interface of a host down."""
        self._hosts.run(host, "ip", "link", "set", machine.INTERFACE, "down")

    def reconnect(self, host: int = 1) -> None:
        """Take the interface of a host up again."""
        self._hosts.run(host, "ip", "link", "set", machine.INTERFACE, "up")

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def _start(self, host: int, *words: str, **options: Any) -> subprocess.Popen[str]:
        command = self._hosts.command(host, words, self.directory)
        process = subprocess.Popen(command, text=True, **options)
        self._started.append(process)
        return process


@contextlib.contextmanager
def two_hosts(directory: Path, names: tuple[str, ...] = NAMES[:2]) -> Iterator[TwoHosts]:
    """Start hosts, or skip the test where that is not permitted."""
    reason = machine.why_not()
    if reason is not None:
        pytest.skip(reason)
    with machine.two_hosts(names) as started:
        hosts = TwoHosts(started, directory)
        try:
            yield hosts
        finally:
            hosts.close()


def _without_schedulers(variables: dict[str, str]) -> dict[str, str]:
    foreign = ("PET_", "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "JOB_", "GLOO_", "NCCL_")
    return {name: value for name, value in variables.items() if not name.startswith(foreign)}
