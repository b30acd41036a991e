"""Resolve names, list this machine's interfaces, and find the route to another machine."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distmp.distributed.limits import source_address
from distmp.errors import DistmpError

_RETRY_SECONDS = 1.0


class AddressError(DistmpError):
    """A name does not resolve, or no route leads to an address."""

    exit_code = 2


@dataclass(frozen=True)
class Network:
    """A machine's names and addresses; tests replace the functions.

    Attributes:
        hostname: This machine's name, with its domain if it has one.
        interfaces: The addresses of each interface, see the function `interfaces`.
        resolve: Returns the address of a name; an address resolves to itself. Raises AddressError.
        source: Returns this machine's source address for a destination. Raises AddressError.
    """

    hostname: str
    interfaces: Mapping[str, tuple[str, ...]]
    resolve: Callable[[str], str]
    source: Callable[[str], str]

    @classmethod
    def of_this_machine(cls) -> Network:
        """Read the interfaces as they are now."""
        return cls(socket.getfqdn(), interfaces(), _resolve, _source)

    def with_retries(self, seconds: float, log: Callable[[str], None]) -> Network:
        """Return a copy that retries names which do not resolve yet.

        Args:
            seconds: How long to retry.
            log: Called once with a message if it has to wait.
        """
        return replace(self, resolve=lambda name: _wait_for(self.resolve, name, seconds, log))

    def is_own(self, address: str) -> bool:
        """Whether an address is one of this machine's."""
        return is_loopback(address) or self.interface_of(address) is not None

    def interface_of(self, address: str) -> str | None:
        """Return the interface that has an address, or None."""
        for name, addresses in self.interfaces.items():
            if any(_same(address, own) for own in addresses):
                return name
        return "lo" if is_loopback(address) and "lo" in self.interfaces else None

    def describe_interfaces(self) -> str:
        """Return the interfaces and their addresses for a message."""
        return ", ".join(
            f"{name} ({', '.join(addresses)})" for name, addresses in self.interfaces.items()
        )


def external_addresses(interfaces: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the first address of each interface that is neither loopback nor link-local."""
    own = (next(filter(_is_external, addresses), None) for addresses in interfaces.values())
    return [address for address in own if address is not None]


def _is_external(address: str) -> bool:
    own = ipaddress.ip_address(address)
    return not (own.is_loopback or own.is_link_local)


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def join_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wait_for(
    resolve: Callable[[str], str], name: str, seconds: float, log: Callable[[str], None]
) -> str:
    deadline = time.monotonic() + seconds
    logged = False
    while True:
        try:
            return resolve(name)
        except AddressError:
            if time.monotonic() >= deadline:
                raise
        if not logged:
            log(f"waiting for {name!r} to get an address, up to {seconds:g} s")
            logged = True
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _same(first: str, second: str) -> bool:
    return ipaddress.ip_address(first) == ipaddress.ip_address(second)


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface that is up: IPv4 first, then IPv6 without its zone."""
    import psutil

    states = psutil.net_if_stats()
    result: dict[str, tuple[str, ...]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address includes its zone: fe80::1%eth0.
        own = [
            address.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for address in addresses
            if address.family == family
        ]
        if own and name in states and states[name].isup:
            result[name] = tuple(own)
    return result


def _resolve(name: str) -> str:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise AddressError(f"the name {name!r} has no address here ({problem})") from None
    # Prefer IPv4, which most clusters route between machines.
    addresses = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0]).partition("%")[0]


def _source(address: str) -> str:
    try:
        return source_address(address)
    except OSError as error:
        raise AddressError(f"no route leads to {address} ({error.strerror})") from None
