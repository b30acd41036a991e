"""Recognizes collectives that failed because another rank has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from distmp.errors import DistmpError, LostPeerError


@contextlib.contextmanager
def explain_lost_peers(group: dist.ProcessGroup | None, call: str = "") -> Iterator[None]:
    """Replace the error of a collective that failed because another rank has ended.

    Args:
        group: The ranks; None for a single process.
        call: What every rank has to call here, for the message; "" if unknown.

    Raises:
        LostPeerError: In place of the error of the collective.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistmpError) or not is_lost_connection(error):
            raise
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        raise lost_peer_error(rank, size, call=call) from error


def lost_peer_error(rank: int, world_size: int, lost: str = "", call: str = "") -> LostPeerError:
    """Return the error of a rank that stops because another rank has ended.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        lost: The rank that has ended, with its machine; "" if unknown.
        call: The call in which this rank waits for the other; "" if unknown.
    """
    number = f", {lost}," if lost else ""
    hint = f"; if it has no error, that rank lacks {call}, which every rank has to call"
    return LostPeerError(
        f"rank {rank} of {world_size} stops because another rank has ended; the output of that "
        f"rank{number} has the cause{hint if call else ''}"
    )


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another process has closed the connection."""
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
