"""Start a run on several machines over ssh, from one of them or from outside."""

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

from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, restore_handlers
from distmp.errors import STOPPED_EXIT_CODE, ConfigError
from distmp.launcher.explained_value import ExplainedValue
from distmp.launcher.job import Job
from distmp.launcher.messages import say
from distmp.launcher.network import Network, join_port
from distmp.launcher.plan import Given, address_of, port_of

# What ranks on other machines need to find as it is here.
_FORWARDED = re.compile(r"PYTHONPATH|OMP_NUM_THREADS|(GLOO_|NCCL_|PET_|TORCH|DISTMP_)\w+")
# ssh never asks anybody anything, and notices a host that is gone.
_SSH_OPTIONS = ["-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=15"]
# Of agents that have stopped in order.
_STOPPED = {STOPPED_EXIT_CODE, INTERRUPTED_EXIT_CODE}
# ssh's own exit code.
_SSH_FAILED = 255
# After one host has failed: for the others to notice and report, and then to stop in order.
_NOTICE_SECONDS = 20.0
_STOP_SECONDS = 60.0
# To show what an agent has written last, unless a process that it has left holds its output open.
_LAST_WORDS_SECONDS = 10.0


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it (`name`, `user@name`), and how many ranks to start on it."""

    name: str
    ranks: int | None = None


def read_hosts(text: str) -> list[Host]:
    """Read a host file, or the list itself: `a,b` or `a:4,b:4`.

    A file has one host a line: a name, then its number of ranks (`slots=4` or `:4`) if that is not
    one for each of its devices; `#` begins a comment.

    Raises:
        ConfigError: If there is no host, one twice, or something else.
    """
    path = Path(text)
    if path.is_file():
        lines = path.read_text().splitlines()
    elif "/" in text:
        raise ConfigError("--hosts", text, "there is no such file")
    else:
        lines = text.split(",")
    hosts = [_read_host(text, line) for line in lines if line.partition("#")[0].strip()]
    if not hosts:
        raise ConfigError("--hosts", text, "names no host")
    names = [host.name for host in hosts]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError("--hosts", text, f"{', '.join(sorted(twice))} is there twice")
    return hosts


def _read_host(text: str, line: str) -> Host:
    parts = re.fullmatch(
        r"(?P<name>[\w.@-]+)(?:(?::|\s+slots\s*=\s*)(?P<ranks>[1-9]\d*))?",
        line.partition("#")[0].strip(),
    )
    # A name that begins with a dash would be an option of ssh.
    if parts is None or parts["name"].startswith("-"):
        raise ConfigError(
            "--hosts", text, f"{line.strip()!r} is not HOST, HOST:RANKS or HOST slots=RANKS"
        )
    return Host(parts["name"], int(parts["ranks"]) if parts["ranks"] else None)


@dataclass(frozen=True)
class HostsPlan:
    """The command for each host, and the reasons of what is in them."""

    commands: Mapping[str, list[str]]
    choices: tuple[ExplainedValue[str], ...]
    fewest: int

    def shown(self) -> str:
        """Return the commands, to be pasted into a shell, and the reasons."""
        width = max((len(choice.value) for choice in self.choices), default=0)
        lines = ["# environment: hosts (--hosts)"]
        lines += [f"#   {choice.value:{width}}  {choice.reason}" for choice in self.choices]
        lines.append("# each host finds its own address, interface, ranks and threads")
        lines += [shlex.join(command) for command in self.commands.values()]
        return "".join(f"{line}\n" for line in lines)


def plan_hosts(
    hosts: list[Host],
    ssh: list[str],
    given: Given,
    train_arguments: list[str],
    network: Network,
    variables: Mapping[str, str],
    *,
    preflight: bool = False,
) -> HostsPlan:
    """Work out what to run on each host.

    Args:
        hosts: The first one hosts the rendezvous.
        ssh: The command that runs another on a host.
        given: What the user has decided for torchrun.
        train_arguments: Options of `distmp.train`.
        network: That of this machine.
        variables: The environment of this machine.
        preflight: Compare and measure the ranks, and do not train.

    Raises:
        ConfigError: If the user arranges for ranks to find each other in another way.
        AddressError: If the first host has no address.
    """
    if given.own_rendezvous or given.node_rank is not None:
        option = "--" + (given.own_rendezvous or "node_rank").replace("_", "-")
        raise ConfigError("--hosts", ",".join(host.name for host in hosts), f"leave out {option}")
    choices = _meeting_point(hosts, ssh, given, network)
    shared = [choice.value for choice in choices]
    environment = [
        f"{name}={value}" for name, value in sorted(variables.items()) if _FORWARDED.fullmatch(name)
    ]
    commands = {}
    for number, host in enumerate(hosts):
        ranks = [f"--nproc-per-node={host.ranks}"] if host.ranks and not given.ranks else []
        agent = [
            *("env", *environment, sys.executable, "-m", "distmp", "launch"),
            *("--environment=local", "--follow-stdin", f"--node-rank={number}"),
            *(["--preflight"] if preflight else []),
            *(*shared, *ranks, *given.words, "--", *train_arguments),
        ]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}"
        commands[host.name] = [*ssh, *_SSH_OPTIONS, host.name, remote]
    fewest = given.nnodes[0] if given.nnodes else len(hosts)
    return HostsPlan(commands, choices, fewest)


def _meeting_point(
    hosts: list[Host], ssh: list[str], given: Given, network: Network
) -> tuple[ExplainedValue[str], ...]:
    run_id = given.rdzv_id or f"hosts-{uuid.uuid4().hex[:12]}"
    port = ExplainedValue(given.port, "--port") if given.port else port_of(run_id)
    choices = []
    if given.nnodes is None:
        choices.append(ExplainedValue(f"--nnodes={len(hosts)}", "hosts in --hosts"))
    if given.rdzv_endpoint is None:
        names = tuple(_network_name(host, ssh) for host in hosts)
        job = Job("hosts", "--hosts", hosts=names)
        head = ExplainedValue(names[0], "first of --hosts")
        address, reason = address_of(head, ExplainedValue(0, "--hosts"), job, network)
        endpoint = join_port(address, port.value)
        choices.append(
            ExplainedValue(f"--rdzv-endpoint={endpoint}", f"{reason}; port: {port.reason}")
        )
    if given.rdzv_id is None:
        choices.append(ExplainedValue(f"--rdzv-id={run_id}", "new for every launch"))
    return tuple(choices)


def _network_name(host: Host, ssh: list[str]) -> str:
    """Return the name or address that ssh's configuration gives a host: it may have an alias."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [*ssh, "-G", host.name]
        shown = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
        )
        found = re.search(r"^hostname (\S+)$", shown.stdout, flags=re.MULTILINE)
        if shown.returncode == 0 and found:
            return found[1]
    return host.name.rpartition("@")[2]


# Running them


def run_on_hosts(plan: HostsPlan) -> int:
    """Run the agents over ssh, show what they write, and end them together.

    Returns:
        0 after success; the exit code of the host that failed first; 75 where hosts have stopped
        in order and none has failed, 130 if that was Ctrl-C.

    Raises:
        ConfigError: If ssh cannot be run.
    """
    with ExitStack() as stack:
        agents: list[_Agent] = []
        # First, so that a signal reaches all that has been started.
        received = stack.enter_context(_forwarded_signals(agents))
        for name, command in plan.commands.items():
            agent = stack.enter_context(_agent(name, command))
            agents.append(agent)
            for number in received:  # while the agent was being started
                if number not in agent.told:
                    agent.tell(number)
        failed = _wait(agents, plan.fewest)
    codes = {agent.process.returncode for agent in agents}
    if codes & _STOPPED and codes <= {0, *_STOPPED}:
        say(f"stopped by {received[0].name}" if received else "stopped in order")
        return max(codes)
    if failed is None:
        return 0
    code = failed.process.returncode
    how = f"failed with exit code {code}"
    if code == _SSH_FAILED:
        how = "could not be reached by ssh, or the connection was lost"
    elif code < 0:
        how = f"was lost: ssh was killed by {signal.Signals(-code).name}"
    say(f"host {failed.name} {how}")
    return code if code > 0 else 128 - code


@dataclass
class _Agent:
    name: str
    process: subprocess.Popen[str]
    readers: list[threading.Thread] = field(default_factory=list)
    told: list[signal.Signals] = field(default_factory=list)

    def tell(self, number: signal.Signals) -> None:
        """Have the agent behave as if it had got a signal."""
        self.told.append(number)
        with suppress(BrokenPipeError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{number.name}\n")
            self.process.stdin.flush()


@contextmanager
def _agent(name: str, command: list[str]) -> Iterator[_Agent]:
    """Run an agent; without its standard input it ends, so that none is left behind."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C reaches agents through this process, in order.
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
            reader.join(_LAST_WORDS_SECONDS)


def _show(name: str, source: IO[str], target: TextIO) -> None:
    for line in source:
        with suppress(OSError):  # a terminal that is gone: the agents are still to be read
            target.write(f"[{name}] {line}")
            target.flush()


@contextmanager
def _forwarded_signals(agents: list[_Agent]) -> Iterator[list[signal.Signals]]:
    received: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for agent in agents:
            agent.tell(received[-1])

    before: dict[int, signal._HANDLER] = {
        number: signal.signal(number, forward) for number in STOP_SIGNALS
    }
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield received
    finally:
        restore_handlers(before)


def _wait(agents: list[_Agent], fewest: int) -> _Agent | None:
    """Wait for all; return the first that failed if fewer than `fewest` succeeded.

    Too few that are left can only wait for each other, and are stopped.
    """
    failed: list[_Agent] = []
    deadline = float("inf")
    while True:
        running = [agent for agent in agents if agent.process.poll() is None]
        for agent in agents:
            if agent.process.returncode and agent not in failed:
                failed.append(agent)
        if not running:
            return failed[0] if len(agents) - len(failed) < fewest else None
        if len(agents) - len(failed) < fewest:
            deadline = min(deadline, time.monotonic() + _NOTICE_SECONDS)
        if time.monotonic() > deadline:
            for agent in running:
                agent.tell(signal.SIGTERM)
            deadline = float("inf")
        time.sleep(0.1)


def follow_stdin() -> None:
    """Obey the launcher at the other end of standard input: signals by name, and its end.

    Ranks get an empty standard input.
    """
    told = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def obey() -> None:
        # Without a buffer, whose lock an ending interpreter would wait for.
        rest = b""
        while received := os.read(told, 1024):
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                with suppress(KeyError):
                    os.kill(os.getpid(), signal.Signals[line.decode(errors="replace").strip()])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=obey, daemon=True).start()
