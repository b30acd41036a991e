"""The rendezvous of a run's machines: opened on the first one, awaited on the others.

torchrun waits silently and ends with a traceback. So the launcher opens or reaches the store first,
and reports in one message a port in use, a host that does not respond, or one that never joined.
torchrun then shares this store.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import pickle
import platform
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from distmp.distributed import limits
from distmp.errors import DistmpError
from distmp.launcher.network import AddressError, resolve
from distmp.launcher.orderly_stop import running_ranks
from distmp.launcher.plan import Endpoint, log

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Connections that the kernel keeps until the store accepts them; all ranks connect at once.
_BACKLOG = 2048
_TIMEOUT = timedelta(seconds=limits.STORE_SECONDS)
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
# The classes of torchrun's rendezvous state, by module.
_STATE_CLASSES = {
    _RENDEZVOUS: ("_RendezvousState", "_NodeDesc"),
    "builtins": ("set",),
    "datetime": ("datetime", "timedelta", "timezone"),
}


class ForeignStateError(DistmpError, RuntimeError):
    """A program other than torchrun has written the state of the rendezvous."""


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _STATE_CLASSES.get(module, ()):
            problem = f"it contains {module}.{name}, which torchrun does not write"
            raise pickle.UnpicklingError(problem)
        return super().find_class(module, name)


def load_state(data: bytes) -> Any:
    """Unpickle the state of torchrun's rendezvous, and nothing else.

    Raises:
        pickle.UnpicklingError: If the state contains a class that torchrun does not write.
    """
    return _StateUnpickler(io.BytesIO(data)).load()


def open_store(host: str, port: int, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """Open a store that listens on one address only.

    torchrun gets the same store if it opens one with this port in this process.

    Args:
        host: The address to listen on, or a name of this machine.
        port: The port; 0 takes a free one.
        timeout: Timeout of an operation of the store.

    Raises:
        OSError: If the port is in use, or this machine does not have the address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        multi_tenant=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timeout,
    )


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Let torchrun open stores on one address only, and unpickle only the rendezvous state.

    It also compares no times of different machines, whose clocks may differ, and starts no ranks on
    fewer machines than `--nnodes` asks for.

    Raises:
        ForeignStateError: If a program other than torchrun has written the state.
        LaunchError: If too few machines are left.
    """
    from torch.distributed.elastic.rendezvous import (
        api,
        c10d_rendezvous_backend,
        dynamic_rendezvous,
    )

    original = c10d_rendezvous_backend.TCPStore  # type: ignore[attr-defined]
    handler, closed = dynamic_rendezvous.DynamicRendezvousHandler, api.RendezvousClosedError
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    get_world, sanitize = handler._get_world, holder._sanitize
    # The clock of a machine may be set while it runs.
    clock = SimpleNamespace(now=lambda zone: datetime.fromtimestamp(time.monotonic(), zone))

    def store(host: str, port: int, *, is_master: bool, **options: Any) -> TCPStore:
        # With another port, `distmp.launcher.rendezvous` has opened the store, and torch shares it.
        if is_master and port == 0:
            return open_store(host, port, options.get("timeout", _TIMEOUT))
        return original(host, port, is_master=is_master, **options)

    def sanitize_by_own_clock(self: Any) -> None:
        # A time that another machine has written counts from when this one has first read it.
        state, now, before = self._state, clock.now(timezone.utc), vars(self).get("seen", {})
        stamps, waits = state.last_heartbeats, (state.round, state.deadline is not None)
        self.seen = seen = {mark: before.get(mark, now) for mark in [*stamps.items(), waits]}
        state.deadline = state.deadline and seen[waits] + self._settings.timeout.last_call
        state.last_heartbeats = {node: seen[node, stamp] for node, stamp in stamps.items()}
        sanitize(self)
        state.last_heartbeats = {node: stamps[node] for node in state.last_heartbeats}

    def get_full_world(self: Any) -> tuple[int, int]:
        rank, size = get_world(self)
        if size >= self._settings.min_nodes:
            return rank, size
        left = ", ".join(node.addr for node in self._state_holder.state.participants)
        raise LaunchError(
            f"only {size} of {self._settings.min_nodes} hosts are left to start ranks on: {left}; "
            "the others joined, but were silent then: see their logs, and launch again on all"
        )

    restricted = SimpleNamespace(**vars(pickle) | {"loads": load_state})
    with (
        mock.patch.object(c10d_rendezvous_backend, "TCPStore", store),
        mock.patch.object(
            handler, "_create_tcp_store_server", lambda _, host, port: open_store(host, port)
        ),
        mock.patch.object(dynamic_rendezvous, "pickle", restricted),
        mock.patch.object(dynamic_rendezvous, "datetime", clock),
        # After this one, of a machine beyond `--nnodes`, torchrun fails with a traceback.
        mock.patch.object(dynamic_rendezvous, "RendezvousGracefulExitError", closed),
        mock.patch.object(holder, "_sanitize", sanitize_by_own_clock),
        mock.patch.object(handler, "_get_world", get_full_world),
    ):
        try:
            yield
        except api.RendezvousStateError as error:
            raise ForeignStateError(
                f"the state in the rendezvous store is not torchrun's: {error.__cause__}. Another "
                "program writes to the store: find out which one reaches its port, choose another "
                'port, and see the page "Security"'
            ) from None


_HANDSHAKE_SECONDS = 30.0
_RETRY_SECONDS = 0.5
# How long threads may take to end, with a probe of a machine that does not respond.
_END_SECONDS = limits.PROBE_SECONDS + 2.0
_RUN = "distmp/run"


class LaunchError(DistmpError, RuntimeError):
    """The machines of a run could not connect, or have lost their connection."""


class Member(NamedTuple):
    """A machine that has joined the rendezvous."""

    name: str
    address: str
    node_rank: int | None

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class Rendezvous:
    """This machine's connection to the rendezvous store.

    Args:
        endpoint: The address of the store.
        store: The store, which torchrun shares if it runs in this process.
    """

    def __init__(self, endpoint: Endpoint, store: TCPStore) -> None:
        self.endpoint = endpoint
        self.store = store
        self._number = store.add(limits.ROSTER, 1)
        # Heartbeats of each launcher, and when their number was first seen.
        self._seen: dict[int, tuple[int, float]] = {}
        self.this = Member(platform.node(), endpoint.local_address, endpoint.node_rank)
        store.set(f"{limits.ROSTER}/{self._number}", json.dumps(self.this))

    @classmethod
    def open(cls, endpoint: Endpoint) -> Rendezvous:
        """Open the store, or wait until the first machine has opened it.

        Args:
            endpoint: The address of the store, and whether this is the first machine.

        Raises:
            LaunchError: If the port is in use, nothing responds in time, or another program does.
        """
        if endpoint.is_host:
            return cls(endpoint, _host(endpoint))
        endpoint = _when_open(endpoint)
        return cls(endpoint, _reach(endpoint))

    def members(self) -> list[Member]:
        """Return the machines that have joined so far.

        Raises:
            RuntimeError: If the store does not respond.
        """
        return list(dict.fromkeys(self._launchers().values()))

    def _launchers(self) -> dict[int, Member]:
        """Return the machine of each launcher by number; a restarted launcher has several."""
        keys = {n: f"{limits.ROSTER}/{n}" for n in range(1, self.store.add(limits.ROSTER, 0) + 1)}
        # A launcher may have ended between its number and its entry; `get` would wait for that.
        entries = {n: self.store.get(key) for n, key in keys.items() if self.store.check([key])}
        return {n: Member(*json.loads(entry)) for n, entry in entries.items()}

    @contextlib.contextmanager
    def watched(self, lost: Callable[[str], None]) -> Iterator[None]:
        """Detect that the first machine is silent, and log what the start of ranks waits for.

        torchrun would wait for a silent machine without a limit.

        Args:
            lost: Called with a message on a separate thread. It must end the process, because the
                main thread is blocked in torch and does not handle signals.
        """
        done = threading.Event()
        last_response = [time.monotonic()]

        def beat() -> None:
            since, logged, ran = time.monotonic(), "", False
            while not done.wait(limits.INTERVAL_SECONDS):
                # Blocks while the host is silent; raises if the host closed the connection, which
                # torchrun detects itself.
                with contextlib.suppress(RuntimeError):
                    limits.send_beat(self.store, self._number)
                    last_response[0] = time.monotonic()
                    alive = self._alive()
                    if running_ranks():  # without any, torchrun waits for other machines
                        since, logged, ran = time.monotonic(), "", True
                    elif time.monotonic() - since > limits.SAY_AFTER_SECONDS:
                        if (waiting := self._waiting_for(alive, ran)) != logged:
                            log(f"waiting for {waiting}")
                        logged = waiting

        def watch() -> None:
            while not done.wait(limits.INTERVAL_SECONDS / 5):
                silence = time.monotonic() - last_response[0]
                if silence > self.endpoint.read_timeout_seconds and not limits.responds(
                    self.endpoint.address, self.endpoint.port
                ):
                    lost(f"{_head(self.endpoint)} has been silent for {silence:.0f} s")
                    return

        with _threads([beat] if self.endpoint.is_host else [beat, watch], done):
            yield

    def _alive(self) -> set[int]:
        """Return the numbers of the launchers that run."""
        now = time.monotonic()
        for number, count in limits.beats(self.store).items():
            if self._seen.get(number, (None,))[0] != count:
                self._seen[number] = (count, now)
        return {n for n, (_, since) in self._seen.items() if now - since < limits.SILENT_SECONDS}

    def _waiting_for(self, alive: Collection[int], ran: bool) -> str:
        """Return what this machine, on which no rank runs, waits for.

        Args:
            alive: Numbers of the launchers that run.
            ran: Whether ranks have run here.
        """
        launchers = self._launchers()
        present = list(dict.fromkeys(m for n, m in launchers.items() if n in alive))
        joined = ", ".join(map(str, present))
        missing = self.endpoint.min_nodes - len(present)
        limit = f", up to {self.endpoint.join_timeout_seconds} s"
        if missing <= 0:
            then = "end, or to start again" if ran else f"start{limit}"
            return f"the ranks of {joined} to {then}"
        gone = [str(m) for m in dict.fromkeys(launchers.values()) if m not in present]
        names = ", ".join(self._missing(present) or gone)
        return f"{names or f'{missing} more host' + 's' * (missing > 1)} (joined: {joined}){limit}"

    def _missing(self, members: Sequence[Member]) -> list[str]:
        """Return the names of the machines that have not joined, if the job lists its machines."""
        ranks = {member.node_rank for member in members}
        return [host for rank, host in enumerate(self.endpoint.hosts) if rank not in ranks]

    def unresponsive(self) -> list[str]:
        """Return the names of the machines that do not respond any more, for messages."""
        endpoint = self.endpoint
        if not endpoint.is_host and not limits.responds(endpoint.address, endpoint.port):
            return [_head(endpoint)]
        try:
            others = [member for member in self.members() if member != self.this]
        except RuntimeError:
            # The first machine is up, but its part of the run has ended.
            return []
        with ThreadPoolExecutor(max(1, min(64, len(others)))) as pool:
            up = list(pool.map(lambda member: limits.responds(member.address), others))
        return [str(member) for member, is_up in zip(others, up, strict=True) if not is_up]

    def timeout_message(self) -> str:
        """Return a message about the machines that did not join in time."""
        endpoint = self.endpoint
        seconds = endpoint.join_timeout_seconds
        if lost := self.unresponsive():
            return f"lost {', '.join(lost)}, which did not come back within {seconds} s"
        try:
            members = self.members()
        except RuntimeError:
            return f"the rendezvous at {endpoint} does not respond any more"
        joined = ", ".join(map(str, members))
        if len(members) >= endpoint.min_nodes:
            return (
                f"the hosts of the run did not join again within {seconds} s, although they "
                f"respond: {joined}; see the logs of their ranks, and give all hosts the same "
                "--nnodes"
            )
        missing = self._missing(members)
        return (
            f"only {len(members)} of {endpoint.min_nodes} hosts joined {endpoint} within "
            f"{seconds} s: {joined}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + ". Check that `distmp launch` runs on the others with the same --rdzv-endpoint "
            "and --rdzv-id, or wait longer with --rdzv-conf join_timeout=SECONDS"
        )


@contextlib.contextmanager
def _threads(targets: Sequence[Callable[[], None]], done: threading.Event) -> Iterator[None]:
    """Run functions in threads; at the end, set the event and wait for them.

    A thread that uses the store while the interpreter ends aborts the process. One that waits for a
    silent machine is left behind after a few seconds.
    """
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(_END_SECONDS)


def _head(endpoint: Endpoint) -> str:
    named = "" if endpoint.head == endpoint.address else f"{endpoint.head}, "
    return f"the first machine ({named}{endpoint.address})"


def _host(endpoint: Endpoint) -> TCPStore:
    try:
        # torchrun opens the same port in this process and gets this store.
        store = _open_store(endpoint)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"{endpoint} cannot be opened here: {error.strerror}") from None
        raise LaunchError(
            f"rendezvous port {endpoint.port} of this machine is in use; end the process that "
            "listens there, or choose another port on all hosts (--port PORT, or --rdzv-endpoint "
            "HOST:PORT if you passed that); if it is another launcher of this run, set NNODES, "
            "NODE_RANK, MASTER_ADDR and MASTER_PORT for each"
        ) from None
    store.set(_RUN, endpoint.run_id)
    return store


def _open_store(endpoint: Endpoint) -> TCPStore:
    try:
        return open_store(endpoint.address, endpoint.port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # With network address translation, this machine does not have the address.
        return open_store(endpoint.local_address, endpoint.port)


def _reach(endpoint: Endpoint) -> TCPStore:
    store = _connect(endpoint)
    run_id = store.get(_RUN).decode()
    if run_id != endpoint.run_id:
        raise LaunchError(
            f"at {endpoint} another run is waiting for its hosts: {run_id}, and this is "
            f"{endpoint.run_id}; choose another port on all hosts, or pass the same --rdzv-id"
        )
    return store


def _when_open(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint, with another address if the first machine was replaced meanwhile."""
    started = time.monotonic()
    logged = False
    while (problem := limits.connection_error(endpoint.address, endpoint.port)) is not None:
        waited = time.monotonic() - started
        if waited > endpoint.join_timeout_seconds:
            raise LaunchError(_unreachable(endpoint, problem))
        if not logged and waited > limits.SAY_AFTER_SECONDS:
            log(
                f"waiting for {_head(endpoint)} to open port {endpoint.port}, up to "
                f"{endpoint.join_timeout_seconds} s ({problem.strerror or problem})"
            )
            logged = True
        time.sleep(_RETRY_SECONDS)
        with contextlib.suppress(AddressError):
            endpoint = replace(endpoint, address=resolve(endpoint.head))
    return endpoint


def _unreachable(endpoint: Endpoint, problem: OSError) -> str:
    if isinstance(problem, ConnectionRefusedError):
        check = (
            f"the host responds, but nothing listens on port {endpoint.port}: check that "
            "`distmp launch` runs there with this endpoint as node rank 0"
        )
    else:
        check = (
            f"the host does not respond to {endpoint.local_address}: check that it is up, that "
            "this is its address in a network that both share, and firewalls"
        )
    where = _head(endpoint).removeprefix("the ")
    return (
        f"{where} was not reached at {endpoint} within "
        f"{endpoint.join_timeout_seconds} s ({problem.strerror or problem}): {check}"
    )


def _connect(endpoint: Endpoint) -> TCPStore:
    """Connect to the store with a limit: torch waits without one if another program listens."""
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
            # The first machine may not have set it yet.
            store.wait([_RUN])
            result.append(store)
        except (RuntimeError, ValueError) as error:
            result.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2 * _HANDSHAKE_SECONDS)  # to connect, and to wait
    if not result or isinstance(result[0], Exception):
        raise LaunchError(
            f"what responds at {endpoint} is not the rendezvous of a run: another program uses "
            f"that port on {endpoint.address}; choose another port on all hosts"
        )
    return result[0]


@contextlib.contextmanager
def failures_explained(rendezvous: Rendezvous) -> Iterator[None]:
    """Replace torchrun's errors about missing or lost hosts by one message.

    Raises:
        LaunchError: Instead of torchrun's error.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import api

    try:
        yield
    except api.RendezvousTimeoutError:
        raise LaunchError(rendezvous.timeout_message()) from None
    except api.RendezvousClosedError:
        raise LaunchError("the run has ended on another host; see its log") from None
    except (api.RendezvousError, dist.DistNetworkError, dist.DistStoreError):
        lost = rendezvous.unresponsive()
        raise LaunchError(
            f"lost {', '.join(lost)}, which does not respond any more"
            if lost
            else f"the run has ended on {_head(rendezvous.endpoint)}; see its log"
        ) from None
