"""The key-value store of torchrun's agent: all ranks reach it, and it outlives their restarts."""

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
    "restarts",
]


def restarts() -> int:
    """Return how many times the agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def most_restarts() -> int:
    """Return how many times the agent restarts the ranks at most."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def is_kept_by_the_launcher() -> bool:
    """Whether the store lives in torchrun's agent and not in rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout_seconds: float) -> Store:
    """Return a connection of its own to the store at MASTER_ADDR.

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
    """Return a view of the store that holds what the ranks leave between two restarts.

    Seen with torch 2.13: without it, ranks of gloo find the addresses of their dead predecessors
    after a restart, and connect to nobody.
    """
    return PrefixStore(f"distmp/{restarts}/{world_size}", store)
