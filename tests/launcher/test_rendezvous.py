"""How hosts find each other, and what torchrun may unpickle; see docs/security.md."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import queue
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, api, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from distmp.distributed import limits
from distmp.launcher import rendezvous
from distmp.launcher.plan import Endpoint
from distmp.launcher.rendezvous import (
    ForeignStateError,
    LaunchError,
    Rendezvous,
    failures_explained,
    guarded,
    load_state,
    open_store,
)
from tests.launcher.test_local import launched
from tests.marks import nightly
from tests.ports import reserved_port
from tests.progress import wait_until


def endpoint(port: int, is_host: bool = True, **changes: object) -> Endpoint:
    options = {
        "head": "n1",
        "address": "127.0.0.1",
        "run_id": "7.0",
        "local_address": "127.0.0.1",
        "node_rank": 0 if is_host else 1,
        "min_nodes": 2,
        "hosts": ("n1", "n2"),
        "join_timeout_seconds": 1,
        "read_timeout_seconds": 1,
    }
    return Endpoint(port=port, is_host=is_host, **{**options, **changes})  # type: ignore[arg-type]


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture
def first(port: int) -> Rendezvous:
    return Rendezvous.open(endpoint(port))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def unexpected(message: str) -> None:
    pytest.fail(f"unexpected log line: {message}")


@pytest.fixture(autouse=True)
def _without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests log nothing, as on machines whose ranks run."""
    monkeypatch.setattr(rendezvous, "log", unexpected)
    monkeypatch.setattr(rendezvous, "running_ranks", lambda: [1])


def test_joined_hosts_know_each_other(port: int, first: Rendezvous) -> None:
    second = Rendezvous.open(endpoint(port, is_host=False, local_address="127.0.0.2"))
    assert [member.address for member in first.members()] == ["127.0.0.1", "127.0.0.2"]
    assert second.members() == first.members()
    assert first.unresponsive() == second.unresponsive() == []
    assert "although they respond" in first.timeout_message()


def test_host_that_ended_while_it_joined_is_left_out(first: Rendezvous) -> None:
    first.store.add(limits.ROSTER, 1)  # its last action
    first.store.set_timeout(timedelta(seconds=1))
    assert [member.address for member in first.members()] == ["127.0.0.1"]


def test_missing_host_is_named(first: Rendezvous) -> None:
    with pytest.raises(LaunchError, match=r"only 1 of 2 hosts joined .*; missing: n2\."):
        raise_in(first, api.RendezvousTimeoutError())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """The lines of a launcher that says soon what it waits for."""
    monkeypatch.setattr(limits, "SAY_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(limits, "INTERVAL_SECONDS", 0.05)
    logged: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(rendezvous, "log", logged.put)
    return logged


def test_first_host_names_hosts_waited_for(
    first: Rendezvous, lines: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "running_ranks", list)
    with first.watched(pytest.fail):
        line = lines.get(timeout=60)
        assert re.fullmatch(r"waiting for n2 \(joined: .* \(127\.0\.0\.1\)\), up to \d+ s", line)
        time.sleep(0.3)
    # It repeats only what has changed.
    assert lines.empty()


def test_host_whose_ranks_have_ended_waits_for_others(
    first: Rendezvous, lines: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [[1], [1]]  # they have run, and have ended
    monkeypatch.setattr(rendezvous, "running_ranks", lambda: ranks.pop() if ranks else [])
    first.endpoint = replace(first.endpoint, min_nodes=1)
    with first.watched(pytest.fail):
        line = lines.get(timeout=60)
    assert re.fullmatch(r"waiting for the ranks of .* \(127.*\) to end, or to start again", line)


def test_silent_host_is_named(
    port: int, first: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rendezvous.open(endpoint(port, is_host=False, local_address="127.0.0.2"))
    monkeypatch.setattr(limits, "responds", lambda address, port=9: address != "127.0.0.2")
    for error in (api.RendezvousTimeoutError(), api.RendezvousConnectionError()):
        with pytest.raises(LaunchError, match=r"lost .* \(127\.0\.0\.2\), which d(oes|id) not"):
            raise_in(first, error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (api.RendezvousClosedError(), "ended on another host"),
        (api.RendezvousConnectionError(), r"ended on the first machine \(n1, 127\.0\.0\.1\)"),
    ],
)
def test_torchrun_errors_are_one_message(error: Exception, message: str, first: Rendezvous) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        raise_in(first, error)
    assert caught.value.__suppress_context__


def raise_in(joined: Rendezvous, error: Exception) -> None:
    with failures_explained(joined):
        raise error


def test_port_in_use_is_refused(listener: socket.socket) -> None:
    with pytest.raises(LaunchError, match=r"is in use; end the process .*--port"):
        Rendezvous.open(endpoint(listener.getsockname()[1]))


def test_other_program_at_endpoint_is_refused(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_SECONDS", 0.5)
    with pytest.raises(LaunchError, match="is not the rendezvous of a run"):
        Rendezvous.open(endpoint(listener.getsockname()[1], is_host=False))


@pytest.mark.usefixtures("first")
def test_other_run_at_endpoint_is_refused(port: int) -> None:
    with pytest.raises(LaunchError, match=r"another run .*: 7\.0, and this is 8\.0"):
        Rendezvous.open(endpoint(port, is_host=False, run_id="8.0"))


def test_endpoint_without_listener_times_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SAY_AFTER_SECONDS", 0.0)
    lines: list[str] = []
    monkeypatch.setattr(rendezvous, "log", lines.append)
    with pytest.raises(LaunchError, match=r"within 1 s \(Connection refused\): the host responds"):
        Rendezvous.open(endpoint(port, is_host=False))
    (message,) = lines
    assert "waiting for the first machine (n1, 127.0.0.1)" in message


@pytest.mark.usefixtures("first")
def test_replaced_first_host_is_reached_at_its_new_address(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "resolve", {"n1": "127.0.0.1"}.__getitem__)
    of_predecessor = endpoint(port, is_host=False, address="127.0.0.9")
    assert Rendezvous.open(of_predecessor).endpoint.address == "127.0.0.1"


def test_silent_first_host_is_detected(
    port: int, first: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INTERVAL_SECONDS", 0.1)
    second = Rendezvous.open(endpoint(port, is_host=False, read_timeout_seconds=2))
    lost: list[str] = []
    # It responds on the connection, although it accepts no new ones.
    monkeypatch.setattr(limits, "responds", lambda address, port: False)
    with second.watched(lost.append):
        time.sleep(3)
    assert lost == []
    # It accepts new connections, but does not respond: it is busy.
    probed = threading.Semaphore(0)
    monkeypatch.setattr(limits, "responds", lambda *_: probed.release() or True)
    monkeypatch.setattr(second, "store", Silent())
    with second.watched(lost.append):
        assert probed.acquire(timeout=30)
        assert probed.acquire(timeout=30)
    assert lost == []
    monkeypatch.setattr(limits, "responds", lambda address, port: False)
    with second.watched(lost.append):
        wait_until(lambda: bool(lost))
    assert lost[0].startswith("the first machine (n1, 127.0.0.1) has been silent for ")
    with first.watched(lost.append):
        pass
    assert len(lost) == 1


class Silent:
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("no response")


# Where the stores of a run listen, and what torchrun may unpickle

RUN = "run"


class Command:
    """Unpickling it runs a command: what a stranger would write."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.evidence),)


def listening() -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}


def handler(endpoint: str) -> dynamic_rendezvous.DynamicRendezvousHandler:
    """Return the handler that torchrun's agent builds."""
    parameters = RendezvousParameters("c10d", endpoint, RUN, 1, 1, "127.0.0.1", is_host="true")
    backend, store = create_backend(parameters)
    return dynamic_rendezvous.create_handler(store, backend, parameters)


@contextlib.contextmanager
def attacked(evidence: Path) -> Iterator[str]:
    """Open a store to which a stranger has written; yield its endpoint."""
    store = open_store("127.0.0.1", 0)
    stranger = TCPStore("127.0.0.1", store.port, is_master=False)
    state = b64encode(pickle.dumps(Command(evidence))).decode()
    stranger.set(f"torch.rendezvous.{RUN}", state)
    yield f"127.0.0.1:{store.port}"


def test_guard_refuses_foreign_pickles(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    with attacked(evidence) as endpoint, pytest.raises(ForeignStateError) as caught, guarded():
        handler(endpoint).next_rendezvous()
    assert not evidence.exists()
    assert "it contains posix.mkdir, which torchrun does not write" in str(caught.value)


def test_torch_executes_pickles_without_guard(tmp_path: Path) -> None:
    """If this fails, torch has changed how it reads the state: see whether the guard can go."""
    evidence = tmp_path / "evidence"
    with attacked(evidence) as endpoint, pytest.raises(AttributeError):
        handler(endpoint).next_rendezvous()
    assert evidence.exists()


def test_guard_accepts_torchrun_state() -> None:
    """Fails if torch adds a class to the state of its rendezvous."""
    nodes = [dynamic_rendezvous._NodeDesc(f"host{number}", number, 0) for number in range(3)]
    state = dynamic_rendezvous._RendezvousState()
    state.round = 7
    state.deadline = datetime.now(timezone.utc) + timedelta(seconds=1)
    state.participants = {nodes[0]: 0}
    state.wait_list = {nodes[1]}
    state.redundancy_list = {nodes[2]}
    state.last_heartbeats = {node: datetime.now(timezone.utc) for node in nodes}
    # Every field that a new version of torch has is filled above, or is of a plain type.
    plain = (int, bool, str, type(None))
    for name, value in vars(state).items():
        assert value or isinstance(value, plain), name
    assert vars(load_state(pickle.dumps(state))) == vars(state)


def test_guard_is_removed_afterwards() -> None:
    with guarded():
        assert dynamic_rendezvous.pickle.loads is load_state
    assert dynamic_rendezvous.pickle is pickle


@pytest.mark.parametrize("host", ["127.0.0.1", nightly("localhost")])
def test_torchrun_stores_listen_on_endpoint_address(host: str) -> None:
    with guarded():
        rendezvous = handler(f"{host}:0")
        rendezvous.next_rendezvous()
        addresses = listening()
        rendezvous.shutdown()
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)


def test_store_on_known_port_is_shared_with_torchrun() -> None:
    store = open_store("127.0.0.1", 0)
    store.set("mine", "1")
    with guarded():
        rendezvous = handler(f"127.0.0.1:{store.port}")
        assert rendezvous._store.get("mine") == b"1"


def test_store_refuses_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", other.getsockname()[1])


# Clocks of the machines differ, and machines fall silent


class Machine:
    """This machine in a rendezvous with a peer that exists only as state in the store.

    Args:
        peer_clock: How far the peer's clock is ahead.
        min_nodes: Number of machines with which ranks may start.
        max_nodes: Number of machines with which they start at once.
        **conf: Configuration of the rendezvous.
    """

    def __init__(self, peer_clock: timedelta, min_nodes: int, max_nodes: int, **conf: str) -> None:
        port = open_store("127.0.0.1", 0).port
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", RUN, min_nodes, max_nodes, "127.0.0.1", **conf
        )
        self.backend, store = create_backend(parameters)
        self.handler = dynamic_rendezvous.create_handler(store, self.backend, parameters)
        self.peer = dynamic_rendezvous._NodeDesc("127.0.0.2", 1, 0)  # rank 1
        self._peer_clock = peer_clock

        def join(state: Any) -> None:
            state.participants[self.peer] = 0
            state.last_heartbeats[self.peer] = self.peer_time()
            if min_nodes == 1:
                state.deadline = self.peer_time() + self.handler.settings.timeout.last_call

        self.change(join)

    def peer_time(self) -> datetime:
        return datetime.now(timezone.utc) + self._peer_clock

    def state(self) -> Any:
        return load_state(self.backend.get_state()[0])  # type: ignore[index]

    def change(self, edit: Callable[[Any], None]) -> None:
        """Change the state in the store as the peer does."""
        written = False
        while not written:
            found = self.backend.get_state()
            state = load_state(found[0]) if found else dynamic_rendezvous._RendezvousState()
            edit(state)
            token = found[1] if found else None
            _, _, written = self.backend.set_state(pickle.dumps(state), token)  # type: ignore[misc]


DAY = timedelta(days=1)


@pytest.mark.parametrize("peer_clock", [-DAY, timedelta(), DAY])
def test_machines_with_different_clocks_join(peer_clock: timedelta) -> None:
    with guarded():
        machine = Machine(peer_clock, 2, 2, join_timeout="5")
        info = machine.handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 2)
        # Both stay while they send heartbeats.
        assert {*machine.state().participants} == {machine.peer, machine.handler._this_node}
        assert machine.handler.num_nodes_waiting() == 0
        machine.handler.shutdown()


@pytest.mark.parametrize("peer_clock", [-DAY, timedelta(), DAY])
def test_last_call_takes_its_time_on_any_clock(peer_clock: timedelta) -> None:
    with guarded():
        machine = Machine(peer_clock, 1, 3, join_timeout="9", last_call_timeout="2")
        started = time.monotonic()
        assert machine.handler.next_rendezvous().world_size == 2
        assert 2 <= time.monotonic() - started < 6
        machine.handler.shutdown()


@pytest.mark.parametrize("peer_clock", [-DAY, DAY])
def test_ranks_do_not_start_on_fewer_machines_than_asked_for(peer_clock: timedelta) -> None:
    """The peer falls silent after it has joined, and the round is complete without it."""

    def complete(state: Any) -> None:
        state.participants[here] = 0
        state.complete = True

    with guarded(), ThreadPoolExecutor(1) as pool:
        machine = Machine(peer_clock, 2, 3, keep_alive_interval="1", join_timeout="30")
        here = machine.handler._this_node
        joined = pool.submit(machine.handler.next_rendezvous)
        wait_until(lambda: here in machine.state().participants)
        wait_until(lambda: machine.peer not in machine.state().participants)
        machine.change(complete)
        with pytest.raises(LaunchError, match=r"only 1 of 2 hosts are left .*: 127\.0\.0\.1; the"):
            joined.result(timeout=60)
        machine.handler.shutdown()


def test_machine_that_was_not_needed_ends_with_the_run() -> None:
    """torchrun keeps machines beyond `--nnodes` to replace others."""
    with guarded(), ThreadPoolExecutor(1) as pool:
        machine = Machine(timedelta(), 1, 1, join_timeout="30")
        machine.change(lambda state: setattr(state, "complete", True))
        joined = pool.submit(machine.handler.next_rendezvous)
        wait_until(lambda: machine.handler._this_node in machine.state().redundancy_list)
        machine.change(lambda state: setattr(state, "closed", True))
        # Not RendezvousGracefulExitError, for which `failures_explained` would come too late.
        with pytest.raises(api.RendezvousClosedError):
            joined.result(timeout=60)
        machine.handler.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [("--max-restarts", "1"), nightly(("--standalone",)), nightly(("--nnodes", "1"))]
)
def test_single_machine_listens_on_loopback_only(options: tuple[str, ...], tmp_path: Path) -> None:
    with launched("listen", tmp_path, "--nproc-per-node", "2", *options) as run:
        code, output = run.finish()
    assert code == 0, output
    # Restarted ranks find each other in the same stores.
    attempts = 2 if "--max-restarts" in options else 1
    assert len((tmp_path / "starts").read_text().split()) == 2 * attempts
    found = [json.loads((tmp_path / f"{rank}.listening").read_text()) for rank in range(2)]
    assert all(len(addresses) >= 3 for addresses in found), found  # two stores, and gloo
    assert {address for addresses in found for address in addresses} <= {"127.0.0.1", "::1"}
