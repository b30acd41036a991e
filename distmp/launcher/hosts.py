"""Start a run on several machines over ssh, from one of them or from another machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, handling
from distmp.errors import STOPPED_EXIT_CODE, ConfigError, require
from distmp.launcher.job import ExplainedValue, Job
from distmp.launcher.network import Network, address_of, join_port
from distmp.launcher.orderly_stop import cause_of_stop
from distmp.launcher.plan import UserOptions, log, random_port, refuse_port
from distmp.masking import masked_text
from distmp.utils.processes import output_of
from distmp.utils.units import text_table

# Variables that are passed to the ranks on other machines.
_FORWARDED = re.compile(r"PYTHONPATH|OMP_NUM_THREADS|(GLOO_|NCCL_|PET_|TORCH|DISTMP_)\w+")
# ssh must not prompt. It reports a lost host after 5 minutes, because a run can continue after
# shorter outages.
_SSH_OPTIONS = [
    "-oBatchMode=yes",
    "-oConnectTimeout=15",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=20",
]
# Exit codes of agents that stopped after a checkpoint.
_STOPPED = {STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE}
# ssh's own exit code.
_SSH_FAILED = 255
# After one host has failed: time for the others to detect and report it, and then to stop.
_NOTICE_SECONDS = 20.0
_STOP_SECONDS = 60.0
# Timeout for an agent's last output: an orphaned process may keep its pipe open.
_OUTPUT_SECONDS = 10.0


@dataclass(frozen=True)
class Host:
    """A machine as it is named for ssh (`name`, `user@name`), and how many ranks to start on it."""

    name: str
    ranks: int | None = None


def read_hosts(text: str) -> list[Host]:
    """Read a host file, or the list itself: `a,b` or `a:4,b:4`.

    A file has one host per line: a name, optionally followed by its number of ranks (`:4`; default:
    one per device). `#` starts a comment.

    Raises:
        ConfigError: If there is no host, a host is listed twice, or a line is invalid.
    """
    if os.path.isfile(text):  # Path.is_file raises for a long list
        try:
            lines = Path(text).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", "it is not text")
            raise ConfigError("--hosts", text, f"cannot be read ({problem})") from None
    elif "/" in text:
        raise ConfigError("--hosts", text, "this file does not exist")
    else:
        lines = text.split(",")
    hosts = [_read_host(text, line) for line in lines if line.partition("#")[0].strip()]
    require(len(hosts) > 0, "--hosts", text, "names no host")
    names = [host.name for host in hosts]
    twice = {name for name in names if names.count(name) > 1}
    require(not twice, "--hosts", text, f"{', '.join(sorted(twice))} is listed twice")
    return hosts


def _read_host(text: str, line: str) -> Host:
    parts = re.fullmatch(
        r"(?P<name>[\w.@-]+)(?::(?P<ranks>[1-9]\d*))?", line.partition("#")[0].strip()
    )
    # ssh would read a name that starts with a dash as an option.
    if parts is None or parts["name"].startswith("-"):
        raise ConfigError("--hosts", text, f"{line.strip()!r} is not HOST or HOST:RANKS")
    return Host(parts["name"], int(parts["ranks"]) if parts["ranks"] else None)


@dataclass(frozen=True)
class HostsPlan:
    """The commands for all hosts.

    Attributes:
        commands: The ssh command of each host, by its name.
        options: The options of torchrun that were derived, with their reasons.
        min_nodes: The smallest number of hosts with which the run succeeds.
    """

    commands: Mapping[str, list[str]]
    options: tuple[ExplainedValue[str], ...]
    min_nodes: int

    def describe(self) -> str:
        """Return the commands, ready to paste into a shell, and the reasons as comments."""
        table = text_table([(option.value, option.reason) for option in self.options])
        lines = ["# environment: hosts (--hosts)", *(f"#   {line}" for line in table)]
        lines.append("# each host determines its own address, interface, ranks and threads")
        lines += [masked_text(shlex.join(command)) for command in self.commands.values()]
        return "".join(f"{line}\n" for line in lines)


def plan_hosts(
    hosts: list[Host],
    ssh: list[str],
    given: UserOptions,
    train_arguments: list[str],
    network: Network,
    variables: Mapping[str, str],
) -> HostsPlan:
    """Derive the command for each host.

    Args:
        hosts: All hosts; the first one hosts the rendezvous.
        ssh: The ssh command, as a list of words.
        given: The user's options of torchrun.
        train_arguments: Options of `distmp.train`.
        network: The network of this machine.
        variables: The environment of this machine.

    Raises:
        ConfigError: If the user's options configure another kind of rendezvous, or need more hosts.
        AddressError: If the first machine has no address.
    """
    if given.own_rendezvous or given.node_rank is not None:
        option = "--" + (given.own_rendezvous or "node_rank").replace("_", "-")
        raise ConfigError("--hosts", ",".join(host.name for host in hosts), f"leave out {option}")
    min_nodes = given.nnodes[0] if given.nnodes else len(hosts)
    problem = f"--hosts names only {len(hosts)}; add hosts, or leave out --nnodes"
    require(min_nodes <= len(hosts), "--nnodes", min_nodes, problem)
    options = _rendezvous_options(hosts, ssh, given, network)
    shared = [option.value for option in options]
    environment = [
        f"{name}={value}" for name, value in sorted(variables.items()) if _FORWARDED.fullmatch(name)
    ]
    commands = {}
    for number, host in enumerate(hosts):
        ranks = [f"--nproc-per-node={host.ranks}"] if host.ranks and not given.ranks else []
        agent = [
            *("env", *environment, sys.executable, "-m", "distmp", "launch"),
            *("--environment=local", "--follow-stdin", f"--node-rank={number}"),
            *(*shared, *ranks, *given.arguments, "--", *train_arguments),
        ]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}"
        commands[host.name] = [*ssh, *_SSH_OPTIONS, host.name, remote]
    return HostsPlan(commands, options, min_nodes)


def _rendezvous_options(
    hosts: list[Host], ssh: list[str], given: UserOptions, network: Network
) -> tuple[ExplainedValue[str], ...]:
    options = []
    if given.nnodes is None:
        options.append(ExplainedValue(f"--nnodes={len(hosts)}", "hosts in --hosts"))
    if given.rdzv_endpoint is None:
        port = ExplainedValue(given.port, "--port") if given.port else random_port()
        names = tuple(_network_name(host, ssh) for host in hosts)
        job = Job("hosts", "--hosts", hosts=names)
        head = ExplainedValue(names[0], "first of --hosts")
        rank = ExplainedValue(0, "--hosts")
        address, reason = address_of(head, rank, job, len(hosts), network)
        option = f"--rdzv-endpoint={join_port(address, port.value)}"
        options.append(ExplainedValue(option, f"{reason}; port: {port.reason}"))
    else:
        refuse_port(given, "set the port in --rdzv-endpoint HOST:PORT")
    if given.rdzv_id is None:
        run_id = f"hosts-{uuid.uuid4().hex[:12]}"
        options.append(ExplainedValue(f"--rdzv-id={run_id}", "random, new for every launch"))
    return tuple(options)


def _network_name(host: Host, ssh: list[str]) -> str:
    """Return a host's name or address from ssh's configuration: the given name may be an alias."""
    output = output_of(*ssh, "-G", host.name, seconds=10.0) or ""
    match = re.search(r"^hostname (\S+)$", output, flags=re.MULTILINE)
    return match[1] if match else host.name.rpartition("@")[2]


# Run the agents


def run_on_hosts(plan: HostsPlan) -> int:
    """Run the agents over ssh, print their output, and stop all of them if one fails.

    Returns:
        0 after success; the exit code of the host that failed first; 75 if hosts stopped after a
        checkpoint and none failed, or 130 if Ctrl-C stopped them.

    Raises:
        ConfigError: If ssh cannot be run.
    """
    with ExitStack() as stack:
        agents: list[_Agent] = []
        # Install the handlers first, so that a signal reaches every agent that was started.
        received = stack.enter_context(_forwarded_signals(agents))
        for name, command in plan.commands.items():
            agent = stack.enter_context(_agent(name, command))
            agents.append(agent)
            for number in received:  # while the agent was starting
                if number not in agent.signals:
                    agent.send_signal(number)
        failed = _wait(agents, plan.min_nodes)
    codes = {agent.process.returncode for agent in agents}
    if codes & _STOPPED and codes <= {0, *_STOPPED}:
        log(f"stopped {cause_of_stop(received[0] if received else None, max(codes))}")
        return max(codes)
    if received.count(signal.SIGINT) > 1:
        log("stopped by SIGINT, without waiting for a checkpoint")
        return INTERRUPTED_EXIT_CODE
    if failed is None:
        return 0
    code = failed.process.returncode
    how = f"failed with exit code {code}"
    if code == _SSH_FAILED:
        how = "could not be reached by ssh, or the connection was lost"
    elif code < 0:
        how = f"was lost: ssh was killed by {signal.Signals(-code).name}"
    log(f"host {failed.name} {how}")
    return code if code > 0 else 128 - code


@dataclass
class _Agent:
    name: str
    process: subprocess.Popen[str]
    readers: list[threading.Thread] = field(default_factory=list)
    signals: list[signal.Signals] = field(default_factory=list)

    def send_signal(self, number: signal.Signals) -> None:
        """Make the agent handle a signal as if it had received it."""
        self.signals.append(number)
        assert self.process.stdin is not None
        # A signal handler cannot use the buffer of a write that it interrupts.
        with suppress(OSError, ValueError):
            os.write(self.process.stdin.fileno(), f"{number.name}\n".encode())


@contextmanager
def _agent(name: str, command: list[str]) -> Iterator[_Agent]:
    """Run an agent. It exits when its standard input closes, at the latest with this process."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C reaches the agents only through this process.
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError("--ssh", command[0], f"cannot be run ({error.strerror})") from None
    agent = _Agent(name, process)
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert source is not None
        reader = threading.Thread(target=_show, args=(name, source, target), daemon=True)
        reader.start()
        agent.readers.append(reader)
    try:
        yield agent
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for reader in agent.readers:
            reader.join(_OUTPUT_SECONDS)


def _show(name: str, source: IO[str], target: TextIO) -> None:
    for line in source:
        with suppress(OSError):  # a closed terminal must not block the agents' output
            target.write(f"[{name}] {line}")
            target.flush()


@contextmanager
def _forwarded_signals(agents: list[_Agent]) -> Iterator[list[signal.Signals]]:
    received: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for agent in agents:
            agent.send_signal(received[-1])

    with handling({**dict.fromkeys(STOP_SIGNALS, forward), signal.SIGHUP: signal.SIG_IGN}):
        yield received


def _wait(agents: list[_Agent], min_nodes: int) -> _Agent | None:
    """Wait for all agents; return the first that failed if fewer than `min_nodes` succeeded.

    If fewer than `min_nodes` are left, stop them: they would only wait for the others.
    """
    failed: list[_Agent] = []
    deadline = float("inf")
    while True:
        running = [agent for agent in agents if agent.process.poll() is None]
        failed += [agent for agent in agents if agent.process.returncode and agent not in failed]
        if not running:
            return failed[0] if len(agents) - len(failed) < min_nodes else None
        if len(agents) - len(failed) < min_nodes:
            deadline = min(deadline, time.monotonic() + _NOTICE_SECONDS)
        if time.monotonic() > deadline:
            for agent in running:
                agent.send_signal(signal.SIGTERM)
            deadline = float("inf")
        time.sleep(0.1)


def follow_stdin() -> None:
    """Handle signals that the launcher writes to standard input by name; stop when it closes.

    Ranks get an empty standard input.
    """
    commands = os.dup(0)
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)

    def read_signals() -> None:
        # Unbuffered: an exiting interpreter would wait for the lock of a buffer.
        rest = b""
        while received := os.read(commands, 1024):
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                with suppress(KeyError):
                    os.kill(os.getpid(), signal.Signals[line.decode(errors="replace").strip()])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read_signals, daemon=True).start()
