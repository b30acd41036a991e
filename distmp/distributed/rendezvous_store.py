"""The key-value store of torchrun's agent, shared by all ranks and kept across restarts."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from distmp.distributed.attempt import Agreement, AttemptError
from distmp.distributed.limits import STORE_SECONDS
from distmp.distributed.rank_environment import STORE_VARIABLE, RankEnvironment, read_integer

# Other modules import these from here.
__all__ = ["HashStore", "PrefixStore", "Store"]


CONNECT_SECONDS = 15.0

_attempt: int | None = None


def attempt() -> int:
    """Return how often the ranks of this job were started before, which is the same on all ranks.

    The first call is collective over all ranks if torchrun's agent hosts the store. Otherwise this
    is torchrun's own number.

    Raises:
        AttemptError: If the store cannot be reached, or a rank is missing.
    """
    global _attempt
    restarts = read_integer(os.environ, "TORCHELASTIC_RESTART_COUNT", default="0")
    if not is_hosted_by_agent():
        return restarts
    if _attempt is None:
        _attempt = Agreement(_reach(), RankEnvironment.from_variables(), restarts).number()
    return _attempt


def _reach() -> Store:
    try:
        return connect(CONNECT_SECONDS)
    except dist.DistError as error:
        host, port = address()
        raise AttemptError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} does not reach the store at "
            f"{host}:{port} within {CONNECT_SECONDS:g} s; check that this is the first machine's "
            f"address, and that no firewall blocks it ({str(error).splitlines()[0]})"
        ) from None


def is_hosted_by_agent() -> bool:
    """Return whether the launcher or torchrun's agent hosts the store, not rank 0."""
    return _launchers_store() is not None or (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def address() -> tuple[str, int]:
    """Return host and port of the store that all ranks of the job share."""
    return _launchers_store() or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _launchers_store() -> tuple[str, int] | None:
    run_id, _, endpoint = os.environ.get(STORE_VARIABLE, "").rpartition("@")
    if not endpoint or run_id != os.environ.get("TORCHELASTIC_RUN_ID"):
        return None
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def connect(timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection to the store of the job.

    Args:
        timeout_seconds: Timeout of connecting, and of an operation of the store.
    """
    host, port = address()
    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def for_attempt(store: Store, attempt: int) -> Store:
    """Return a view of the store with separate keys for each attempt.

    Without it (torch 2.13), gloo ranks read the addresses from before the restart and cannot
    connect.

    Args:
        store: The store of the job.
        attempt: Number of the attempt, see `attempt`.
    """
    return PrefixStore(f"distmp/attempt {attempt}", store)


def for_this_start(timeout_seconds: float | None = None) -> Store:
    """Return a new connection to the store of this start of the ranks.

    The launcher or torchrun's agent hosts it, see `for_current_attempt`; otherwise rank 0.

    Args:
        timeout_seconds: Timeout of connecting, and of an operation of the store; None: torch's.
    """
    if is_hosted_by_agent():
        return for_current_attempt(timeout_seconds or STORE_SECONDS)
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else default_pg_timeout
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def for_current_attempt(timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection with the keys of the current attempt, see `for_attempt`."""
    number = attempt()  # fails soon if the store cannot be reached
    return for_attempt(connect(timeout_seconds), number)
