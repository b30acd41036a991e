"""Start the ranks of this machine with torchrun, and give their outcome as an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, exit_code_after
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE
from distmp.launcher.explained_value import ExplainedValue
from distmp.launcher.job import detect, slurm_resolver
from distmp.launcher.messages import say
from distmp.launcher.network import Network
from distmp.launcher.orderly_stop import OrderlyStop
from distmp.launcher.plan import Machine, Plan, join_seconds, make_plan
from distmp.launcher.rendezvous import Rendezvous, failures_named, taken_port_named
from distmp.launcher.torchrun import binding, parse, read

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# What torchrun logs about every orderly stop or failed rank; `_report` says it in one line.
_NOISE = {
    "torch.distributed.elastic.agent.server.api": ("Received %s death signal",),
    # It is used here, to know which machine hosts the rendezvous.
    "torch.distributed.run": ("node_rank is only used for static rdzv_backend",),
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

# What is mostly behind a signal that kills a rank.
_LIKELY: dict[int, str] = {
    signal.SIGKILL: "the kernel does this when memory runs out (dmesg tells)",
    signal.SIGSEGV: "native code crashed: an extension, a driver or torch; its stack stands above",
    signal.SIGBUS: "mostly shared memory is full (/dev/shm): fewer data.workers, or more of it",
    signal.SIGABRT: "native code gave up; its message stands above",
    signal.SIGILL: "native code was built for another processor",
}


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `distmp launch` that are not torchrun's.

    Attributes:
        dry_run: Say what would be run, with reasons, and run nothing.
        environment: Where the machines of the run are taken from; None: what started this process.
        port: Where the machines meet, in place of the one from the job's name.
        preflight: Compare and measure the ranks, and do not train.
    """

    dry_run: bool = False
    environment: str | None = None
    port: int | None = None
    preflight: bool = False


_NO_OPTIONS = LaunchOptions()

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


def launch(
    torchrun_arguments: list[str],
    train_arguments: list[str],
    options: LaunchOptions = _NO_OPTIONS,
) -> int:
    """Check the run's configuration, then train on ranks started by torchrun.

    Args:
        torchrun_arguments: Options of torchrun. The number of ranks and a rendezvous on this
            machine are filled in where absent.
        train_arguments: Options of `distmp.train`.
        options: Those of `distmp launch` itself.

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
    module = "distmp.commands.preflight" if options.preflight else "distmp.train"
    return run_ranks(torchrun_arguments, module, train_arguments, options)


def run_ranks(
    torchrun_arguments: list[str],
    module: str,
    arguments: list[str],
    options: LaunchOptions = _NO_OPTIONS,
) -> int:
    """Run `python -m module arguments` on ranks started by torchrun; see `launch`."""
    command = ["-m", module, *arguments]
    plan = plan_here(torchrun_arguments, options)
    if options.dry_run:
        sys.stdout.write(plan.shown(command))
        return 0
    parsed = parse([*plan.torchrun(), *command], torchrun_arguments)
    os.environ.update({name: choice.value for name, choice in plan.variables.items()})
    for note in (*plan.job.notes, *plan.notes):
        say(note)
    names = dict.fromkeys(("OMP_NUM_THREADS", *plan.variables))
    variables = [f"{name}={os.environ[name]}" for name in names]
    say(" ".join([*variables, shlex.join(["torchrun", *plan.torchrun(), *command])]))
    if plan.endpoint is None:
        with taken_port_named():
            return _run(parsed)
    rendezvous = Rendezvous.open(plan.endpoint, say)
    with failures_named(rendezvous), rendezvous.watched(_give_up):
        code = _run(parsed)
    if code and (lost := rendezvous.silent()):
        say(f"lost {', '.join(lost)}, which does not answer any more")
    return code


def plan_here(torchrun_arguments: list[str], options: LaunchOptions) -> Plan:
    """Work out what to run on this machine.

    Raises:
        ConfigError: If an option is wrong, or the machines could not meet.
        AddressError: If the first machine of several has no address.
    """
    given = replace(read(torchrun_arguments), port=options.port)
    network = Network.of_this_machine()
    job = detect(os.environ, network.hostname, options.environment)
    if given.ranks is None:
        count, reason = default_ranks()
        ranks = ExplainedValue(count, f"{reason}; choose with --nproc-per-node")
        if not options.dry_run:
            say(f"{count} rank{'s' if count > 1 else ''} ({ranks.reason})")
    else:
        ranks = ExplainedValue(given.ranks, "--nproc-per-node")
    if job.environment == "slurm":
        network = replace(network, resolve=slurm_resolver(network.resolve))
    if job.names_appear and not options.dry_run:
        network = network.patient(join_seconds(given.rdzv_conf or {}), say)
    machine = Machine(network, _cores(), ranks, binding(ranks.value))
    return make_plan(given, job, machine, os.environ)


def _cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


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
        say(f"stopped by {number.name}")
        return 128 + number
    code = stop.exit_code()
    how = f"by {stop.asked.name}" if stop.asked else "in order"
    if stop.killed:
        say(f"stopped {how}; ranks that did not end in time were killed")
    elif code in (STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE):
        say(f"stopped {how}; the run goes on with --resume auto (exit code {code})")
    else:
        say(f"stopped {how}, and a rank failed with exit code {code}; its messages stand above")
    return code


def _give_up(message: str) -> None:
    """End this process from another thread than the main one, which is not able to."""
    _kill_children()
    say(message)
    os._exit(1)


def _kill_leftovers() -> None:
    """Kill ranks that outlived torchrun: repeated signals interrupt it while it waits for them."""
    for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _kill_children()


def _kill_children() -> None:
    import psutil

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
        say(f"rank {rank} was stopped by {_signal_name(code - 128)}")
        return code
    if code > 0:
        say(f"rank {rank} failed with exit code {code}; its messages stand above")
        return code
    if -code in STOP_SIGNALS:
        stopped = exit_code_after(-code)
        say(
            f"rank {rank} was stopped by {_signal_name(-code)} before it had begun; the run goes "
            f"on with --resume auto (exit code {stopped})"
        )
        return stopped
    hint = _LIKELY.get(-code, "")
    say(f"rank {rank} was killed by {_signal_name(-code)}{'; ' if hint else ''}{hint}")
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
