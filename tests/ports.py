"""Ports of processes that a test starts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a TCP port on which a server can listen that another process starts.

    A port that was merely free a moment ago may have been taken since: tests run side by side, and
    each connection takes one. While this socket is bound, Linux gives its port to nobody who asks
    for any port. It never listens, so servers with SO_REUSEADDR, such as torch's store, can bind
    the port.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as holder:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])
