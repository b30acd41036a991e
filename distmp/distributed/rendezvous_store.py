"""The key-value store of torchrun's agent: reachable by all ranks, and kept across restarts."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "connect",
    "is_kept_by_the_launcher",
    "most_restarts",
    "of_attempt",
    "of_this_attempt",
    "restarts",
]


# As torch has it for its stores.
STORE_SECONDS = 300.0


def restarts() -> int:
    """Return how many times the agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def most_restarts() -> int:
    """Return how many restarts the agent allows."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def is_kept_by_the_launcher() -> bool:
    """Whether the store lives in torchrun's agent and not in rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection to the store at MASTER_ADDR.

    Args:
        timeout_seconds: An operation that takes longer fails.
    """
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def of_attempt(store: Store, restarts: int, world_size: int) -> Store:
    """Return a view of the store for the keys that ranks write between two restarts.

    Without it (torch 2.13), ranks of gloo read the addresses of their predecessors after a restart
    and cannot connect.
    """
    return PrefixStore(f"distmp/{restarts}/{world_size}", store)


def of_this_attempt(world_size: int, timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection for the keys that ranks write until the next restart."""
    return of_attempt(connect(timeout_seconds), restarts(), world_size)
