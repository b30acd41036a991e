"""What one rank cannot do, all of them raise; what one rank decides, all of them know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from distmp.errors import CheckpointError, DistmpError

T = TypeVar("T")


class Ranks:
    """All ranks, and the collectives of one group of them; also a process without a group.

    Args:
        group: Has all ranks; None: the default group, if there is one.

    Attributes:
        group: As given.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.world_size = dist.get_world_size(group) if self.distributed else 1

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def on_rank_0(self, goal: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Raises:
            CheckpointError: On every rank, if it raised an exception.
        """
        result, cause = _attempt(work) if self.rank == 0 else (None, None)
        gathered = self.gather((_problem(cause), result))
        self._raise_together(goal, [problem for problem, _ in gathered], cause)
        return gathered[0][1]  # type: ignore[return-value]  # there was no error

    def on_every_rank(self, goal: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result.

        Args:
            goal: What for, for the error: "cannot <goal>: ...".
            work: What to do.

        Raises:
            CheckpointError: On every rank, if it raised an exception on one of them.
        """
        result, cause = _attempt(work)
        self._raise_together(goal, self.gather(_problem(cause)), cause)
        return result  # type: ignore[return-value]  # there was no error

    @contextmanager
    def one_error(self, goal: str) -> Iterator[None]:
        """Turn the error of torch.distributed.checkpoint, which all ranks raise, into ours."""
        try:
            yield
        except CheckpointException as error:
            failures = error.failures
            problems = [
                describe(failures[rank][0]) if rank in failures else None
                for rank in range(self.world_size)
            ]
            raise _failure(goal, problems) from error

    def _raise_together(
        self, goal: str, problems: list[str | None], cause: Exception | None
    ) -> None:
        if any(problem is not None for problem in problems):
            raise _failure(goal, problems) from cause


def describe(error: BaseException) -> str:
    """Return an error as a part of a message."""
    return str(error) if isinstance(error, DistmpError) else f"{type(error).__name__}: {error}"


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  (raised on all ranks together)
        return None, error


def _problem(error: Exception | None) -> str | None:
    return None if error is None else describe(error)


def _failure(goal: str, problems: list[str | None]) -> CheckpointError:
    """Return the error for one problem per rank (None: this rank had none)."""
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    first = problems[failed[0]]
    if problems.count(first) == len(problems):
        return CheckpointError(f"cannot {goal}: {first}")
    others = f" (rank {failed[0]} is the first of {len(failed)})" if len(failed) > 1 else ""
    return CheckpointError(f"cannot {goal}: rank {failed[0]}: {first}{others}")
