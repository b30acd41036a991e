"""Resolve names, and select the addresses and the interface by which machines reach each other."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from distmp.distributed.limits import source_address
from distmp.errors import ConfigError, DistmpError, require
from distmp.launcher.job import ExplainedValue, Job

_RETRY_SECONDS = 1.0
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


class AddressError(DistmpError):
    """A name does not resolve, or no route leads to an address; both may be so only for now."""


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
        return cls(socket.getfqdn(), interfaces(), resolve, _source)

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
            if ipaddress.ip_address(address) in map(ipaddress.ip_address, addresses):
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


def resolve(name: str) -> str:
    """Return the address of a name.

    Raises:
        AddressError: If it has none here.
    """
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


def address_of(
    head: ExplainedValue[str],
    rank: ExplainedValue[int] | None,
    job: Job,
    nodes: int,
    network: Network,
) -> tuple[str, str]:
    """Return the address at which all machines reach the first one, and why it is this one.

    Args:
        head: Name or address of the first machine.
        rank: Rank of this machine, if known.
        job: The detected job.
        nodes: Number of machines.
        network: The network of this machine.

    Raises:
        AddressError: If there is no such address.
    """
    try:
        address = network.resolve(head.value)
    except AddressError as error:
        raise AddressError(
            f"the first machine of the run cannot be found: {error}. {head.value!r} is: "
            f"{head.reason}. Pass an address that all machines can reach: --rdzv-endpoint "
            "ADDRESS:PORT"
        ) from None
    if not is_loopback(address) or nodes == 1 or _is_local_run(head.value, job, network):
        return address, head.reason
    if rank is not None and rank.value != 0:
        raise AddressError(
            f"the first machine of the run cannot be found: {head.value!r} ({head.reason}) is "
            f"{address} here, a loopback address, but this machine has node rank {rank.value}. "
            "Correct /etc/hosts, or pass its address with --rdzv-endpoint ADDRESS:PORT"
        )
    reason = f"{head.reason}; {head.value!r} is {address} here, so "
    for host in job.hosts:
        with suppress(AddressError):
            source = network.source(network.resolve(host))
            if not is_loopback(source):
                return source, f"{reason}this machine's source address for {host} is used"
    own = external_addresses(network.interfaces)
    if len(own) == 1:
        return own[0], f"{reason}this machine's only other address is used"
    raise AddressError(
        f"the first machine of the run cannot be found: {head.value!r} ({head.reason}) is "
        f"{address} here, a loopback address, and this machine has several others or none: "
        f"{network.describe_interfaces()}. Pass the one that all machines can reach: "
        "--rdzv-endpoint ADDRESS:PORT"
    )


def _is_local_run(head: str, job: Job, network: Network) -> bool:
    """Return whether a loopback address is intended, because all "machines" are this one."""
    if head == "localhost" or re.fullmatch(r"[0-9.]+|.*:.*", head):
        return True
    try:
        return bool(job.hosts) and all(is_loopback(network.resolve(host)) for host in job.hosts)
    except AddressError:
        return False


def hosts_store(
    conf: Mapping[str, str], address: str, rank: ExplainedValue[int] | None, network: Network
) -> tuple[bool, str]:
    """Return whether this machine hosts the store of the rendezvous, and why.

    Args:
        conf: The keys and values of --rdzv-conf.
        address: Address of the first machine.
        rank: Rank of this machine, if known.
        network: The network of this machine.

    Raises:
        ConfigError: If this is the first machine and does not have the address.
        AddressError: If the interface that has the address is down, or no route leads to it.
    """
    if "is_host" in conf:
        value = conf["is_host"].lower()
        valid = value in (*_TRUE, *_FALSE)
        require(valid, "--rdzv-conf is_host", conf["is_host"], "use true or false")
        return value in _TRUE, "--rdzv-conf"
    own = network.is_own(address)
    if rank is None:
        # Linux keeps the local route to an address whose interface is down.
        if not own and network.source(address) == address:
            raise AddressError(f"the interface of {address}, an address of this machine, is down")
        return own, f"{address} is {'' if own else 'not '}an address of this machine"
    problem = (
        f"this is the first machine ({rank.reason} = 0) and has no such address; it has: "
        f"{network.describe_interfaces()}. With network address translation, add --rdzv-conf "
        "is_host=true here"
    )
    require(own or rank.value != 0, "--rdzv-endpoint", address, problem)
    return rank.value == 0, f"{rank.reason} = {rank.value}"


def local_address(given: str | None, address: str, network: Network) -> tuple[str, str]:
    """Return the address of this machine in the run, and why it is this one.

    Args:
        given: The option --local-addr, if it is set.
        address: Address of the first machine.
        network: The network of this machine.

    Raises:
        ConfigError: If the given address is not one of this machine.
        AddressError: If no route leads to the first machine.
    """
    if given is not None:
        own = network.resolve(given)
        problem = f"this machine has no such address; it has: {network.describe_interfaces()}"
        require(network.is_own(own), "--local-addr", given, problem)
        return own, "--local-addr"
    if network.is_own(address):
        return address, "the first machine is this machine"
    source = network.source(address)
    if is_loopback(source):
        raise AddressError(f"no route leads from this machine to {address}")
    return source, f"this machine's source address for {address}"


def selected_interface(
    local_address: str, network: Network, variables: Mapping[str, str]
) -> dict[str, ExplainedValue[str]]:
    """Return the variables that select the interface of an address, unless they are set.

    Args:
        local_address: Address of this machine in the run.
        network: The network of this machine.
        variables: The environment.

    Raises:
        ConfigError: If the user has selected an interface that gloo cannot use.
    """
    if variables.get("GLOO_SOCKET_IFNAME"):
        _check_interface(variables["GLOO_SOCKET_IFNAME"], local_address, network)
    interface = network.interface_of(local_address)
    if interface is None:
        return {}
    # "=" makes NCCL match the full name: eth1 would match eth10 too.
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {
        name: ExplainedValue(value, f"the interface that has {local_address}")
        for name, value in names.items()
        if not variables.get(name)
    }


def _check_interface(given: str, local_address: str, network: Network) -> None:
    """Refuse interfaces that gloo cannot use: it would fail late or hang."""
    for name in given.split(","):
        if name not in network.interfaces:
            problem = "this machine has no such interface"
        elif not is_loopback(local_address) and all(map(is_loopback, network.interfaces[name])):
            problem = "other hosts cannot be reached through it"
        else:
            continue
        problem += f"; unset it, or use one of: {network.describe_interfaces()}"
        raise ConfigError("GLOO_SOCKET_IFNAME", given, problem)
