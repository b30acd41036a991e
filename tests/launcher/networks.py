"""Fake networks."""

from __future__ import annotations

from collections.abc import Mapping

from distmp.launcher.network import AddressError, Network

INTERFACES = {"lo": ("127.0.0.1", "::1"), "eth0": ("192.168.7.9",), "eth1": ("10.0.0.2",)}
NAMES = {"localhost": "127.0.0.1", **{f"n{number}": f"10.0.0.{number}" for number in range(1, 5)}}


def network(
    names: Mapping[str, str] = NAMES,
    interfaces: Mapping[str, tuple[str, ...]] = INTERFACES,
    hostname: str = "n2",
) -> Network:
    """A machine that is 10.0.0.2 on eth1, with a default route from 192.168.7.9."""

    def resolve(name: str) -> str:
        if name[0].isdigit() or ":" in name:
            return name
        if name not in names:
            raise AddressError(f"the name {name!r} has no address here (not known)")
        return names[name]

    def source(address: str) -> str:
        for own in (own for addresses in interfaces.values() for own in addresses):
            if own.rpartition(".")[0] == address.rpartition(".")[0]:
                return own
        if "eth0" not in interfaces:
            raise AddressError(f"no route leads to {address} (unreachable)")
        return interfaces["eth0"][0]

    return Network(hostname, interfaces, resolve, source)
