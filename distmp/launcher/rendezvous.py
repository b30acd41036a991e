"""Where the machines of a run meet: opened on the first, waited for on the others.

torchrun waits silently and ends with a traceback. Here the meeting point is opened and reached
before torchrun starts, which then shares it, so that a port that is taken, a host that does not
answer or one that never came is a message with names in it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from distmp.errors import DistmpError
from distmp.launcher.network import join_port
from distmp.launcher.plan import Endpoint

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# A host answers within this, or it is not there; hosts that refuse a connection do answer.
_PROBE_SECONDS = 3.0
_HANDSHAKE_SECONDS = 30.0
_SAY_AFTER_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.5
# A port on which no host listens, for a host of which no other is known.
_CLOSED_PORT = 9
_BEAT_SECONDS = 5.0
_ROSTER = "distmp/roster"
_RUN = "distmp/run"


class LaunchError(DistmpError, RuntimeError):
    """The machines of a run have not met, or have lost each other."""


@dataclass(frozen=True)
class Member:
    """A machine that has come to the rendezvous."""

    name: str
    address: str
    node_rank: int | None

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class Rendezvous:
    """This machine's connection to where the machines of a run meet.

    Args:
        endpoint: Where that is.
        store: The store there, which torchrun shares if it is in this process.
    """

    def __init__(self, endpoint: Endpoint, store: TCPStore) -> None:
        self.endpoint = endpoint
        self.store = store
        self.this = Member(platform.node(), endpoint.local_address, endpoint.node_rank)
        entry = json.dumps([self.this.name, self.this.address, self.this.node_rank])
        store.set(f"{_ROSTER}/{store.add(_ROSTER, 1)}", entry)

    @classmethod
    def open(cls, endpoint: Endpoint, say: Callable[[str], None]) -> Rendezvous:
        """Open the meeting point, or wait until the first machine has opened it.

        Args:
            endpoint: Where it is, and whether this is the first machine.
            say: Tells people what is waited for.

        Raises:
            LaunchError: If the port is taken, nobody answers in time, or somebody else does.
        """
        return cls(endpoint, _host(endpoint) if endpoint.is_host else _reach(endpoint, say))

    def members(self) -> list[Member]:
        """Return the machines that have come so far.

        Raises:
            RuntimeError: If the store does not answer.
        """
        count = self.store.add(_ROSTER, 0)
        entries = [self.store.get(f"{_ROSTER}/{number}") for number in range(1, count + 1)]
        return list(dict.fromkeys(Member(*json.loads(entry)) for entry in entries))

    @contextlib.contextmanager
    def watched(self, lost: Callable[[str], None]) -> Iterator[None]:
        """Notice when the first host falls silent: torchrun then waits for it without a limit.

        Args:
            lost: Called on a thread of its own, with a message for people. It must end the process:
                the main thread is somewhere in torch, where no signal reaches it.
        """
        if self.endpoint.is_host:
            yield
            return
        done = threading.Event()
        heard = [time.monotonic()]

        def beat() -> None:
            while not done.wait(_BEAT_SECONDS):
                # Does not return while the host is silent; it raises if the host has ended the
                # connection, which torchrun notices by itself.
                with contextlib.suppress(RuntimeError):
                    self.store.add(_ROSTER, 0)
                    heard[0] = time.monotonic()

        def watch() -> None:
            while not done.wait(_BEAT_SECONDS / 5):
                silence = time.monotonic() - heard[0]
                if silence > self.endpoint.silence_seconds and not _answers(
                    self.endpoint.address, self.endpoint.port
                ):
                    lost(f"{_head(self.endpoint)} has been silent for {silence:.0f} s")
                    return

        for work in (beat, watch):
            threading.Thread(target=work, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def silent(self) -> list[str]:
        """Return, for people, the machines of the run that do not answer any more."""
        endpoint = self.endpoint
        if not endpoint.is_host and not _answers(endpoint.address, endpoint.port):
            return [_head(endpoint)]
        try:
            others = [member for member in self.members() if member != self.this]
        except RuntimeError:
            # The first host is there, its part of the run has ended.
            return []
        with ThreadPoolExecutor(max(1, min(64, len(others)))) as pool:
            answers = list(pool.map(lambda member: _answers(member.address, _CLOSED_PORT), others))
        return [str(member) for member, answer in zip(others, answers, strict=True) if not answer]

    def absent(self) -> str:
        """Return, for people, who was waited for in vain."""
        endpoint = self.endpoint
        if silent := self.silent():
            return f"lost {', '.join(silent)}, which did not come back in {endpoint.seconds} s"
        try:
            members = self.members()
        except RuntimeError:
            return f"the rendezvous at {endpoint} does not answer any more"
        came = ", ".join(map(str, members))
        if len(members) >= endpoint.fewest_nodes:
            return (
                f"the hosts of the run did not come together again within {endpoint.seconds} s, "
                f"although they answer: {came}; look at what the ranks on them say"
            )
        ranks = {member.node_rank for member in members}
        missing = [host for rank, host in enumerate(endpoint.hosts) if rank not in ranks]
        return (
            f"only {len(members)} of {endpoint.fewest_nodes} hosts came to {endpoint} within "
            f"{endpoint.seconds} s: {came}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + ". Look whether `distmp launch` runs on the others with the same --rdzv-endpoint "
            "and --rdzv-id; --rdzv-conf join_timeout=SECONDS waits longer"
        )


def _head(endpoint: Endpoint) -> str:
    named = "" if endpoint.head == endpoint.address else f"{endpoint.head}, "
    return f"the first host ({named}{endpoint.address})"


def _host(endpoint: Endpoint) -> TCPStore:
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

    try:
        # torchrun opens the same port in this process, and is given this store.
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
        )
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise LaunchError(f"port {endpoint.port} cannot be opened here: {error}") from None
        raise _taken(
            endpoint.port, "--port PORT, or --rdzv-endpoint HOST:PORT if that is how they were told"
        ) from None
    store.set(_RUN, endpoint.run_id)
    return store


def _taken(port: int, options: str) -> LaunchError:
    return LaunchError(
        f"port {port} of this machine, where the hosts of the run should meet, is "
        f"taken{_holder(port)}; end that, or choose another on all hosts ({options})"
    )


@contextlib.contextmanager
def taken_port_named() -> Iterator[None]:
    """Turn torchrun's error about a port that is taken into one message.

    Raises:
        LaunchError: In place of it.
    """
    import torch.distributed as dist

    try:
        yield
    except dist.DistNetworkError as error:
        port = re.search(r"\bport: (\d+)", str(error))
        if port is None or "EADDRINUSE" not in str(error):
            raise
        raise _taken(int(port[1]), "--rdzv-endpoint HOST:PORT, or --master-port PORT") from None


def _holder(port: int) -> str:
    """Return who listens on a port, as far as this user may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr[1:2] == (port,) and connection.pid:
                holder = psutil.Process(connection.pid)
                # The name, because an interpreter's whole path would leave no room for the rest.
                words = [holder.name(), *holder.cmdline()[1:]]
                return f" by process {connection.pid} ({' '.join(words)[:80]})"
    return ""


def _reach(endpoint: Endpoint, say: Callable[[str], None]) -> TCPStore:
    _wait_until_open(endpoint, say)
    store = _connect(endpoint)
    run_id = store.get(_RUN).decode()
    if run_id != endpoint.run_id:
        raise LaunchError(
            f"at {endpoint} another run waits for its hosts: {run_id}, and this is "
            f"{endpoint.run_id}; choose another port on all hosts, or give all the same --rdzv-id"
        )
    return store


def _wait_until_open(endpoint: Endpoint, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    said = False
    while (problem := _try(endpoint.address, endpoint.port)) is not None:
        waited = time.monotonic() - started
        if waited > endpoint.seconds:
            raise LaunchError(_unreached(endpoint, problem))
        if not said and waited > _SAY_AFTER_SECONDS:
            say(
                f"waiting for {_head(endpoint)} to open port {endpoint.port}, up to "
                f"{endpoint.seconds} s ({problem.strerror or problem})"
            )
            said = True
        time.sleep(_ASK_AGAIN_SECONDS)


def _try(address: str, port: int) -> OSError | None:
    """Return what keeps this machine from connecting."""
    try:
        socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        return error
    return None


def _answers(address: str, port: int) -> bool:
    problem = _try(address, port)
    return problem is None or isinstance(problem, (ConnectionRefusedError, ConnectionResetError))


def _unreached(endpoint: Endpoint, problem: OSError) -> str:
    if isinstance(problem, ConnectionRefusedError):
        check = (
            f"the host answers and nothing listens on port {endpoint.port}: look whether "
            "`distmp launch` runs there and was told the same endpoint"
        )
    else:
        check = (
            f"the host does not answer from {endpoint.local_address}: look whether it is up, "
            "whether this is its address in a network that both are in, and at firewalls"
        )
    where = _head(endpoint).removeprefix("the ")
    return (
        f"{where} was not reached at {join_port(endpoint.address, endpoint.port)} within "
        f"{endpoint.seconds} s ({problem.strerror or problem}): {check}"
    )


def _connect(endpoint: Endpoint) -> TCPStore:
    """Connect to the store, if it is one: torch waits without a limit for what never answers."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    result: list[TCPStore | Exception] = []

    def connect() -> None:
        try:
            store = TCPStore(
                endpoint.address,
                endpoint.port,
                is_master=False,
                timeout=timedelta(seconds=_HANDSHAKE_SECONDS),
            )
            # Set by the first host: it may still be on its way.
            store.wait([_RUN])
            result.append(store)
        except (RuntimeError, ValueError) as error:
            result.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2 * _HANDSHAKE_SECONDS)
    if not result or isinstance(result[0], Exception):
        raise LaunchError(
            f"what answers at {endpoint} is not the rendezvous of a run: another program has that "
            f"port on {endpoint.address}; choose another port on all hosts"
        )
    return result[0]


@contextlib.contextmanager
def failures_named(rendezvous: Rendezvous) -> Iterator[None]:
    """Turn torchrun's errors about hosts that have not met, or are lost, into one message.

    Raises:
        LaunchError: In place of them.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import api

    try:
        yield
    except api.RendezvousTimeoutError:
        raise LaunchError(rendezvous.absent()) from None
    except api.RendezvousClosedError:
        raise LaunchError("the run has ended on another host; see what that says") from None
    except (api.RendezvousError, dist.DistNetworkError, dist.DistStoreError):
        lost = rendezvous.silent()
        raise LaunchError(
            f"lost {', '.join(lost)}, which does not answer any more"
            if lost
            else f"the run has ended on {_head(rendezvous.endpoint)}; see what that says"
        ) from None
