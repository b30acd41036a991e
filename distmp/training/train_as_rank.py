"""Trains as one rank of a job, from joining the others to the exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial

from distmp.config import RunConfig
from distmp.distributed.orphans import is_orphan
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.stopping import (
    StopSignals,
    default_signal_handlers,
    exit_code_after,
    stop_requested_on_any_rank,
)
from distmp.distributed.world import World, join, leave
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE
from distmp.parallel.reproducible import prepare_cublas
from distmp.telemetry.console import Console
from distmp.telemetry.rank_log import RankLog
from distmp.training import failures
from distmp.training.callbacks import Callback
from distmp.training.preflight import is_enabled, join_checked
from distmp.training.restarts import MORE_MACHINES, Restarts
from distmp.training.trainer import Trainer


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
    config = restarts.configuration(config, environment.rank)
    if config.reproducible:
        prepare_cublas()  # before joining the ranks, which initializes CUDA
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    who = f"rank {environment.rank} of {environment.world_size} on {socket.gethostname()}"
    log.start(f"--- {now}: {who}, pid {os.getpid()}")
    stop = until_reported.enter_context(StopSignals())
    console = Console(config.log, quiet=environment.rank != 0)
    with default_signal_handlers() if environment.world_size > 1 else contextlib.nullcontext():
        world = _join(config, environment, console)
    if config.preflight == "only":
        leave()
        return 0
    trainer = Trainer(config, world, console, callbacks, restarts)
    if trainer.lease is not None:
        failures.before_exit(trainer.lease.release)
    log.place(trainer.directory.log(world.rank))
    exit_code = 0 if trainer.run(stop) else _stopped(restarts, stop, world)
    leave()
    return exit_code


def _stopped(restarts: Restarts, stop: StopSignals, world: World) -> int:
    """Return the exit code after an orderly stop, and tell the launcher not to restart the run."""
    received = world.ranks.gather(stop.received)
    exit_code = exit_code_after(signal.SIGINT if signal.SIGINT in received else None)
    if stop_requested_on_any_rank(is_orphan(), world.group):
        # A launcher was killed, perhaps the one with the store that `Restarts` uses. Launchers of
        # other hosts may continue without it.
        return LOST_PEER_EXIT_CODE if restarts.max_restarts else exit_code
    if world.ranks.from_rank_0(lambda: restarts.follows(received)):
        if world.rank == 0:
            sys.stdout.write(f"{MORE_MACHINES}; the ranks start again with them\n")
        return LOST_PEER_EXIT_CODE
    # torchrun treats every exit code except 0 as a failure, and may restart the ranks.
    restarts.give_up(STOPPED_EXIT_CODE)
    return exit_code


def _join(config: RunConfig, environment: RankEnvironment, console: Console) -> World:
    timeout_seconds = 60 * config.timeout_minutes
    watch = partial(failures.watch, environment, config.hang_seconds, 0.9 * timeout_seconds)
    if not is_enabled(config, environment):
        # From here on, so that a rank that stops while the ranks connect is noticed.
        return join(environment, timeout_seconds=timeout_seconds, on_store=watch)
    # The preflight has a shorter limit than a run.
    limit = failures.PREFLIGHT_SECONDS
    watch_preflight = partial(failures.watch, environment, limit, limit, "preflight peers")
    world, report = join_checked(config, environment, watch_preflight)
    watch()
    for line in report:
        console.message(f"preflight: {line}")
    return world
