"""Start the ranks of this machine with torchrun, and return their outcome as an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

from distmp.distributed import stopping
from distmp.distributed.orphans import LAUNCHER_VARIABLE
from distmp.distributed.rank_environment import STORE_VARIABLE
from distmp.errors import LOST_PEER_EXIT_CODE, STOPPED_EXIT_CODE
from distmp.launcher.job import ExplainedValue, detect
from distmp.launcher.network import Network
from distmp.launcher.orderly_stop import OrderlyStop, cause_of_stop
from distmp.launcher.plan import Endpoint, Plan, assignment, join_timeout_seconds, log, make_plan
from distmp.launcher.rendezvous import Rendezvous, failures_explained, guarded
from distmp.launcher.torchrun import check, parse, read
from distmp.masking import masked
from distmp.utils.processes import granted_cores

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Loggers of torchrun's messages about every stopped or failed rank, and about options that the
# launcher passes. `_report` and `Rendezvous` log one line instead.
_NOISY = (
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)

# Exit codes of ranks that end because another rank did: torchrun stops them with SIGTERM, NCCL's
# watchdog aborts them when a peer is lost.
_CONSEQUENCES = (LOST_PEER_EXIT_CODE, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGABRT)

# The usual cause of a signal that kills a rank. Logs of several machines are often merged: advice
# about a machine names it.
_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: "the kernel does this when memory runs out (see dmesg on {host})",
    signal.SIGSEGV: "native code crashed (an extension, a driver or torch); see the stack above",
    signal.SIGBUS: "usually shared memory is full on {host}: enlarge /dev/shm or cut data.workers",
    signal.SIGABRT: "native code aborted; see its message above",
    signal.SIGILL: "native code was built for another processor",
}


# The kernel may need time to free a killed rank's memory.
_KILL_SECONDS = 5.0


def default_ranks() -> tuple[int, str]:
    """Return how many ranks to start on this machine, and the reason."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return count, f"one for each of {count} CUDA devices" if count > 1 else "one CUDA device"
    if granted_cores() == 1:
        return 1, "no CUDA device and one processor core"
    return 2, "no CUDA device; two CPU ranks make a distributed run"


def launch(
    torchrun_arguments: list[str],
    module: str,
    arguments: list[str],
    *,
    dry_run: bool = False,
    environment: str | None = None,
    port: int | None = None,
) -> int:
    """Run `python -m module arguments` on ranks started by torchrun.

    Args:
        torchrun_arguments: Options of torchrun. If absent, the number of ranks and a rendezvous on
            this machine are added.
        module: The module that each rank runs.
        arguments: Its options, checked.
        dry_run: Print the command with reasons, and run nothing.
        environment: Where the machines of the run are read from; None detects it.
        port: The rendezvous port; None derives it from the job's name.

    Returns:
        0 after success; the exit code of the rank that failed first, or 128 plus the signal that
        killed it; 75 after a stop that wrote a checkpoint to continue from, or 130 if Ctrl-C
        stopped it.

    Raises:
        ConfigError: If an option is invalid; no rank was started.
        SystemExit: With code 0 if the options ask for help.
    """
    command = ["-m", module, *arguments]
    plan = plan_here(torchrun_arguments, environment, port, waits=not dry_run)
    if dry_run:
        sys.stdout.write(plan.describe(command))
        return 0
    parsed = _apply(plan, command, torchrun_arguments)
    return _run(parsed) if plan.endpoint is None else _run_with_others(plan.endpoint, parsed)


def _run_with_others(endpoint: Endpoint, options: Namespace) -> int:
    """Join the rendezvous that the launcher itself opens, and run the ranks of this machine."""
    rendezvous = Rendezvous.open(endpoint)
    endpoint = rendezvous.endpoint
    options.rdzv_endpoint = str(endpoint)
    with failures_explained(rendezvous), rendezvous.watched(_give_up):
        # Without these, torchrun's agent of rank 0 hosts a second store. It publishes the address
        # once, so an agent that joins later waits forever; and if rank 0 moves to another agent,
        # the others keep the old address (torch 2.13).
        os.environ[STORE_VARIABLE] = f"{endpoint.run_id}@{endpoint}"
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        code = _run(options)
    if code != 0 and (lost := rendezvous.unresponsive()):
        log(f"lost {', '.join(lost)}, which does not respond any more")
    return code


def _apply(plan: Plan, command: list[str], torchrun_arguments: list[str]) -> Namespace:
    """Set the plan's variables, check the options, log what is run, and return the options."""
    parsed = parse([*plan.torchrun(), *command], torchrun_arguments)
    os.environ.update({name: choice.value for name, choice in plan.variables.items()})
    # torchrun warns about variables that are not set.
    check(parsed, torchrun_arguments)
    for note in plan.job.notes:
        log(note)
    names = dict.fromkeys(("OMP_NUM_THREADS", *plan.variables))
    variables = [assignment(name, os.environ[name]) for name in names]
    log(" ".join([*variables, shlex.join(masked(["torchrun", *plan.torchrun(), *command]))]))
    return parsed


def plan_here(
    torchrun_arguments: list[str],
    environment: str | None = None,
    port: int | None = None,
    *,
    waits: bool = False,
) -> Plan:
    """Derive what to run on this machine.

    Args:
        torchrun_arguments: Options of torchrun.
        environment: Where the machines of the run are read from; None detects it.
        port: The rendezvous port; None derives it from the job's name.
        waits: Whether to wait for the names of machines that have not started yet.

    Raises:
        ConfigError: If an option is invalid, or the machines could not reach each other.
        AddressError: If the first machine of several has no address.
    """
    given = replace(read(torchrun_arguments), port=port)
    network = Network.of_this_machine()
    job = detect(os.environ, network.hostname, environment)
    if given.ranks is None:
        count, reason = default_ranks()
        ranks = ExplainedValue(count, f"{reason}; change with --nproc-per-node")
        if waits:
            log(f"{count} rank{'s' if count > 1 else ''} ({ranks.reason})")
    else:
        ranks = ExplainedValue(given.ranks, "--nproc-per-node")
    if job.names_appear and waits:
        network = network.with_retries(join_timeout_seconds(given.rdzv_conf or {}), log)
    return make_plan(given, job, network, granted_cores(), ranks, os.environ)


def _run(options: Namespace) -> int:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    own_id = {LAUNCHER_VARIABLE: str(os.getpid())}  # for `distmp.distributed.orphans` in the ranks
    torchruns = LocalElasticAgent._stop_workers
    with (
        guarded(),
        OrderlyStop(options) as stop,
        mock.patch.object(LocalElasticAgent, "_stop_workers", stop.saving_first(torchruns)),
        mock.patch.dict(os.environ, own_id),
    ):
        for name in _NOISY:  # their modules, which `guarded` imports, set another level
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            run(options)
        except SignalException as signalled:
            return _stopped(signalled.sigval, stop)
        except ChildFailedError as error:
            return _report(error.failures)
    return 0


def _stopped(number: signal.Signals, stop: OrderlyStop) -> int:
    # Ranks may outlive torchrun, which repeated signals interrupt while it waits.
    stopping.ignore_stop_signals()
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    _kill_children()
    if number not in stopping.STOP_SIGNALS:
        log(f"stopped by {number.name}")
        return 128 + number
    code = stop.exit_code()
    how = cause_of_stop(stop.received, code)
    if stop.killed:
        log(f"stopped {how}; ranks that did not exit in time were killed")
    elif code in (STOPPED_EXIT_CODE, stopping.INTERRUPTED_EXIT_CODE):
        log(
            f"stopped {how}; continue the run with --resume auto, from its last checkpoint if it "
            f"has one (exit code {code})"
        )
    else:
        log(f"stopped {how}, and a rank failed with exit code {code}; see its messages above")
    return code


def _give_up(message: str) -> None:
    """Exit from a thread other than the main one, which is blocked."""
    _kill_children()
    log(message)
    os._exit(1)


def _kill_children() -> None:
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=_KILL_SECONDS)


def _report(failures: Mapping[int, ProcessFailure]) -> int:
    """Log which rank failed first and return its exit code."""
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    code = failure.exitcode
    if code - 128 in {*signal.Signals}:
        log(f"rank {rank} was stopped by {signal.Signals(code - 128).name}")
        return code
    if code == LOST_PEER_EXIT_CODE:
        log(f"rank {rank} ended because another rank was lost; see the output of that rank")
        return code
    if code > 0:
        first = ", or those of rank 0 on the first machine" if rank else ""
        log(f"rank {rank} failed with exit code {code}; see its messages above{first}")
        return code
    if -code in stopping.STOP_SIGNALS:
        stopped = stopping.exit_code_after(-code)
        log(
            f"rank {rank} was stopped by {_signal_name(-code)} before it had started; continue "
            f"the run with --resume auto (exit code {stopped})"
        )
        return stopped
    hint = _LIKELY_CAUSES.get(-code, "").format(host=platform.node())
    log(f"rank {rank} was killed by {_signal_name(-code)}{'; ' if hint else ''}{hint}")
    return 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _order(failure: ProcessFailure) -> tuple[bool, int, bool]:
    """Return a sort key: causes before consequences, then by time in integer seconds.

    Within a second, a rank that was killed comes first, because its peers then fail too.
    """
    code = failure.exitcode
    return code in _CONSEQUENCES, failure.timestamp, code != -signal.SIGKILL
