"""The key-value store of torchrun's agent, shared by all ranks and kept across restarts."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "connect",
    "for_attempt",
    "for_current_attempt",
    "is_hosted_by_agent",
    "max_restarts",
    "restarts",
]


# torch's default timeout of a store.
STORE_SECONDS = 300.0


def restarts() -> int:
    """Return the number of times that the agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def max_restarts() -> int:
    """Return the number of restarts that the agent allows."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def is_hosted_by_agent() -> bool:
    """Return whether torchrun's agent hosts the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection to the store at MASTER_ADDR.

    Args:
        timeout_seconds: Timeout of an operation of the store.
    """
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )


def for_attempt(store: Store, restarts: int, world_size: int) -> Store:
    """Return a view of the store with separate keys for each restart.

    Without it (torch 2.13), gloo ranks read the addresses from before the restart and cannot
    connect.

    Args:
        store: The store of the agent.
        restarts: Number of restarts before this attempt.
        world_size: Number of ranks in this attempt.
    """
    return PrefixStore(f"distmp/{restarts}/{world_size}", store)


def for_current_attempt(world_size: int, timeout_seconds: float = STORE_SECONDS) -> Store:
    """Return a new connection with the keys of the current attempt, see `for_attempt`."""
    return for_attempt(connect(timeout_seconds), restarts(), world_size)
