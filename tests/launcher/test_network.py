from __future__ import annotations

import socket
import time

import psutil
import pytest

from distmp.launcher.network import AddressError, Network, is_loopback, join_port
from tests.launcher.networks import network


@pytest.fixture
def this_machine() -> Network:
    return Network.of_this_machine()


def test_interfaces_agree_with_this_machine(this_machine: Network) -> None:
    assert set(this_machine.interfaces) <= set(psutil.net_if_addrs())
    assert this_machine.interfaces["lo"][0] == "127.0.0.1"
    assert this_machine.interface_of("127.0.0.1") == "lo"
    # 127.0.0.0/8 is this machine, and nothing else is.
    assert this_machine.is_own("127.0.1.1")
    assert not this_machine.is_own("192.0.2.1")
    assert this_machine.interface_of("192.0.2.1") is None


def test_names(this_machine: Network) -> None:
    assert is_loopback(this_machine.resolve("localhost"))
    assert this_machine.resolve("192.0.2.1") == "192.0.2.1"
    assert this_machine.resolve("fd00::1") == "fd00::1"
    with pytest.raises(AddressError, match=r"'no\.such\.invalid'"):
        this_machine.resolve("no.such.invalid")
    with pytest.raises(AddressError, match="has no address"):
        this_machine.resolve("x" * 300)


def test_ipv4_precedes_ipv6(this_machine: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(socket.AF_INET6, ("fd00::1", 0, 0, 0)), (socket.AF_INET, ("10.0.0.1", 0))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", at) for family, at in entries]
    )
    assert this_machine.resolve("both") == "10.0.0.1"


def test_route_to_own_address_is_loopback(this_machine: Network) -> None:
    assert this_machine.source("127.0.0.1") == "127.0.0.1"


def test_unresolved_names_are_retried() -> None:
    answers = [None, None, "10.0.0.1"]
    lines: list[str] = []

    def resolve(name: str) -> str:
        answer = answers.pop(0)
        if answer is None:
            raise AddressError(name)
        return answer

    late = Network("here", {}, resolve, lambda address: address)
    assert late.with_retries(60, lines.append).resolve("n1") == "10.0.0.1"
    assert lines == ["waiting for 'n1' to get an address, up to 60 s"]


def test_name_resolution_retries_are_limited() -> None:
    started = time.monotonic()
    with pytest.raises(AddressError, match="'n9'"):
        network().with_retries(0.2, lambda message: None).resolve("n9")
    assert time.monotonic() - started >= 0.2


def test_addresses_and_ports_are_formatted() -> None:
    assert join_port("10.0.0.1", 5) == "10.0.0.1:5"
    assert join_port("fd00::1", 5) == "[fd00::1]:5"
