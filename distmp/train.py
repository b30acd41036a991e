"""`torchrun -m distmp.train --config FILE`: train as configured, as one rank of any number."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch.distributed as dist

from distmp.config import RunConfig, load
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE, DistmpError, SetupError
from distmp.launcher.environment import RankEnvironment
from distmp.launcher.stop_note import find_note, leave_note
from distmp.parallel.world import join, leave
from distmp.stopping import StopSignals, ignore_stop_signals
from distmp.telemetry import Console
from distmp.telemetry.streams import flush_standard_streams
from distmp.trainer import Trainer

Config = TypeVar("Config")

# How long a rank waits for torchrun to end it, which takes well under a second.
GRACE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code of this rank.

    Returns:
        0 after the last step; 75 after an orderly stop before it, and 130 if that was Ctrl-C; 2 for
        a configuration that cannot run; 3 if another rank was lost; 1 for any other failure.
    """
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _train)


def run_as_rank(
    argv: Sequence[str],
    load: Callable[[Sequence[str]], Config],
    work: Callable[[Config, RankEnvironment], int],
) -> int:
    """Do `work` as configured, and report what goes wrong once for all ranks.

    Args:
        argv: The command line.
        load: Makes the configuration of it.
        work: Joins the other ranks, and returns the exit code of this one.
    """
    environment = RankEnvironment()
    try:
        environment = RankEnvironment.from_variables()
        with _speaking_once(environment.local_rank):
            config = load(argv)
        return work(config, environment)
    except DistmpError as error:
        _say_once(error, environment)
        leave()
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  # the last resort of a process, which reports it
        return _report_failure(environment, error)


def _say_once(error: DistmpError, environment: RankEnvironment) -> None:
    """Print an error that every rank has found: on the first rank, or the first of each machine.

    The other ranks wait for torchrun to end them: if one of them ended first, torchrun would end
    the one that speaks, before it has spoken. A rank that nobody ends has an error of its own.
    """
    gathered = isinstance(error, SetupError)
    speaks = (environment.rank if gathered else environment.local_rank) == 0
    if not speaks:
        time.sleep(GRACE_SECONDS)
    if speaks or not gathered:
        sys.stderr.write(f"distmp: {error}\n")
        sys.stderr.flush()


def end_process(exit_code: int) -> NoReturn:
    """End this rank with an exit code.

    After a failure, when the process group could not be left in order, the process ends without
    its destructors: those of gloo abort it if the other ranks are gone, which hides the exit code.
    """
    ignore_stop_signals()
    flush_standard_streams()
    if exit_code and dist.is_initialized():
        os._exit(exit_code)
    sys.exit(exit_code)


def _train(config: RunConfig, environment: RankEnvironment) -> int:
    with StopSignals() as stop, Console(config.log, quiet=environment.rank != 0) as console:
        world = join(environment.local_rank, timeout_seconds=60 * config.timeout_minutes)
        if find_note():
            console.message("the run was stopped in order and is not started again")
            leave()
            return STOPPED_EXIT_CODE
        finished = Trainer(config, world, console).run(stop)
        if not finished:
            leave_note()
        leave()
    if finished:
        return 0
    return 128 + signal.SIGINT if stop.received == signal.SIGINT else STOPPED_EXIT_CODE


def _speaking_once(local_rank: int) -> contextlib.AbstractContextManager[object]:
    """Let only the first rank of each machine print the help."""
    if local_rank == 0:
        return contextlib.nullcontext()
    return contextlib.redirect_stdout(open(os.devnull, "w"))  # ends with the process


def _report_failure(environment: RankEnvironment, error: Exception) -> int:
    """Print the cause with its traceback, and a consequence of another rank's failure as a line."""
    where = f"rank {environment.rank} of {environment.world_size}"
    if environment.world_size > 1 and _is_lost_connection(error):
        sys.stderr.write(f"distmp: {where} stopped because it lost another rank\n")
        return LOST_PEER_EXIT_CODE
    sys.stderr.write(f"distmp: {where} failed:\n{''.join(traceback.format_exception(error))}")
    return 1


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because the process at its other end is gone."""
    if isinstance(error, dist.DistNetworkError):
        return True
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


if __name__ == "__main__":
    end_process(main())
