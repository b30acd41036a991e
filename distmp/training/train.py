"""The entry point `distmp.train`: trains as one rank of a job."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from distmp.config import Config, RunConfig, load
from distmp.distributed.launcher_variables import adopt_ranks
from distmp.distributed.orphans import end_with_launcher, is_orphan
from distmp.distributed.rank_environment import RankEnvironment, is_under_torchrun
from distmp.distributed.stopping import (
    INTERRUPTED_EXIT_CODE,
    StopSignals,
    default_signal_handlers,
    exit_code_after,
    ignore_stop_signals,
    stop_requested_on_any_rank,
)
from distmp.distributed.world import World, join, leave
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE, DistmpError
from distmp.launcher.preflight import is_enabled, join_checked
from distmp.masking import mask_record, masked_text
from distmp.telemetry.console import Console, flush_standard_streams
from distmp.telemetry.rank_log import RankLog
from distmp.training import failures
from distmp.training.callbacks import Callback
from distmp.training.restarts import MORE_MACHINES, Restarts
from distmp.training.trainer import Trainer

if TYPE_CHECKING:
    from distmp.training.callbacks import Callback


def main(argv: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> int:
    """Train, and return the exit code of this rank.

    Args:
        argv: Command line without the program's name; None takes that of this process.
        callbacks: Called after those of the setting `callbacks`, see `distmp.training.callbacks`.

    Returns:
        0 after the last step; 75 after an orderly stop before it, or 130 if that was Ctrl-C; 2 for
        an invalid configuration; 3 if another rank was lost; 4 if ranks hang; 1 for any
        other failure.
    """
    # An error is reported while the signals are still handled: the launcher stops this rank as soon
    # as it sees another one fail, and a SIGTERM must not end it before its message.
    with RankLog() as log, contextlib.ExitStack() as until_reported:

        def work(config: RunConfig, environment: RankEnvironment) -> int:

            return train_as_rank(log, callbacks, until_reported, config, environment)

        return run_as_rank(sys.argv[1:] if argv is None else argv, load, work)


def run_as_rank(
    argv: Sequence[str],
    load: Callable[[Sequence[str]], Config],
    work: Callable[[Config, RankEnvironment], int],
) -> int:
    """Load a configuration and do `work`; report an error once for all ranks.

    Args:
        argv: Command line without the program's name.
        load: Returns the configuration.
        work: Joins the other ranks and returns the exit code of this one.

    Returns:
        The exit code of this rank.
    """
    logging.getLogger("distmp").addFilter(mask_record)
    environment = RankEnvironment()
    try:
        adopt_ranks()
        environment = RankEnvironment.from_variables()
        with _quiet_except_first(environment.local_rank):
            config = load(argv)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # `distmp train --help | head`, which the command handles
        raise
    except Exception as error:  # noqa: BLE001  # reported as the cause of the run's end
        return _refuse(environment, error)
    return _run(config, environment, work)


def _refuse(environment: RankEnvironment, error: Exception) -> int:
    """Report an error in the settings, and return the exit code of this rank."""
    if environment.world_size == 1 and isinstance(error, DistmpError) and not is_under_torchrun():
        sys.stderr.write(f"distmp: {masked_text(str(error))}\n")
        return error.exit_code
    from distmp.training import failures

    return failures.report(environment, error)


def _run(
    config: Config, environment: RankEnvironment, work: Callable[[Config, RankEnvironment], int]
) -> int:
    # Imported late: the help and errors in settings do not wait for torch, which takes seconds.
    from distmp.distributed.world import leave
    from distmp.parallel.reproducible import prepare_cublas
    from distmp.training import failures

    try:
        if config.reproducible:
            prepare_cublas()  # before joining the ranks, which initializes CUDA
        with end_with_launcher():
            return work(config, environment)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except SystemExit as stop:
        # Without its peers, gloo would abort the process.
        error = RuntimeError(f"a function of this run called sys.exit({stop.code!r})")
        error.__cause__ = stop
        return failures.report(environment, error, config)
    except Exception as error:  # noqa: BLE001  # reported as the cause of the run's end
        exit_code = failures.report(environment, error, config)
        if isinstance(error, DistmpError):
            leave()
        return exit_code
    finally:
        failures.stop_watching()


def end_process(exit_code: int) -> NoReturn:
    """End this rank with an exit code.

    If a failure left the process group initialized, the process ends without running destructors:
    gloo's abort the process if other ranks are gone, which would hide the exit code.
    """
    import torch.distributed as dist

    ignore_stop_signals()
    flush_standard_streams()
    if exit_code and dist.is_initialized():
        os._exit(exit_code)
    sys.exit(exit_code)


@contextlib.contextmanager
def _quiet_except_first(local_rank: int) -> Iterator[None]:
    """Let only the first rank of each machine print the help and warn about settings."""
    if local_rank == 0:
        yield
        return
    logger = logging.getLogger("distmp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")):  # closed when the process ends
            yield
    finally:
        logger.setLevel(level)


def train_as_rank(
    log: RankLog,
    callbacks: Sequence[Callback],
    until_reported: contextlib.ExitStack,
    config: RunConfig,
    environment: RankEnvironment,
) -> int:
    """Join the other ranks, train, and return the exit code of this rank.

    Args:
        log: The log of this rank.
        callbacks: Called after those of the setting `callbacks`.
        until_reported: Closed after an error has been reported; stop signals are handled until
            then.
        config: The configuration.
        environment: Rank and number of ranks.
    """
    restarts = Restarts.of_this_job(environment.world_size, config.checkpoint.path)
    if (given_up := restarts.given_up()) is not None:
        if given_up == STOPPED_EXIT_CODE:
            if environment.rank == 0:
                sys.stdout.write("the run was stopped after a checkpoint and is not restarted\n")
            else:
                # If this rank ended first, the launcher would end rank 0 before it prints this.
                failures.wait_to_be_ended()
        return given_up
    log.start(_header(environment))
    quiet = environment.rank != 0
    stop = until_reported.enter_context(StopSignals())
    with Console(config.log, quiet=quiet, log=log) as console:
        with default_signal_handlers() if environment.world_size > 1 else contextlib.nullcontext():
            world = _join(config, environment, console)
        if config.preflight == "only":
            leave()
            return 0
        trainer = Trainer(config, world, console, callbacks, restarts)
        if trainer.lease is not None:
            failures.before_exit(trainer.lease.release)
        failures.write_traces_to(trainer.directory.hang)
        log.place(trainer.directory.log(world.rank))
        finished = trainer.run(stop)
        exit_code = 0 if finished else _stopped(restarts, stop, world)
        leave()
    return exit_code


def _stopped(restarts: Restarts, stop: StopSignals, world: World) -> int:
    """Return the exit code after an orderly stop, and tell the launcher not to restart the run."""
    if stop_requested_on_any_rank(is_orphan(), world.group):
        # A launcher was killed, perhaps the one with the store that `Restarts` uses. Launchers of
        # other hosts may continue without it.
        return LOST_PEER_EXIT_CODE if restarts.max_restarts else exit_code_after(stop.received)
    received = world.ranks.gather(stop.received)
    if world.ranks.from_rank_0(lambda: restarts.follows(received)):
        if world.rank == 0:
            sys.stdout.write(f"{MORE_MACHINES}; the ranks start again with them\n")
        return LOST_PEER_EXIT_CODE
    # torchrun treats every exit code except 0 as a failure, and may restart the ranks.
    restarts.give_up(STOPPED_EXIT_CODE)
    return exit_code_after(stop.received)


def _join(config: RunConfig, environment: RankEnvironment, console: Console) -> World:
    timeout_seconds = 60 * config.timeout_minutes
    watch = partial(failures.watch, environment, config.hang_seconds, 0.9 * timeout_seconds)
    if not is_enabled(config, environment):
        # From here on, so that a rank that stops while the ranks connect is noticed.
        return join(environment, timeout_seconds=timeout_seconds, on_store=watch)
    watch_preflight = partial(failures.watch_preflight, environment)
    world, report = join_checked(config, environment, watch_preflight)
    watch()
    for line in report:
        console.message(f"preflight: {line}")
    return world


def _header(environment: RankEnvironment) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    who = f"rank {environment.rank} of {environment.world_size} on {socket.gethostname()}"
    return f"--- {now}: {who}, pid {os.getpid()}"
