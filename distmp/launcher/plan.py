"""Derive what to run on a machine: torchrun's options and the environment, with reasons."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distmp.distributed.limits import REJOIN_SECONDS
from distmp.distributed.rank_environment import Variables
from distmp.errors import ConfigError, require
from distmp.launcher.job import ExplainedValue, Job
from distmp.launcher.network import (
    Network,
    address_of,
    hosts_store,
    join_port,
    local_address,
    selected_interface,
)
from distmp.masking import masked, masked_text
from distmp.utils.units import counted, text_table


def log(message: str) -> None:
    """Print a line to standard error; ignore errors, because the terminal may be closed."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distmp launch: {masked_text(message)}\n")
        sys.stderr.flush()


def assignment(name: str, value: str) -> str:
    """Return how a shell sets a variable. Unquoted, `NAME==lo` looks wrong, and zsh expands it."""
    return f"{name}='{value}'" if value.startswith("=") else f"{name}={shlex.quote(value)}"


# Below the ports that Linux (32768 and up) and Kubernetes (30000 and up) allocate.
_PORTS = range(20000, 30000)
# torchrun's default for an endpoint without a port.
_DEFAULT_PORT = 29400
_JOIN_SECONDS = 600

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class UserOptions:
    """The options that the user has set; None for the others.

    All but `port` are options of torchrun, from the command line or a PET_ variable.

    Attributes:
        arguments: torchrun's options as they were written.
        nnodes: Minimum and maximum number of machines.
        ranks: Number of ranks to start on this machine.
        rdzv_conf: The keys and values of --rdzv-conf.
        own_rendezvous: Name of the option that configures a rendezvous of another kind.
    """

    arguments: tuple[str, ...] = ()
    nnodes: tuple[int, int] | None = None
    ranks: int | None = None
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] | None = None
    local_addr: str | None = None
    own_rendezvous: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Endpoint:
    """The rendezvous endpoint of a run.

    Attributes:
        head: Name or address of the first machine, as given by the user or the job.
        address: The address of the first machine.
        port: The port of the rendezvous store.
        is_host: Whether this machine is the first one.
        run_id: Identifies the run.
        local_address: The address under which other machines reach this one.
        node_rank: Rank of this machine, if known.
        min_nodes: Number of machines with which the run starts.
        hosts: All machines, if known.
        join_timeout_seconds: How long machines wait for each other.
        read_timeout_seconds: How long the first machine may be unreachable during the run.
    """

    head: str
    address: str
    port: int
    is_host: bool
    run_id: str
    local_address: str
    node_rank: int | None
    min_nodes: int
    hosts: tuple[str, ...]
    join_timeout_seconds: int
    read_timeout_seconds: int

    def __str__(self) -> str:
        return join_port(self.address, self.port)


@dataclass(frozen=True)
class Plan:
    """What to run on this machine.

    Attributes:
        job: The detected job.
        options: Derived options of torchrun, which precede the user's.
        arguments: The user's options, and derived ones that must follow them.
        variables: Additions to the environment.
        endpoint: The rendezvous, or None for one machine or a rendezvous configured by the user.
    """

    job: Job
    options: tuple[ExplainedValue[str], ...]
    arguments: tuple[str, ...]
    variables: Mapping[str, ExplainedValue[str]]
    endpoint: Endpoint | None = None

    def torchrun(self) -> list[str]:
        """Return torchrun's options."""
        return [*(option.value for option in self.options), *self.arguments]

    def describe(self, command: Sequence[str]) -> str:
        """Return the command with its environment, ready to paste into a shell, and the reasons."""
        variables = {assignment(name, v.value): v.reason for name, v in self.variables.items()}
        entries = [*((option.value, option.reason) for option in self.options), *variables.items()]
        lines = [f"# environment: {self.job.environment} ({self.job.evidence})"]
        lines += [f"# note: {note}" for note in self.job.notes]
        lines += [f"#   {line}" for line in text_table(entries)]
        if self.endpoint is not None:
            lines.append("# other machines have the same, with their is_host, address, interface")
        words = masked(["torchrun", *self.torchrun(), *command])
        lines.append(" ".join([*variables, shlex.join(words)]))
        return "".join(f"{line}\n" for line in lines)


def make_plan(
    given: UserOptions,
    job: Job,
    network: Network,
    cores: int,
    ranks: ExplainedValue[int],
    variables: Variables,
) -> Plan:
    """Derive the options that the user has not set.

    Args:
        given: The user's options, which take precedence.
        job: The detected job.
        network: The names and addresses of this machine.
        cores: Number of processor cores that this process may use.
        ranks: Number of ranks to start.
        variables: The environment; variables that are set in it are kept.

    Raises:
        ConfigError: If the machines could not reach each other with these options.
        AddressError: If the first machine has no address, or no route leads to it.
    """
    options = []
    if given.ranks is None:
        options.append(ExplainedValue(f"--nproc-per-node={ranks.value}", ranks.reason))
    plan = Plan(job, tuple(options), given.arguments, _threads(cores, ranks.value, variables))
    if given.own_rendezvous is not None:
        refuse_port(given, f"--{given.own_rendezvous.replace('_', '-')} sets the port")
        is_alone = given.own_rendezvous == "standalone"
        waits = is_alone and given.nnodes is not None and given.nnodes[0] > 1
        require(not waits, "--nnodes", given.nnodes, "is not one machine; leave out --standalone")
        return _on_loopback(plan, given, network, variables) if is_alone else plan
    nodes = given.nnodes[1] if given.nnodes else job.nodes.value if job.nodes else None
    problem = (
        f"{job.evidence} ({job.environment}) does not give the number of machines; set it, or "
        "train on this machine only with `--environment local`"
    )
    require(nodes is not None or job.environment == "local", "--nnodes", None, problem)
    one = nodes in (None, 1)
    # With port 0, torchrun uses any free port.
    if one and (given.rdzv_endpoint is None or given.rdzv_endpoint.strip().endswith(":0")):
        refuse_port(given, "with one machine, torchrun uses a free port")
        if given.rdzv_endpoint is None:
            plan = _with(plan, ExplainedValue("--standalone", "one machine"))
        return _on_loopback(plan, given, network, variables)
    plan = _several(plan, given, nodes or 1, network, variables)
    if one and plan.endpoint is not None and not plan.endpoint.is_host:
        raise ConfigError(
            "--rdzv-endpoint",
            given.rdzv_endpoint,
            f"the run has one machine, and this is not {plan.endpoint.head}; it has: "
            f"{network.describe_interfaces()}. Add --nnodes for several machines, or "
            "remove --rdzv-endpoint",
        )
    return plan


def refuse_port(given: UserOptions, why: str) -> None:
    """Refuse `--port` where it would have no effect.

    Raises:
        ConfigError: If it is set.
    """
    require(given.port is None, "--port", given.port, f"has no effect; {why}")


def _on_loopback(plan: Plan, given: UserOptions, network: Network, variables: Variables) -> Plan:
    """Let a run on one machine listen on the loopback interface only."""
    if network.interface_of(_LOOPBACK) is None:
        return plan
    reason = "one machine: nothing listens on its other interfaces"
    if given.local_addr is None:
        plan = _with(plan, ExplainedValue(f"--local-addr={_LOOPBACK}", reason))
    additions = selected_interface(_LOOPBACK, network, variables)
    return replace(plan, variables={**plan.variables, **additions})


def _threads(cores: int, ranks: int, variables: Variables) -> dict[str, ExplainedValue[str]]:
    if "OMP_NUM_THREADS" in variables:
        return {}
    reason = f"{counted(cores, 'core')} / {counted(ranks, 'rank')}"
    return {"OMP_NUM_THREADS": ExplainedValue(str(max(1, cores // ranks)), reason)}


def _several(
    plan: Plan, given: UserOptions, nodes: int, network: Network, variables: Variables
) -> Plan:
    """Add the options for a rendezvous of several machines."""
    job = plan.job
    head, port = _head_and_port(given, job)
    rank = job.node_rank
    if given.node_rank is not None:
        rank = ExplainedValue(given.node_rank, "--node-rank")
    conf = dict(given.rdzv_conf or {})
    min_nodes = given.nnodes[0] if given.nnodes else job.nodes.value if job.nodes else 1
    address, address_reason = address_of(head, rank, job, nodes, network)
    is_host, host_reason = hosts_store(conf, address, rank, network)
    own_address, local_reason = local_address(given.local_addr, address, network)
    run_id = given.rdzv_id or (job.name.value if job.name else "none")
    endpoint = Endpoint(
        head=head.value,
        address=address,
        port=port.value,
        is_host=is_host,
        run_id=run_id,
        local_address=own_address,
        node_rank=None if rank is None else rank.value,
        min_nodes=min_nodes,
        # By node rank, for messages, if nothing names the machines.
        hosts=job.hosts or tuple(f"node rank {n}" for n in range(min_nodes) if rank is not None),
        join_timeout_seconds=join_timeout_seconds(conf),
        read_timeout_seconds=_seconds(conf, "read_timeout", REJOIN_SECONDS),
    )
    endpoint_reason = f"{address_reason}; port: {port.reason}"
    id_reason = job.name.reason if job.name else "torchrun's default"
    nodes_reason = job.nodes.reason if job.nodes else ""
    derived = (
        (given.nnodes or not job.nodes, f"--nnodes={nodes}", nodes_reason),
        (given.rdzv_backend, "--rdzv-backend=c10d", "torchrun's backend that supports restarts"),
        (given.rdzv_endpoint, f"--rdzv-endpoint={endpoint}", endpoint_reason),
        (given.rdzv_id, f"--rdzv-id={run_id}", id_reason),
        (given.local_addr, f"--local-addr={own_address}", local_reason),
    )
    plan = _with(plan, *(ExplainedValue(word, why) for own, word, why in derived if not own))
    conf = {
        "is_host": str(is_host).lower(),
        "read_timeout": str(endpoint.read_timeout_seconds),
        **conf,
    }
    option = "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items())
    plan = _with(plan, ExplainedValue(option, host_reason))
    if given.rdzv_conf:
        # torchrun uses only the last --rdzv-conf, so it has to contain all keys.
        plan = replace(plan, arguments=(*given.arguments, option), options=plan.options[:-1])
    interface = selected_interface(own_address, network, variables)
    return replace(plan, endpoint=endpoint, variables={**plan.variables, **interface})


def _with(plan: Plan, *options: ExplainedValue[str]) -> Plan:
    return replace(plan, options=(*plan.options, *options))


def _head_and_port(given: UserOptions, job: Job) -> tuple[ExplainedValue[str], ExplainedValue[int]]:
    if given.rdzv_endpoint is not None:
        refuse_port(given, "set the port in --rdzv-endpoint HOST:PORT")
        host, port = split_endpoint(given.rdzv_endpoint)
        explained_port = ExplainedValue(port or _DEFAULT_PORT, "--rdzv-endpoint")
        return ExplainedValue(host, "--rdzv-endpoint"), explained_port
    if job.head is None:
        raise ConfigError(
            "--rdzv-endpoint",
            None,
            f"several machines ({job.evidence}) need the address of the first one: pass "
            "--rdzv-endpoint HOST[:PORT] on each of them, or start all of them from one with "
            "--hosts HOST,HOST,...",
        )
    if given.port is not None:
        return job.head, ExplainedValue(given.port, "--port")
    if job.port is not None:
        return job.head, job.port
    if job.name is None:
        return job.head, ExplainedValue(_DEFAULT_PORT, "torchrun's default")
    return job.head, port_of(job.name.value)


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Return the host and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ConfigError: If the text has another form.
    """
    parts = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::([0-9]+))?", endpoint.strip())
    if parts is None or not 0 < int(parts[3] or 1) < 2**16:
        problem = "must be HOST, HOST:PORT or [IPV6]:PORT of the first machine"
        raise ConfigError("--rdzv-endpoint", endpoint, problem)
    return parts[1] or parts[2], int(parts[3]) if parts[3] else None


def port_of(name: str) -> ExplainedValue[int]:
    """Return a port derived from a job's name: the same on all machines, rarely shared by jobs."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    port = _PORTS[digest % len(_PORTS)]
    return ExplainedValue(port, f"from the job's name {name}; change with --port")


def random_port() -> ExplainedValue[int]:
    """Return a port that others cannot predict, for a launcher that passes it to all machines."""
    return ExplainedValue(secrets.choice(_PORTS), "random, new for every launch")


def join_timeout_seconds(conf: Mapping[str, str]) -> int:
    """Return how long machines wait for each other, from `--rdzv-conf`.

    Raises:
        ConfigError: If the value is not a number of seconds.
    """
    return _seconds(conf, "join_timeout", _JOIN_SECONDS)


def _seconds(conf: Mapping[str, str], key: str, default: int) -> int:
    text = conf.get(key, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--rdzv-conf {key}", text, "use an integer above 0, in seconds")
    return int(text)
