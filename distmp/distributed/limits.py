"""How long parts of a run wait for each other when a machine or its connection fails.

The limits here depend on each other:

- A connection that is cut for T seconds carries data again after up to 2 T: TCP doubles the
  interval between retransmissions, which come 0.2, 0.6, 1.4, ... 25, 51, 102 seconds after the
  first loss.
- Ranks survive a cut of 30 s: data arrives again after 51 s, before `LINK_SECONDS`. After a longer
  cut, ranks end before their launcher does, so that it can start them again.
- Launchers survive a cut of 90 s: `REJOIN_SECONDS` is more than 102 s and a heartbeat. After a
  longer cut, all processes have ended after two minutes.
- A process that waits reports after `SAY_AFTER_SECONDS` what it waits for.

A silent machine counts as lost only if it does not respond to a new connection either. So a process
that is stopped or busy is not lost, nor is a connection that waits for its next retransmission.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Time after which a process reports which machines or ranks it waits for.
SAY_AFTER_SECONDS = 10.0
# How long a machine may be silent and unreachable until the ranks of the others count it as lost.
LINK_SECONDS = 60.0
# How long ranks that have started wait for the next one to start.
ARRIVAL_SECONDS = 90.0
# How long a launcher waits for the first machine, which hosts the rendezvous.
REJOIN_SECONDS = 115
# Timeout of connecting to see whether a machine responds.
PROBE_SECONDS = 3.0
# torch's default timeout of a store.
STORE_SECONDS = 300.0


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
        OSError: If there is no route to it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        # Selects the route and sends nothing; the port does not matter.
        datagrams.connect((address, CLOSED_PORT))
        return str(datagrams.getsockname()[0]).partition("%")[0]


# Heartbeats of the launchers of a run, which show each of them which others still run

# Counts the launchers that have joined; with a number, the machine of that launcher.
ROSTER = "distmp/roster"
INTERVAL_SECONDS = 5.0
# A launcher counts as gone after this time without a heartbeat.
SILENT_SECONDS = 2.5 * INTERVAL_SECONDS


def send_beat(store: Store, number: int) -> None:
    """Send a heartbeat. It blocks while the first machine is silent.

    Args:
        store: The store of the rendezvous.
        number: Number of this launcher in the order of joining, from 1 on.
    """
    store.add(f"distmp/beat/{number}", 1)


def beats(store: Store) -> dict[int, int]:
    """Return the heartbeats of each launcher that has joined, by its number."""
    numbers = range(1, store.add(ROSTER, 0) + 1)
    return {number: store.add(f"distmp/beat/{number}", 0) for number in numbers}
