"""Two hosts on one machine, each with its own name, address and network.

    with two_hosts() as hosts:
        hosts.run(1, "hostname")  # node2

Everything runs in kernel namespaces (processes, network, host name, mounts), so it ends with the
first process and leaves nothing on the machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.progress import finished

NAMES = ("node1", "node2")
ADDRESSES = ("10.99.7.1", "10.99.7.2")
INTERFACE = "eth0"

_TOOLS = ("ip", "nsenter", "setpriv", "unshare")

# The first process of the namespaces is the first host; bash, because it reaps orphans.
_BOOT = """\
set -e
mount --bind "$1/hosts" /etc/hosts
if [ -e /etc/nsswitch.conf ]; then mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf; fi
mount -t tmpfs tmpfs /run
hostname "$2"
ip link set lo up
unshare --net --uts sleep infinity &
second=$!
while [ /proc/$second/ns/net -ef /proc/self/ns/net ]; do sleep 0.01; done
ip link add eth0 type veth peer name eth0 netns $second
ip address add 10.99.7.1/24 dev eth0
ip link set eth0 up
nsenter --target $second --net --uts sh -ec '
    hostname "$1"
    ip link set lo up
    ip address add 10.99.7.2/24 dev eth0
    ip link set eth0 up' boot "$3"
echo $second
wait $second
"""


class TwoHosts:
    """Runs commands on either host.

    Args:
        first: Process id of the first host, in the namespace of this process.
        second: Process id of the second host, in the namespace of the first host.
    """

    def __init__(self, first: int, second: int) -> None:
        first_host = ["nsenter", f"--target={first}", "--pid", "--mount", "--net", "--uts"]
        second_host = [*first_host, "nsenter", f"--target={second}", "--net", "--uts"]
        self._enter = (first_host, second_host)
        self.second = second

    def run(
        self,
        host: int,
        *command: str,
        cwd: Path | None = None,
        timeout: float = 60,
        **options: Any,
    ) -> str:
        """Run a command on host 0 or 1 and return what it printed.

        Args:
            host: 0 or 1.
            *command: What to run.
            cwd: Where.
            timeout: Seconds without progress, see `tests.progress`, after which it is killed.
            **options: For `subprocess.Popen`.

        Raises:
            AssertionError: If it fails, with what it printed.
            subprocess.TimeoutExpired: Without progress.
        """
        with subprocess.Popen(
            self.command(host, command, cwd),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        ) as process:
            output, _ = finished(process, timeout)
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
        return output

    def command(self, host: int, words: tuple[str, ...], cwd: Path | None = None) -> list[str]:
        """Return the command line that runs a command on host 0 or 1."""
        # nsenter leaves the working directory when it enters a mount namespace.
        return [*self._enter[host], f"--wd={cwd or Path.cwd()}", "--", *words]


def why_not() -> str | None:
    """Return why two hosts cannot be started, or None."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {', '.join(missing)} (Debian's iproute2 and util-linux)"
    trial = ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--uts", "ip", "link"]
    done = subprocess.run(trial, capture_output=True, text=True)
    return f"two hosts need namespaces: {done.stderr.strip()}" if done.returncode else None


@contextlib.contextmanager
def two_hosts(names: tuple[str, str] = NAMES) -> Iterator[TwoHosts]:
    """Start two hosts.

    Args:
        names: Names of the hosts; a name with a domain also works without the domain.
    """
    short = [name.partition(".")[0] for name in names]
    entries = zip(ADDRESSES, names, short, strict=True)
    lines = [" ".join(dict.fromkeys(entry)) for entry in entries]
    with tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        (Path(directory) / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # Names are looked up nowhere else.
        (Path(directory) / "nsswitch.conf").write_text("hosts: files\n")
        with _booted(directory, *short) as process:
            second = process.stdout.readline()  # type: ignore[union-attr]
            assert second, f"two hosts did not start: {process.communicate()[1]}"
            (first,) = psutil.Process(process.pid).children()
            yield TwoHosts(first.pid, int(second))


@contextlib.contextmanager
def _booted(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the first host. Its end, or that of this process, ends everything on both hosts."""
    command = ["setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--kill-child=KILL"]
    command += ["--pid", "--mount-proc", "--net", "--uts", "--mount"]
    with subprocess.Popen(
        [*command, "bash", "-c", _BOOT, "boot", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
