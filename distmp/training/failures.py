"""Watches the ranks of a run, and reports why it ends: the first cause, without its consequences.

The first rank that writes its cause into the launcher's store reports it. The others report nothing
and wait for the launcher to end them, so that it sees the rank that failed first end first.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distmp.config import RunConfig
from distmp.distributed import rank_monitor, rendezvous_store
from distmp.distributed.failing_together import is_lost_connection
from distmp.distributed.limits import REJOIN_SECONDS
from distmp.distributed.orphans import is_orphan
from distmp.distributed.progress import current_phase
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE, StopSignals
from distmp.errors import LOST_PEER_EXIT_CODE, DistmpError, LostPeerError, SetupError
from distmp.faults.watchdog import Ending, Watchdog, record
from distmp.masking import print_message
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.utils.processes import holds_within, is_out_of_memory, memory_limit
from distmp.utils.units import bytes_text

# Time in which the launcher has to end a rank; it needs well under a second.
GRACE_SECONDS = 15.0
# Time without progress after which a rank hangs in the preflight. Ranks that start NCCL or compile
# kernels need up to a minute.
PREFLIGHT_SECONDS = 120.0
# Time that a rank that lost its connection to another rank waits for the message of that rank.
MESSAGE_SECONDS = 2.0

_watchdog: Watchdog | None = None


def watch(
    environment: RankEnvironment, seconds: float, first_seconds: float, part: str = "peers"
) -> None:
    """Start watching this rank and the others. Every rank has to call it.

    Args:
        environment: Rank and number of ranks.
        seconds: Seconds without progress after which a rank counts as hanging; 0: never.
        first_seconds: The same until the first step has ended.
        part: Name of the part of the job, which separates its messages from those of others.
    """
    global _watchdog
    stop_watching()
    store: rendezvous_store.Store = rendezvous_store.HashStore()
    address = None
    if "RANK" in os.environ:
        store = rendezvous_store.for_current_attempt(REJOIN_SECONDS)
        address = rendezvous_store.address()
    never = float("inf")
    _watchdog = Watchdog(
        rendezvous_store.PrefixStore(part, store),
        environment,
        seconds or never,
        first_seconds if seconds else never,
        store_address=address,
    )
    _watchdog.watch()
    rank_monitor.use(_watchdog)


def before_exit(action: Callable[[], object]) -> None:
    """Call `action` before the watchdog ends this rank; the action must not raise."""
    if _watchdog is not None:
        _watchdog.before_exit = action


def stop_watching() -> None:
    """Stop watching this rank before it exits."""
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None:
        rank_monitor.use(None)
        watchdog.stop()


def report(environment: RankEnvironment, error: Exception, config: Any = None) -> int:
    """Report why the ranks end, once for all of them; return the exit code of this rank.

    Args:
        environment: Rank and number of ranks.
        error: The error that ended this rank.
        config: The configuration, for advice; None if it was not loaded.
    """
    # The signal by which the launcher ends this rank must not interrupt a message.
    with StopSignals():
        return _report(environment, error, config)


def _report(environment: RankEnvironment, error: Exception, config: Any) -> int:
    where = f"rank {environment.rank} of {environment.world_size}"
    is_lost = isinstance(error, LostPeerError) or (
        not isinstance(error, DistmpError) and is_lost_connection(error)
    )
    if isinstance(error, LostPeerError) and isinstance(error.__cause__, RuntimeError):
        error = error.__cause__  # perhaps of a connection to a server
    if is_lost and environment.world_size > 1 and _has_lost_rank(environment, where, error):
        wait_to_be_ended()
        return LOST_PEER_EXIT_CODE
    if isinstance(error, DistmpError):
        return _report_once(environment, error, str(error), str(error), error.exit_code)
    if message := advice(error, config, environment.world_size, str(current_phase.now)):
        return _report_once(environment, error, f"{where} {message}", message, 1)
    cause = f"{type(error).__name__}: {error}"
    return _report_once(environment, error, f"{where} failed:\n{_stack(error)}", cause, 1)


def _stack(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _report_once(
    environment: RankEnvironment, error: Exception, text: str, cause: str, exit_code: int
) -> int:
    """Print `text`, unless another rank has reported why the run ends."""
    cause = " ".join(cause.split())
    if not _is_first(environment, error, Ending(environment.rank, cause, exit_code)):
        if isinstance(error, SetupError) and environment.rank >= environment.local_world_size:
            _wait_for_watchdog(lambda watchdog: watchdog.ending() is not None)
            return exit_code
        if wait_to_be_ended() or _watchdog is not None or isinstance(error, SetupError):
            return exit_code
        # The launcher did not end this rank, so its error is not the consequence of another one.
    record(cause)
    print_message(text)
    if isinstance(error, SetupError):
        # The store ends with the first machine. The others end with the same exit code before.
        others = range(environment.local_world_size, environment.world_size)
        _wait_for_watchdog(lambda watchdog: all(map(watchdog.has_left, others)))
    return exit_code


def _is_first(environment: RankEnvironment, error: Exception, ending: Ending) -> bool:
    # A SetupError is the same on all ranks: rank 0 reports it.
    if isinstance(error, SetupError) and environment.rank:
        return False
    if _watchdog is not None:
        with contextlib.suppress(dist.DistError):
            return _watchdog.end_run(ending)
        return True
    # Before ranks are connected, each checks the common configuration independently: the first rank
    # of each machine reports its errors.
    return environment.local_rank == 0 or not isinstance(error, DistmpError)


def _has_lost_rank(environment: RankEnvironment, where: str, error: Exception) -> bool:
    """Return whether another rank ended; report it if no rank has reported the cause.

    If all ranks are on this machine and none has ended, this rank lost a connection of its own.
    Ranks that nothing watches, as on other machines, may have ended: the error is printed as well.
    """
    if not _wait_for_watchdog(
        lambda watchdog: watchdog.ending() is not None or watchdog.end_for_lost_ranks()
    ):
        if _watchdog is not None and environment.local_world_size == environment.world_size:
            return False
        cause = f"{where} stopped because it lost another rank, which left no message"
        _print_first(Ending(environment.rank, cause, LOST_PEER_EXIT_CODE), f"\n{_stack(error)}")
    return True


def report_interrupt(environment: RankEnvironment) -> None:
    """Report that a KeyboardInterrupt ends this rank, unless another rank has reported its end."""
    cause = "interrupted by a second Ctrl-C or a KeyboardInterrupt, without saving a checkpoint"
    _print_first(Ending(environment.rank, cause, INTERRUPTED_EXIT_CODE))


def _print_first(ending: Ending, details: str = "") -> None:
    """Print why this rank ends, unless another rank has reported why the run ends."""
    with contextlib.suppress(dist.DistError):
        if _watchdog is None or _watchdog.end_run(ending):
            print_message(ending.cause + details)


def _wait_for_watchdog(condition: Callable[[Watchdog], bool]) -> bool:
    """Wait up to `MESSAGE_SECONDS`; return whether a condition holds, or the store is gone."""
    if (watchdog := _watchdog) is None:
        return False
    with contextlib.suppress(dist.DistError):
        return holds_within(lambda: condition(watchdog), MESSAGE_SECONDS)
    return True


def wait_to_be_ended() -> bool:
    """Wait for the launcher, which saw another rank fail, to end this one.

    Returns:
        True if it does, or has ended itself; False if it does nothing for `GRACE_SECONDS`.
    """
    return holds_within(lambda: StopSignals.last == signal.SIGTERM or is_orphan(), GRACE_SECONDS)


def advice(
    error: BaseException, config: RunConfig | None, world_size: int, phase: str
) -> str | None:
    """Return a message that replaces the traceback of an out-of-memory error.

    Args:
        error: Any error.
        config: The configuration; None if it was not loaded.
        world_size: Number of ranks.
        phase: What the rank was doing, as text.

    Returns:
        torch's message, the memory in use, and the settings that need less memory; None for other
        errors.
    """
    if not is_out_of_memory(error):
        return None
    on_gpu = torch.cuda.is_available() and re.search("cuda|cublas", str(error), re.I) is not None
    cause = " ".join(str(error).split()) or type(error).__name__
    lines = [f"ran out of {'GPU' if on_gpu else 'main'} memory in {phase}: {cause}"]
    if not on_gpu:
        lines.append(f"  in use: {_host_usage()}")
    changes = [] if config is None else _changes(config, world_size)
    lines += [f"  - {change}" for change in changes]
    lines.append(
        "  `distmp explain` with the options of this run predicts the memory, before and after a "
        "change"
    )
    return "\n".join(lines)


def _host_usage() -> str:
    machine = psutil.virtual_memory()
    usage = (
        f"{bytes_text(psutil.Process().memory_info().rss)} by this rank; "
        f"{bytes_text(machine.available)} of {bytes_text(machine.total)} are free on this machine"
    )
    limit = memory_limit()
    if limit is not None and limit < machine.total:
        usage += f", and the limit of this job is {bytes_text(limit)}"
    return usage


def _changes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield changes that need less memory and give the same result, the cheapest first."""
    size = config.batch.microbatch_size
    if smaller := next((d for d in range(size // 2, 0, -1) if size % d == 0), None):
        yield (
            f"batch.microbatch_size = {smaller} instead of {size}: the same global batch of "
            f"{config.batch.global_batch_size} in {size // smaller} times as many microbatches"
        )
    if (value := config.activation_checkpointing) != "blocks":
        yield f"activation_checkpointing = blocks instead of {value}: takes up to a third more time"
    if world_size > 1 and config.strategy not in SHARDED_STRATEGIES:
        # The run prints what `auto` selected; the configuration does not have it.
        condition = ", if auto selected ddp" if config.strategy == "auto" else ""
        yield (
            f"strategy = fsdp instead of {config.strategy}{condition}: shards weights, gradients "
            f"and optimizer state over {world_size} ranks"
        )
    yield f"more ranks than {world_size}, or a smaller model"
