"""Finds out whether another machine responds at all."""

from __future__ import annotations

import socket

from distmp.distributed.limits import PROBE_SECONDS

# A port on which hosts do not listen, to probe a host without a known open port.
CLOSED_PORT = 9


def connection_error(address: str, port: int) -> OSError | None:
    """Return the error of a connection attempt, or None if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        return error
    return None


def responds(address: str, port: int = CLOSED_PORT) -> bool:
    """Return whether a machine responds; a refused connection is also a response."""
    problem = connection_error(address, port)
    return problem is None or isinstance(problem, (ConnectionRefusedError, ConnectionResetError))


def source_address(address: str) -> str:
    """Return the address of this machine from which it reaches another one.

    Raises:
        OSError: If no route leads there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        # Selects the route and sends nothing; the port does not matter.
        datagrams.connect((address, CLOSED_PORT))
        return str(datagrams.getsockname()[0]).partition("%")[0]
