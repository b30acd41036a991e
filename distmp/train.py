"""`torchrun -m distmp.train --config FILE`: train as configured, as one rank of any number."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import NoReturn, TypeVar

import torch.distributed as dist

from distmp.config import RunConfig, load
from distmp.errors import LOST_PEER_EXIT_CODE, DistmpError, SetupError
from distmp.launcher import preflight
from distmp.launcher.environment import RankEnvironment
from distmp.parallel.world import World, join, leave
from distmp.stopping import StopSignals
from distmp.telemetry import Console, RankLog
from distmp.trainer import Trainer

Config = TypeVar("Config")

# How long a rank waits for torchrun to end it, which takes well under a second.
GRACE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code of this rank.

    Returns:
        0 after the last step; 2 for a configuration that cannot run; 128 plus the signal after an
        orderly stop; 3 if another rank was lost; 1 for any other failure.
    """
    with RankLog() as log:
        work = functools.partial(_train, log)
        return run_as_rank(sys.argv[1:] if argv is None else argv, load, work)


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
    if exit_code and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _train(log: RankLog, config: RunConfig, environment: RankEnvironment) -> int:
    if config.log.files:
        log.start(_header(environment))
    quiet = environment.rank != 0
    with StopSignals() as stop, Console(config.log, quiet=quiet, log=log) as console:
        world = _join(config, environment, console)
        trainer = Trainer(config, world, console)
        log.place(trainer.directory.log(world.rank))
        finished = trainer.run(stop)
        leave()
    return 0 if finished else 128 + (stop.received or signal.SIGTERM)


def _join(config: RunConfig, environment: RankEnvironment, console: Console) -> World:
    if not preflight.is_wanted(config, environment):
        return join(environment.local_rank, timeout_seconds=60 * config.timeout_minutes)
    world, report = preflight.join_checked(config, environment)
    for line in (report.summary, *report.warnings):
        console.message(f"preflight: {line}")
    return world


def _header(environment: RankEnvironment) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    who = f"rank {environment.rank} of {environment.world_size} on {socket.gethostname()}"
    return f"--- {now}: {who}, pid {os.getpid()}"


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
