"""Ranks that have ended, as the others see it: a collective that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from distmp.errors import DistmpError, LostPeerError


@contextlib.contextmanager
def lost_peers_explained(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say that another rank has ended where a collective fails because of it.

    Args:
        group: The ranks, or None for a process alone.

    Raises:
        LostPeerError: In place of the error of the collective.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistmpError) or not is_lost_connection(error):
            raise
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        raise LostPeerError(
            f"rank {rank} of {size} stops because another rank has ended; the output of that rank "
            "has the cause"
        ) from error


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because the process at its other end is gone."""
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "ncclRemoteError",
    )
    return any(
        isinstance(cause, dist.DistNetworkError)
        or (isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in signs))
        for cause in (error, error.__cause__, error.__context__)
    )
