"""A reserved port is free for the server that a test starts, and for nobody else."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from tests.ports import reserved_port


@pytest.mark.parametrize("libuv", [True, False])
def test_torchs_store_listens_on_a_reserved_port(libuv: bool) -> None:
    with reserved_port() as port:
        server = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=libuv
        )
        assert server.port == port
        server.set("key", "value")
        assert server.get("key") == b"value"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_reserved_port_is_in_use(address: str) -> None:
    in_use = pytest.raises(OSError, match="Address already in use")
    with reserved_port() as port, socket.socket() as other, in_use:
        other.bind((address, port))
