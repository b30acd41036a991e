"""Two or more hosts on one machine, each with its own name, address and network.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.progress import finished

NAMES = ("node1", "node2")
ADDRESSES = ("10.99.7.1", "10.99.7.2")
INTERFACE = "eth0"

_TOOLS = ("ip", "nsenter", "setpriv", "unshare")

# The first process of the namespaces is the first host; bash, because it reaps orphans. Two hosts
# are connected directly, more of them by a switch: a bridge in a namespace of its own.
_BOOT = """\
set -e
mount --bind "$1/hosts" /etc/hosts
if [ -e /etc/nsswitch.conf ]; then mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf; fi
mount -t tmpfs tmpfs /run
shift
start() {
    unshare "$@" sleep infinity &
    started=$!
    while [ /proc/$started/ns/net -ef /proc/self/ns/net ]; do sleep 0.01; done
}
hosts=($$)
for name in "${@:2}"; do start --net --uts; hosts+=($started); done
if [ $# = 2 ]; then
    ip link add eth0 type veth peer name eth0 netns ${hosts[1]}
else
    start --net
    on_switch="nsenter --target $started --net"
    $on_switch ip link add bridge type bridge
    $on_switch ip link set bridge up
    for host in ${hosts[@]}; do
        ip link add eth0 netns $host type veth peer name port$host netns $started
        $on_switch ip link set port$host master bridge up
    done
fi
for host in ${hosts[@]}; do
    nsenter --target $host --net --uts sh -ec '
        hostname "$1"
        ip link set lo up
        ip address add 10.99.7.$2/24 dev eth0
        ip link set eth0 up' boot "$1" $((++number))
    shift
done
echo ${hosts[@]:1}
wait
"""


class TwoHosts:
    """Runs commands on the hosts.

    Args:
        first: Process id of the first host, in the namespace of this process.
        others: Process ids of the other hosts, in the namespace of the first host.
    """

    def __init__(self, first: int, others: Sequence[int]) -> None:
        first_host = ["nsenter", f"--target={first}", "--pid", "--mount", "--net", "--uts"]
        inner = [["nsenter", f"--target={other}", "--net", "--uts"] for other in others]
        self._enter = [first_host, *([*first_host, *words] for words in inner)]
        self.second = others[0]

    def run(
        self, host: int, *command: str, cwd: Path | None = None, timeout: float = 60, **options: Any
    ) -> str:
        """Run a command on a host and return what it printed.

        Args:
            host: Its number, from 0 on.
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
        """Return the command line that runs a command on a host."""
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
def two_hosts(names: tuple[str, ...] = NAMES) -> Iterator[TwoHosts]:
    """Start two hosts, or as many as there are names.

    Args:
        names: Names of the hosts; a name with a domain also works without the domain.
    """
    short = [name.partition(".")[0] for name in names]
    addresses = [f"10.99.7.{number}" for number in range(1, len(names) + 1)]
    entries = zip(addresses, names, short, strict=True)
    lines = [" ".join(dict.fromkeys(entry)) for entry in entries]
    with tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        (Path(directory) / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # Names are looked up nowhere else.
        (Path(directory) / "nsswitch.conf").write_text("hosts: files\n")
        with _booted(directory, *short) as process:
            others = process.stdout.readline()  # type: ignore[union-attr]
            assert others, f"the hosts did not start: {process.communicate()[1]}"
            (first,) = psutil.Process(process.pid).children()
            yield TwoHosts(first.pid, [int(pid) for pid in others.split()])


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
