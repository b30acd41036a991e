"""Runs work of a checkpoint on ranks; a failure of one raises a CheckpointError on all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from distmp.distributed.ranks import Failure, Ranks
from distmp.errors import CheckpointError

T = TypeVar("T")


def all_or_checkpoint_error(ranks: Ranks, goal: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result.

    Args:
        ranks: The ranks.
        goal: Completes the message "cannot <goal>: ...".
        work: A function without collectives.

    Raises:
        CheckpointError: On every rank, if `work` raised an exception on any of them.
    """
    return ranks.all_or_none(work, catch=Exception, error=partial(checkpoint_error, goal))


def rank_0_or_checkpoint_error(ranks: Ranks, goal: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank, see `all_or_checkpoint_error`."""
    return ranks.from_rank_0(work, catch=Exception, error=partial(checkpoint_error, goal))


def checkpoint_error(goal: str, failures: dict[int, Failure], world_size: int) -> CheckpointError:
    """Return the error "cannot <goal>: ..." for the failures of some ranks."""
    first, failure = min(failures.items())
    messages = {failure.message for failure in failures.values()}
    if len(failures) == world_size and len(messages) == 1:
        return CheckpointError(f"cannot {goal}: {failure.message}")
    others = f" (rank {first} is the first of {len(failures)})" if len(failures) > 1 else ""
    return CheckpointError(f"cannot {goal}: rank {first}: {failure.message}{others}")
