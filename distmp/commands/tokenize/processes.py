"""Runs tasks in worker processes, which also end if this process is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from distmp.data.errors import DataError
from distmp.errors import DistmpError
from distmp.utils.parent_process import signal_when_parent_ends

Result = TypeVar("Result")


def run_tasks(
    function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, Result]]:
    """Call `function` with the arguments of each task, in several processes.

    Args:
        function: An object that can be pickled.
        tasks: The arguments of each call.
        workers: Number of processes.

    Yields:
        Number and result of each task, as soon as it ends.

    Raises:
        DistmpError: If a process cannot be started or ended unexpectedly, or a call raised a
            `DataError`.
        RuntimeError: If a call raised another error; with its traceback.
    """
    remaining = list(enumerate(tasks))[::-1]
    with contextlib.ExitStack() as processes:
        free = [
            processes.enter_context(_process(function)) for _ in range(min(workers, len(tasks)))
        ]
        running: dict[Connection, tuple[int, BaseProcess]] = {}
        while remaining or running:
            while remaining and free:
                connection, process = free.pop()
                number, arguments = remaining.pop()
                # If the process has ended, `_receive` reports it.
                with contextlib.suppress(BrokenPipeError):
                    connection.send(arguments)
                running[connection] = number, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, process = running.pop(ready)
                yield number, _receive(ready, process)
                free.append((ready, process))


@contextlib.contextmanager
def _process(function: Callable[..., Any]) -> Iterator[tuple[Connection, BaseProcess]]:
    # Not forked: libraries of this process may have threads.
    context = multiprocessing.get_context("spawn")
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        process.start()
    except OSError as error:  # a limit of processes, of open files or of memory
        problem = f"cannot start a worker: {error.strerror}; use fewer --workers"
        raise DistmpError(problem) from error
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join()
        ours.close()


def _receive(connection: Connection, process: BaseProcess) -> Any:
    try:
        succeeded, result = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise DistmpError(
            f"a worker ended with exit code {process.exitcode}; run the same command again, with"
            " fewer --workers if memory was short"
        ) from None
    if succeeded:
        return result
    if isinstance(result, DistmpError):
        raise result
    raise RuntimeError(f"a worker failed:\n{result}")


def _serve(connection: Connection, function: Callable[..., Any]) -> None:
    """Run the tasks that arrive, until the other end is closed."""
    # Ctrl-C reaches all processes; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_when_parent_ends()
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(function, arguments))


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*arguments)
    except DataError as error:
        return False, error
    except Exception:  # noqa: BLE001  (the parent raises it)
        return False, traceback.format_exc()
