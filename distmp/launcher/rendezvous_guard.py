"""Restrict torchrun's rendezvous in this process: where its stores listen, and what it unpickles.

torch's stores listen on every interface, and torchrun unpickles what it reads from them. Everybody
who can reach the port could run code as the user of the launcher. See docs/security.md.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from distmp.distributed.limits import STORE_SECONDS
from distmp.errors import DistmpError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Connections that the kernel keeps until the store accepts them; all ranks connect at once.
_BACKLOG = 2048
_TIMEOUT = timedelta(seconds=STORE_SECONDS)
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
# The classes of torchrun's rendezvous state.
_STATE_CLASSES = frozenset(
    {
        (_RENDEZVOUS, "_RendezvousState"),
        (_RENDEZVOUS, "_NodeDesc"),
        ("builtins", "set"),
        ("datetime", "datetime"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
    }
)


class ForeignStateError(DistmpError, RuntimeError):
    """A program other than torchrun has written the state of the rendezvous."""


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}, which torchrun does not write"
            )
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

    Raises:
        ForeignStateError: If a program other than torchrun has written the state.
    """
    from torch.distributed.elastic.rendezvous import (
        api,
        c10d_rendezvous_backend,
        dynamic_rendezvous,
    )

    original = c10d_rendezvous_backend.TCPStore  # type: ignore[attr-defined]
    handler = dynamic_rendezvous.DynamicRendezvousHandler

    def store(host: str, port: int, *, is_master: bool, **options: Any) -> TCPStore:
        # With another port, `distmp.launcher.rendezvous` has opened the store, and torch shares it.
        if is_master and port == 0:
            return open_store(host, port, options.get("timeout", _TIMEOUT))
        return original(host, port, is_master=is_master, **options)

    restricted = SimpleNamespace(**vars(pickle) | {"loads": load_state})
    with (
        _explained(api.RendezvousStateError),
        mock.patch.object(c10d_rendezvous_backend, "TCPStore", store),
        mock.patch.object(
            handler, "_create_tcp_store_server", lambda _, host, port: open_store(host, port)
        ),
        mock.patch.object(dynamic_rendezvous, "pickle", restricted),
    ):
        yield


@contextlib.contextmanager
def _explained(state_error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except state_error as error:
        raise ForeignStateError(
            f"the state in the rendezvous store is not torchrun's: {error.__cause__}. Another "
            "program writes to the store: find out which one reaches its port, choose another "
            "port, and see docs/security.md"
        ) from None
