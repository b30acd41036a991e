"""How a rank that cannot go on says so: the first cause once, and nothing of what follows from it.

The first rank to speak is the first to write its cause into the store of the launcher. The others
keep silent and wait to be ended by their launcher, which then sees the causing rank end first.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from typing import Any

import torch.distributed as dist

from distmp.distributed import rendezvous_store
from distmp.distributed.lost_peers import is_lost_connection
from distmp.distributed.progress import activity
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.errors import LOST_PEER_EXIT_CODE, DistmpError, LostPeerError, SetupError
from distmp.faults.peers import Ending, Peers
from distmp.faults.watchdog import Watchdog, print_message, record
from distmp.training.out_of_memory import advice

# How long a rank waits for its launcher to end it, which takes well under a second.
GRACE_SECONDS = 15.0
# How long a rank that lost another one waits for that one's message.
MESSAGE_SECONDS = 2.0
STORE_SECONDS = 20.0

_watchdog: Watchdog | None = None


def watch(world: World, seconds: float, first_seconds: float) -> None:
    """Have this rank and the others watched from now on.

    Args:
        world: The ranks, which all have to call it.
        seconds: Without progress for so long, a rank hangs; 0: however long.
        first_seconds: The same until the first step has ended.
    """
    global _watchdog
    stop_watching()
    store: rendezvous_store.Store = rendezvous_store.HashStore()
    if world.group is not None:
        everything = rendezvous_store.connect(STORE_SECONDS)
        store = rendezvous_store.of_attempt(
            everything, rendezvous_store.restarts(), world.world_size
        )
    peers = Peers(rendezvous_store.PrefixStore("peers", store), world.rank, world.world_size)
    never = float("inf")
    _watchdog = Watchdog(peers, activity, seconds or never, first_seconds if seconds else never)
    _watchdog.start()


def stop_watching() -> None:
    """Say that this rank has come to its end, if it is watched."""
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None:
        watchdog.stop()


def report(environment: RankEnvironment, error: Exception, config: Any = None) -> int:
    """Say once for all ranks why they end; return the exit code of this one.

    Args:
        environment: Who this rank is.
        error: What it cannot go on with.
        config: The configuration of the run, if there is one, for advice.
    """
    # The launcher's signal, when it ends this rank because of another, is not to cut a message off.
    with StopSignals():
        return _report(environment, error, config)


def _report(environment: RankEnvironment, error: Exception, config: Any) -> int:
    where = f"rank {environment.rank} of {environment.world_size}"
    if isinstance(error, LostPeerError):
        return _lost(environment)
    if isinstance(error, DistmpError):
        return _speak_once(environment, error, str(error), str(error), error.exit_code)
    if environment.world_size > 1 and is_lost_connection(error):
        return _lost(environment)
    if told := advice(error, config, environment.world_size, str(activity.now)):
        return _speak_once(environment, error, f"{where} {told}", told, 1)
    stack = "".join(traceback.format_exception(error)).rstrip()
    cause = f"{type(error).__name__}: {error}"
    return _speak_once(environment, error, f"{where} failed:\n{stack}", cause, 1)


def _speak_once(
    environment: RankEnvironment, error: Exception, text: str, cause: str, exit_code: int
) -> int:
    """Say `text`, unless another rank has said why the run ends."""
    cause = " ".join(cause.split())
    ending = Ending(environment.rank, activity.now.step, cause, exit_code)
    if not _is_first(environment, error, ending):
        ended = wait_to_be_ended()
        if ended or _watchdog is not None or isinstance(error, SetupError):
            return exit_code
        # Nobody has ended this rank: what it has found is no other rank's error.
    record(cause)
    print_message(text)
    return exit_code


def _is_first(environment: RankEnvironment, error: Exception, ending: Ending) -> bool:
    if _watchdog is not None:
        with contextlib.suppress(dist.DistError):
            return _watchdog.peers.end(ending)
        return True
    # Before ranks are connected each finds by itself what is wrong with what all were told: the
    # first of each machine speaks, or of all where they have found it together.
    if isinstance(error, SetupError):
        return environment.rank == 0
    return environment.local_rank == 0 or not isinstance(error, DistmpError)


def _lost(environment: RankEnvironment) -> int:
    """End because another rank has; say so only where neither that rank nor anybody else has."""
    cause = (
        f"rank {environment.rank} of {environment.world_size} stopped because it lost another "
        "rank, which left no message"
    )
    ending = Ending(environment.rank, activity.now.step, cause, LOST_PEER_EXIT_CODE)
    deadline = time.monotonic() + MESSAGE_SECONDS
    with contextlib.suppress(dist.DistError):
        while _watchdog is not None and time.monotonic() < deadline:
            if _watchdog.peers.ending() is not None or _watchdog.end_for_lost_ranks():
                break
            time.sleep(0.05)
        else:
            if _watchdog is None or _watchdog.peers.end(ending):
                print_message(cause)
    wait_to_be_ended()
    return LOST_PEER_EXIT_CODE


def wait_to_be_ended() -> bool:
    """Let the launcher see the rank that failed end first; return whether it then ended this."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        if StopSignals.last == signal.SIGTERM:
            return True
        time.sleep(0.05)
    return False
