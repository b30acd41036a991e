"""Runs work on all ranks, which fail together if one of them fails or has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from distmp.errors import DistmpError, LostPeerError, SetupError

T = TypeVar("T")


class Failure(NamedTuple):
    """Why the work of a rank failed.

    Attributes:
        message: Message of the error.
        exit_code: Exit code of a process that ends with the error.
    """

    message: str
    exit_code: int


# Combines the failures by rank into one error; the second argument is the number of ranks.
CombinedError = Callable[[dict[int, Failure], int], DistmpError]


def _setup_error(failures: dict[int, Failure], world_size: int) -> SetupError:
    messages = {rank: failure.message for rank, failure in failures.items()}
    return SetupError(messages, max(failure.exit_code for failure in failures.values()))


class Ranks:
    """The ranks of a group, which fail together. A process without a group is a single rank.

    Args:
        group: None uses the default group, if there is one.

    Attributes:
        group: The process group; None for the default group or a single process.
        distributed: Whether a default process group exists.
        rank: This rank in the group.
        world_size: Number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        # A group that was destroyed meanwhile is an error, not a single process.
        self.distributed = group is not None or dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.world_size = dist.get_world_size(group) if self.distributed else 1

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self.world_size
        if self.distributed:
            with explain_lost_peers(self.group or dist.group.WORLD):
                dist.all_gather_object(values, value, group=self.group)
        return values

    def all_or_none(
        self,
        work: Callable[[], T],
        *,
        catch: type[Exception] = DistmpError,
        error: CombinedError = _setup_error,
    ) -> T:
        """Run `work` on every rank and return this rank's result.

        Args:
            work: A function without collectives, which a rank that fails would not reach.
            catch: Errors of this class are raised on all ranks. Any other error ends its rank.
            error: Combines the failures into the error that all ranks raise.

        Raises:
            DistmpError: The same on every rank, if `work` failed on any of them.
        """
        result, failure, cause = _attempt(work, catch)
        self._raise_together(self.gather(failure), error, cause)
        return result  # type: ignore[return-value]  # no rank failed

    def all_or_own_error(self, work: Callable[[], T]) -> T:
        """Run `work` as `all_or_none`, which raises the error of this rank itself, if it failed.

        Raises:
            DistmpError: The error of `work` on this rank.
            SetupError: If `work` failed on other ranks only.
        """
        try:
            return self.all_or_none(work)
        except SetupError as error:
            raise error.__cause__ or error from None

    def from_rank_0(
        self,
        work: Callable[[], T],
        *,
        catch: type[Exception] = DistmpError,
        error: CombinedError = _setup_error,
    ) -> T:
        """Run `work` on rank 0 and return its result on every rank, see `all_or_none`."""
        result, failure, cause = _attempt(work, catch) if self.rank == 0 else (None, None, None)
        gathered = self.gather((failure, result))
        self._raise_together([failure for failure, _ in gathered], error, cause)
        return gathered[0][1]  # type: ignore[return-value]  # rank 0 did not fail

    def _raise_together(
        self, by_rank: list[Failure | None], error: CombinedError, cause: Exception | None
    ) -> None:
        failures = {rank: failure for rank, failure in enumerate(by_rank) if failure is not None}
        if failures:
            raise error(failures, self.world_size) from cause


def describe(error: BaseException) -> str:
    """Return an error as text, for a part of a message."""
    return str(error) if isinstance(error, DistmpError) else f"{type(error).__name__}: {error}"


def _attempt(
    work: Callable[[], T], catch: type[Exception]
) -> tuple[T | None, Failure | None, Exception | None]:
    try:
        return work(), None, None
    except catch as error:
        exit_code = error.exit_code if isinstance(error, DistmpError) else 1
        return None, Failure(describe(error), exit_code), error


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
        if group is None or isinstance(error, DistmpError) or not is_lost_connection(error):
            raise
        rank, size = dist.get_rank(group), dist.get_world_size(group)
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
    fewer = f"called {call} less often" if call else "took fewer steps"
    return LostPeerError(
        f"rank {rank} of {world_size} stops because another rank has ended; the output of that "
        f"rank{number} has the cause; if it has no error, that rank was killed, called sys.exit, "
        f"or {fewer} than this rank"
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
