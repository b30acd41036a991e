"""Start the ranks of a run on this machine with torchrun, and give its outcome as an exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE, ConfigError
from distmp.launcher.orderly_stop import INTERRUPTED_EXIT_CODE, OrderlyStop
from distmp.stopping import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Options whose presence says that the user arranges for ranks to find each other.
_RENDEZVOUS = (
    "standalone",
    "nnodes",
    "rdzv_backend",
    "rdzv_endpoint",
    "master_addr",
    "master_port",
)

# What torchrun logs about every orderly stop or failed rank; `_report` says it in one line.
_NOISE = {
    "torch.distributed.elastic.agent.server.api": ("Received %s death signal",),
    "torch.distributed.elastic.multiprocessing.api": (
        "Sending process %s closing signal",
        "failed (exitcode: %s)",
    ),
}

# How ranks end because another one did: SIGTERM is what torchrun stops them with, SIGABRT is how
# NCCL's watchdog answers the loss of a peer.
_CONSEQUENCES = (
    LOST_PEER_EXIT_CODE,
    -signal.SIGTERM,
    128 + signal.SIGTERM,
    -signal.SIGABRT,
)

# The kernel may take a while to free a killed rank's memory.
_KILL_SECONDS = 5.0


def default_ranks() -> tuple[int, str]:
    """Return how many ranks to start on this machine, and why that many."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return count, f"one for each of {count} CUDA devices" if count > 1 else "one CUDA device"
    if _cores() == 1:
        return 1, "no CUDA device and one processor core"
    return 2, "no CUDA device; two ranks on the CPU are a distributed run"


def launch(torchrun_arguments: list[str], train_arguments: list[str]) -> int:
    """Check the run's configuration, then train on ranks started by torchrun.

    Args:
        torchrun_arguments: Options of torchrun. The number of ranks and a rendezvous on this
            machine are filled in where absent.
        train_arguments: Options of `distmp.train`.

    Returns:
        0 after success; the exit code of the rank that failed first, or 128 plus the signal that
        killed it; 75 after an orderly stop that leaves a checkpoint to go on from, 130 if that was
        Ctrl-C.

    Raises:
        ConfigError: If the configuration or an option is wrong; no rank has been started.
        SystemExit: With code 0 if the options ask for help.
    """
    from distmp.config import load

    load(train_arguments)
    return run_ranks(torchrun_arguments, "distmp.train", train_arguments)


def run_ranks(torchrun_arguments: list[str], module: str, arguments: list[str]) -> int:
    """Run `python -m module arguments` on ranks started by torchrun; see `launch`."""
    completed = _complete(torchrun_arguments, module)
    options = _parse([*completed, "-m", module, *arguments], torchrun_arguments)
    ranks = _local_ranks(options, torchrun_arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    command = shlex.join(["torchrun", *completed, "-m", module, *arguments])
    _say(f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} {command}")
    return _run(options)


def _cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _say(message: str) -> None:
    # Whoever was to read it may have gone, with the terminal.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distmp launch: {message}\n")
        sys.stderr.flush()


def _complete(torchrun_arguments: list[str], module: str) -> list[str]:
    """Add the number of ranks and the rendezvous to torchrun's options where they are absent."""
    # An option's default is used only where the namespace has no value yet: None stays where the
    # option is absent.
    unset = Namespace(**dict.fromkeys(("nproc_per_node", *_RENDEZVOUS)))
    given = _parse([*torchrun_arguments, "-m", module], torchrun_arguments, unset)
    completed = list(torchrun_arguments)
    if not any(_is_given(given, name) for name in _RENDEZVOUS):
        completed.insert(0, "--standalone")
    if not _is_given(given, "nproc_per_node"):
        ranks, reason = default_ranks()
        _say(f"{ranks} rank{'s' if ranks > 1 else ''} ({reason}); choose with --nproc-per-node")
        completed.insert(0, f"--nproc-per-node={ranks}")
    return completed


def _is_given(given: Namespace, name: str) -> bool:
    # torchrun takes each option from the environment too.
    return getattr(given, name) is not None or f"PET_{name.upper()}" in os.environ


def _parse(
    words: list[str], torchrun_arguments: list[str], namespace: Namespace | None = None
) -> Namespace:
    from torch.distributed.run import get_args_parser

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            options = get_args_parser().parse_args(words, namespace)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        problem = messages.getvalue().strip().rpartition("error: ")[2]
        raise _not_torchruns(torchrun_arguments, problem) from None
    if not options.module:
        raise _not_torchruns(torchrun_arguments, f"{options.training_script!r} is not an option")
    return options


def _not_torchruns(torchrun_arguments: list[str], problem: str) -> ConfigError:
    return ConfigError(
        "distmp launch",
        shlex.join(torchrun_arguments),
        f"torchrun does not take this: {problem}. Write torchrun's options before '--' and the "
        "run's behind it: distmp launch --nproc-per-node 2 -- --config FILE",
    )


def _local_ranks(options: Namespace, torchrun_arguments: list[str]) -> int:
    """Return the number of ranks to start on this machine, having checked torchrun's values."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        ranks = determine_local_world_size(options.nproc_per_node)
        fewest, most = parse_min_max_nnodes(options.nnodes)
    except (RuntimeError, ValueError) as error:
        raise _not_torchruns(torchrun_arguments, str(error)) from None
    if ranks < 1:
        raise ConfigError("--nproc-per-node", ranks, "must be at least 1")
    if not 1 <= fewest <= most:
        raise ConfigError("--nnodes", options.nnodes, "must be N or MIN:MAX with 1 <= MIN <= MAX")
    return ranks


def _run(options: Namespace) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    _drop_noise()
    with OrderlyStop(options) as stop:
        try:
            run(options)
        except SignalException as signalled:
            return _stopped(signalled.sigval, stop)
        except ChildFailedError as error:
            return _report(error.failures)
    return 0


def _drop_noise() -> None:
    for name, starts in _NOISE.items():
        logging.getLogger(name).addFilter(_without(starts))


def _without(starts: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not str(record.msg).startswith(starts)


def _stopped(number: signal.Signals, stop: OrderlyStop) -> int:
    _kill_leftovers()
    if number not in STOP_SIGNALS:
        _say(f"stopped by {number.name}")
        return 128 + number
    code = stop.exit_code()
    how = f"by {stop.asked.name}" if stop.asked else "in order"
    if stop.killed:
        _say(f"stopped {how}; ranks that did not end in time were killed")
    elif code in (STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE):
        _say(f"stopped {how}; the run goes on with --resume auto (exit code {code})")
    else:
        _say(f"stopped {how}, and a rank failed with exit code {code}; its messages stand above")
    return code


def _kill_leftovers() -> None:
    """Kill ranks that outlived torchrun: repeated signals interrupt it while it waits for them."""
    import psutil

    for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=_KILL_SECONDS)


def _report(failures: Mapping[int, ProcessFailure]) -> int:
    """Name the rank that failed first and return its exit code."""
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    code = failure.exitcode
    if code > 128:
        _say(f"rank {rank} was stopped by {_signal_name(code - 128)}")
        return code
    if code > 0:
        _say(f"rank {rank} failed with exit code {code}; its messages stand above")
        return code
    hint = "; the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
    _say(f"rank {rank} was killed by {_signal_name(-code)}{hint}")
    return 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _order(failure: ProcessFailure) -> tuple[bool, int, bool]:
    """Order causes before consequences, then by time; times are whole seconds.

    Within a second a rank that was killed goes first: its peers fail with errors of their own.
    """
    code = failure.exitcode
    return code in _CONSEQUENCES, failure.timestamp, code != -signal.SIGKILL
