from __future__ import annotations

import queue
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import api

from distmp.launcher import rendezvous
from distmp.launcher.plan import Endpoint
from distmp.launcher.rendezvous import LaunchError, Rendezvous, failures_explained
from tests.ports import reserved_port
from tests.progress import of_children


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
    return Rendezvous.open(endpoint(port), quiet)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def quiet(message: str) -> None:
    pytest.fail(f"unexpected log line: {message}")


def test_hosts_join_and_know_each_other(port: int, first: Rendezvous) -> None:
    second = Rendezvous.open(endpoint(port, is_host=False, local_address="127.0.0.2"), quiet)
    assert [member.address for member in first.members()] == ["127.0.0.1", "127.0.0.2"]
    assert second.members() == first.members()
    assert first.unresponsive() == second.unresponsive() == []
    assert "although they respond" in first.timeout_message()


def test_a_host_that_does_not_join_is_named(first: Rendezvous) -> None:
    with pytest.raises(LaunchError, match=r"only 1 of 2 hosts joined .*; missing: n2\."):
        raise_in(first, api.RendezvousTimeoutError())


def test_the_first_host_says_whom_it_waits_for(
    first: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "SAY_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "INTERVAL_SECONDS", 0.05)
    lines: queue.Queue[str] = queue.Queue()
    with first.watched(pytest.fail, lambda: False, lines.put):
        line = lines.get(timeout=60)
        assert re.fullmatch(r"waiting for n2 \(joined: .* \(127\.0\.0\.1\)\), up to \d+ s", line)
        time.sleep(0.3)
    # It repeats only what has changed.
    assert lines.empty()


def test_a_host_that_falls_silent_is_named(
    port: int, first: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rendezvous.open(endpoint(port, is_host=False, local_address="127.0.0.2"), quiet)
    monkeypatch.setattr(rendezvous, "responds", lambda address, port=9: address != "127.0.0.2")
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
def test_errors_of_torchrun_are_one_message(
    error: Exception, message: str, first: Rendezvous
) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        raise_in(first, error)
    assert caught.value.__suppress_context__


def raise_in(joined: Rendezvous, error: Exception) -> None:
    with failures_explained(joined):
        raise error


def test_a_port_in_use(listener: socket.socket) -> None:
    with pytest.raises(LaunchError, match=r"is in use; end the process .*--port"):
        Rendezvous.open(endpoint(listener.getsockname()[1]), quiet)


def test_another_program_that_listens(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_SECONDS", 0.5)
    with pytest.raises(LaunchError, match="is not the rendezvous of a run"):
        Rendezvous.open(endpoint(listener.getsockname()[1], is_host=False), quiet)


@pytest.mark.usefixtures("first")
def test_another_run_that_waits_at_the_endpoint(port: int) -> None:
    with pytest.raises(LaunchError, match=r"another run .*: 7\.0, and this is 8\.0"):
        Rendezvous.open(endpoint(port, is_host=False, run_id="8.0"), quiet)


def test_nobody_listens(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SAY_AFTER_SECONDS", 0.0)
    lines: list[str] = []
    with pytest.raises(LaunchError, match=r"within 1 s \(Connection refused\): the host responds"):
        Rendezvous.open(endpoint(port, is_host=False), lines.append)
    (message,) = lines
    assert "waiting for the first machine (n1, 127.0.0.1)" in message


def test_a_silent_first_host_is_detected(
    port: int, first: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "INTERVAL_SECONDS", 0.1)
    second = Rendezvous.open(endpoint(port, is_host=False, read_timeout_seconds=2), quiet)
    lost: list[str] = []
    # It responds on the connection, although it accepts no new ones.
    monkeypatch.setattr(rendezvous, "responds", lambda address, port: False)
    with second.watched(lost.append, lambda: True, quiet):
        time.sleep(3)
    assert lost == []
    # It accepts new connections, but does not respond: it is busy.
    probed = threading.Semaphore(0)
    monkeypatch.setattr(rendezvous, "responds", lambda *_: probed.release() or True)
    monkeypatch.setattr(second, "store", Silent())
    with second.watched(lost.append, lambda: True, quiet):
        assert probed.acquire(timeout=30)
        assert probed.acquire(timeout=30)
    assert lost == []
    monkeypatch.setattr(rendezvous, "responds", lambda address, port: False)
    with second.watched(lost.append, lambda: True, quiet):
        progress = of_children()
        while not lost:
            assert progress.problem() is None
            time.sleep(0.05)
    assert lost[0].startswith("the first machine (n1, 127.0.0.1) has been silent for ")
    with first.watched(lost.append, lambda: True, quiet):
        pass
    assert len(lost) == 1


class Silent:
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("no response")
