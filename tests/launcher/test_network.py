from __future__ import annotations

import socket
import time

import psutil
import pytest

from distmp.launcher.network import AddressError, Network, is_loopback, join_port
from tests.launcher.networks import network


@pytest.fixture
def here() -> Network:
    return Network.of_this_machine()


def test_interfaces_are_those_of_this_machine(here: Network) -> None:
    assert set(here.interfaces) <= set(psutil.net_if_addrs())
    assert here.interfaces["lo"][0] == "127.0.0.1"
    assert here.interface_of("127.0.0.1") == "lo"
    # All of 127.0.0.0/8 is this machine, and nothing else is.
    assert here.is_own("127.0.1.1")
    assert not here.is_own("192.0.2.1")
    assert here.interface_of("192.0.2.1") is None


def test_names(here: Network) -> None:
    assert is_loopback(here.resolve("localhost"))
    assert here.resolve("192.0.2.1") == "192.0.2.1"
    assert here.resolve("fd00::1") == "fd00::1"
    with pytest.raises(AddressError, match=r"'no\.such\.invalid'"):
        here.resolve("no.such.invalid")
    with pytest.raises(AddressError, match="has no address"):
        here.resolve("x" * 300)


def test_ipv4_goes_first(here: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, ("fd00::1", 0, 0, 0)), (socket.AF_INET, ("10.0.0.1", 0))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", at) for family, at in found]
    )
    assert here.resolve("both") == "10.0.0.1"


def test_the_way_to_oneself_is_the_loopback(here: Network) -> None:
    assert here.source("127.0.0.1") == "127.0.0.1"


def test_the_way_elsewhere_begins_at_an_own_address(here: Network) -> None:
    try:
        address = here.default_address()
    except AddressError:
        pytest.skip("no default route")
    assert here.interface_of(address) is not None


def test_no_default_route_is_an_error() -> None:
    with pytest.raises(AddressError, match="no default route"):
        network(interfaces={"lo": ("127.0.0.1",)}).default_address()


def test_patience_with_names_that_appear_later() -> None:
    answers = [None, None, "10.0.0.1"]
    said: list[str] = []

    def resolve(name: str) -> str:
        answer = answers.pop(0)
        if answer is None:
            raise AddressError(name)
        return answer

    late = Network("here", {}, resolve, lambda address: address)
    assert late.patient(60, said.append).resolve("n1") == "10.0.0.1"
    assert said == ["waiting for 'n1' to get an address, up to 60 s"]


def test_patience_ends() -> None:
    started = time.monotonic()
    with pytest.raises(AddressError, match="'n9'"):
        network().patient(0.2, lambda message: None).resolve("n9")
    assert time.monotonic() - started >= 0.2


def test_ports_behind_addresses() -> None:
    assert join_port("10.0.0.1", 5) == "10.0.0.1:5"
    assert join_port("fd00::1", 5) == "[fd00::1]:5"
