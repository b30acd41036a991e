"""Two hosts on this machine: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.torchrun import environment

NAMES = ("one", "two")
ADDRESSES = ("10.99.7.1", "10.99.7.2")
# Of the machine, which all other work shares.
PATIENCE_SECONDS = 240
_CONFIGURATION = Path("/etc/netns")
_numbers = itertools.count()


class Agent:
    """`distmp launch` on one of the hosts."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process = process
        self.output = output

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until the agent or its ranks have written something."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def finish(self, seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        """Return the exit code and all that the agent and its ranks have written."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished after {seconds:g} s:\n{self.text()}", pytrace=False)
        return code, self.text()


@dataclass
class TwoHosts:
    """Hosts 0 and 1, called one and two; each knows the other's name."""

    namespaces: tuple[str, ...]
    links: tuple[str, ...]
    folder: Path
    agents: list[Agent] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, host: int, *words: str) -> list[str]:
        """Return the command that runs another on a host, under the host's own name."""
        named = f'hostname {NAMES[host]} && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespaces[host]]
        return [*inside, "unshare", "--uts", "sh", "-c", named, "sh", *words]

    def launch(self, host: int, *words: str, **variables: str) -> Agent:
        """Start `distmp launch` on a host."""
        output = self.folder / f"output-{next(_numbers)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                self.command(host, sys.executable, "-m", "distmp", "launch", *words),
                cwd=self.folder,
                env={**_without_schedulers(environment()), **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.agents.append(Agent(process, output))
        return self.agents[-1]

    def hold(self, host: int, *words: str) -> subprocess.Popen[bytes]:
        """Run a command on a host until the end of the test."""
        process = subprocess.Popen(self.command(host, *words))
        self.others.append(process)
        return process

    def cut(self) -> None:
        """Pull the cable out of host 1."""
        _ip("-n", self.namespaces[1], "link", "set", self.links[1], "down")

    def mend(self) -> None:
        _ip("-n", self.namespaces[1], "link", "set", self.links[1], "up")

    def close(self) -> None:
        """Leave no process, namespace, link or file behind, whatever happened."""
        for namespace in self.namespaces:
            pids = subprocess.run(
                ["ip", "netns", "pids", namespace], capture_output=True, text=True
            ).stdout
            for pid in pids.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in (*(agent.process for agent in self.agents), *self.others):
            process.kill()
            process.wait()
        for namespace in self.namespaces:
            # The links go with their namespaces.
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            shutil.rmtree(_CONFIGURATION / namespace, ignore_errors=True)
        with contextlib.suppress(OSError):
            _CONFIGURATION.rmdir()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Build two hosts and a cable; skips the test where that is not permitted."""
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    unique = f"{os.getpid()}-{next(_numbers)}"
    namespaces = tuple(f"distmp-{unique}-{name}" for name in NAMES)
    # The kernel takes 15 characters.
    links = tuple(f"d{unique}-{host}" for host in range(2))
    hosts = TwoHosts(namespaces, links, folder)
    try:
        try:
            for namespace in namespaces:
                _ip("netns", "add", namespace)
            _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
        for host in range(2):
            _set_up(hosts, host)
        yield hosts
    finally:
        hosts.close()


def _set_up(hosts: TwoHosts, host: int) -> None:
    namespace, link = hosts.namespaces[host], hosts.links[host]
    _ip("link", "set", link, "netns", namespace)
    _ip("-n", namespace, "addr", "add", f"{ADDRESSES[host]}/24", "dev", link)
    for interface in ("lo", link):
        _ip("-n", namespace, "link", "set", interface, "up")
    # `ip netns exec` puts them in place of the machine's: nobody is asked for names.
    files = _CONFIGURATION / namespace
    files.mkdir(parents=True)
    known = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
    (files / "nsswitch.conf").write_text("hosts: files\n")


def _without_schedulers(variables: dict[str, str]) -> dict[str, str]:
    foreign = ("PET_", "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "JOB_", "GLOO_", "NCCL_")
    return {name: value for name, value in variables.items() if not name.startswith(foreign)}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
