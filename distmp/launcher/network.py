"""Addresses: of names, of this machine's interfaces, and of the way to another machine."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distmp.errors import DistmpError

# Documentation addresses (RFC 5737, RFC 3849): nobody has them, so the way there is the default
# route. A datagram socket is connected to them without sending anything.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")

_ASK_AGAIN_SECONDS = 1.0


class AddressError(DistmpError):
    """A name without an address, or an address without a way to it."""

    exit_code = 2


@dataclass(frozen=True)
class Network:
    """What a machine knows about addresses; tests put functions of their own in place.

    Attributes:
        hostname: This machine's name with its domain, as far as it knows it.
        interfaces: As the function `interfaces` returns them.
        resolve: Returns the address of a name, or of an address itself. Raises AddressError.
        source: Returns this machine's address on the way to another address. Raises AddressError.
    """

    hostname: str
    interfaces: Mapping[str, tuple[str, ...]]
    resolve: Callable[[str], str]
    source: Callable[[str], str]

    @classmethod
    def of_this_machine(cls) -> Network:
        """Read the interfaces as they are now."""
        return cls(socket.getfqdn(), interfaces(), _resolve, _source)

    def patient(self, seconds: float, say: Callable[[str], None]) -> Network:
        """Return the same with names that may take a while to get an address.

        Args:
            seconds: How long to ask again.
            say: Tells people what is waited for.
        """
        return replace(self, resolve=lambda name: _wait_for(self.resolve, name, seconds, say))

    def is_own(self, address: str) -> bool:
        """Whether an address is one of this machine's."""
        return is_loopback(address) or self.interface_of(address) is not None

    def interface_of(self, address: str) -> str | None:
        """Return the interface that has an address."""
        for name, addresses in self.interfaces.items():
            if any(_same(address, own) for own in addresses):
                return name
        return "lo" if is_loopback(address) and "lo" in self.interfaces else None

    def described(self) -> str:
        """Return the interfaces and their addresses for a message."""
        return ", ".join(
            f"{name} ({', '.join(addresses)})" for name, addresses in self.interfaces.items()
        )

    def default_address(self) -> str:
        """Return the address from which this machine reaches what is not near.

        Raises:
            AddressError: If there is no default route.
        """
        for elsewhere in _ELSEWHERE:
            try:
                return self.source(elsewhere)
            except AddressError:
                continue
        raise AddressError(f"this machine has no default route; its interfaces: {self.described()}")


def is_loopback(address: str) -> bool:
    """Whether an address stands for the machine that asks."""
    return ipaddress.ip_address(address).is_loopback


def join_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wait_for(
    resolve: Callable[[str], str], name: str, seconds: float, say: Callable[[str], None]
) -> str:
    deadline = time.monotonic() + seconds
    said = False
    while True:
        try:
            return resolve(name)
        except AddressError:
            if time.monotonic() >= deadline:
                raise
        if not said:
            say(f"waiting for {name!r} to get an address, up to {seconds:g} s")
            said = True
        time.sleep(min(_ASK_AGAIN_SECONDS, max(0.0, deadline - time.monotonic())))


def _same(first: str, second: str) -> bool:
    return ipaddress.ip_address(first) == ipaddress.ip_address(second)


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each interface that is up: IPv4 first, then IPv6, without zone."""
    import psutil

    states = psutil.net_if_stats()
    found: dict[str, tuple[str, ...]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        # An IPv6 address of a link carries its zone: fe80::1%eth0.
        own = [
            address.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for address in addresses
            if address.family == family
        ]
        if own and name in states and states[name].isup:
            found[name] = tuple(own)
    return found


def _resolve(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise AddressError(f"the name {name!r} has no address here ({problem})") from None
    # IPv4 first: it is what most clusters route between machines.
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0]).partition("%")[0]


def _source(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        try:
            # Chooses the route; nothing is sent. The port does not matter.
            datagrams.connect((address, 9))
        except OSError as error:
            raise AddressError(f"no route leads to {address} ({error.strerror})") from None
        return str(datagrams.getsockname()[0]).partition("%")[0]
