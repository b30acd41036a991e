"""The two simulated hosts that other tests use clean up after themselves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.two_hosts import ADDRESSES, NAMES, two_hosts, why_not

NETWORK = Path("/sys/class/net")
TABLE = Path("/etc/hosts")


@pytest.fixture(autouse=True)
def _permitted() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def test_hosts_have_names_and_addresses() -> None:
    with two_hosts() as hosts:
        for host, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            assert hosts.run(host, "hostname").strip() == name
            assert f" {address}/24 " in hosts.run(host, "ip", "address")
            assert hosts.run(1 - host, "getent", "hosts", name).split() == [address, name]
            assert hosts.run(host, "pwd", cwd=Path("/usr")).strip() == "/usr"


def test_failed_command_shows_its_output() -> None:
    with two_hosts() as hosts, pytest.raises(AssertionError, match="ended with 3:\nwhy"):
        hosts.run(1, "sh", "-c", "echo why; exit 3")


def test_two_hosts_remove_processes_and_interfaces() -> None:
    interfaces, table = set(NETWORK.iterdir()), TABLE.read_text()
    before = psutil.Process().children(recursive=True)
    with contextlib.suppress(InterruptedError), two_hosts() as hosts:
        # A process that is detached from its parents, as daemons are.
        hosts.run(1, "sh", "-c", "setsid sleep 600 > /dev/null 2>&1 & touch /run/something")
        processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if process not in before
        ]
        assert any("600" in process.cmdline() for process in processes)
        raise InterruptedError("a test that fails in the middle")
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert set(NETWORK.iterdir()) == interfaces
    assert TABLE.read_text() == table
    assert not Path("/run/something").exists()
