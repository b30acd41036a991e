"""A note for ranks that torchrun starts again: the run was stopped in order, do not train on.

torchrun takes every exit code but 0 for a failure and, with `--max-restarts`, starts the ranks
again. The note lies in the store of torchrun's agents: it outlives the ranks, every rank of every
machine can read it, and a job that a scheduler starts anew has another one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEY = "distmp/stopped"
_SECONDS = 30.0


def leave_note() -> None:
    """Say to ranks that are started after this one that the run was stopped."""
    store = _agents_store()
    if store is not None:
        store.set(_KEY, "1")


def find_note() -> bool:
    """Return whether ranks before this one have left a note; the same on every rank."""
    store = _agents_store()
    return store is not None and store.check([_KEY])


def _agents_store() -> Any:
    """Connect to the agents' store; None without torchrun, or where it has none to share."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_SECONDS),
    )
