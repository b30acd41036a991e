"""Where the stores of a run listen, and what torchrun may unpickle; see docs/security.md."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import socket
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from distmp.launcher.rendezvous import (
    ForeignStateError,
    guarded,
    load_state,
    open_store,
)
from tests.launcher.test_local import launched
from tests.marks import nightly

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


def test_torchrun_does_not_run_what_a_stranger_wrote(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    with attacked(evidence) as endpoint, pytest.raises(ForeignStateError) as caught, guarded():
        handler(endpoint).next_rendezvous()
    assert not evidence.exists()
    assert "it contains posix.mkdir, which torchrun does not write" in str(caught.value)


def test_torch_still_needs_the_guard(tmp_path: Path) -> None:
    """If this fails, torch has changed how it reads the state: see whether the guard can go."""
    evidence = tmp_path / "evidence"
    with attacked(evidence) as endpoint, pytest.raises(AttributeError):
        handler(endpoint).next_rendezvous()
    assert evidence.exists()


def test_all_that_torchrun_writes_can_be_read() -> None:
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


def test_the_guard_is_removed_afterwards() -> None:
    with guarded():
        assert dynamic_rendezvous.pickle.loads is load_state
    assert dynamic_rendezvous.pickle is pickle


@pytest.mark.parametrize("host", ["127.0.0.1", nightly("localhost")])
def test_torchruns_stores_listen_on_the_address_of_the_endpoint(host: str) -> None:
    with guarded():
        rendezvous = handler(f"{host}:0")
        rendezvous.next_rendezvous()
        addresses = listening()
        rendezvous.shutdown()
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)


def test_a_store_on_a_known_port_is_shared_with_torchrun() -> None:
    store = open_store("127.0.0.1", 0)
    store.set("mine", "1")
    with guarded():
        rendezvous = handler(f"127.0.0.1:{store.port}")
        assert rendezvous._store.get("mine") == b"1"


def test_a_store_does_not_take_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", other.getsockname()[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [("--max-restarts", "1"), nightly(("--standalone",)), nightly(("--nnodes", "1"))],
)
def test_a_run_on_one_machine_listens_on_loopback_only(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with launched("listen", tmp_path, "--nproc-per-node", "2", *options) as run:
        code, output = run.finish()
    assert code == 0, output
    # Restarted ranks find each other in the same stores.
    attempts = 2 if "--max-restarts" in options else 1
    assert len((tmp_path / "starts").read_text().split()) == 2 * attempts
    found = [json.loads((tmp_path / f"{rank}.listening").read_text()) for rank in range(2)]
    assert all(len(addresses) >= 3 for addresses in found), found  # two stores, and gloo
    assert {address for addresses in found for address in addresses} <= {"127.0.0.1", "::1"}
