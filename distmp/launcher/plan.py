"""What to run on a machine: torchrun's options and the environment, each with its reason."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distmp.errors import ConfigError
from distmp.launcher.explained_value import ExplainedValue
from distmp.launcher.job import Job
from distmp.launcher.network import AddressError, Network, is_loopback, join_port

# Below the ports that Linux (32768 and up) and Kubernetes (30000 and up) hand out themselves.
_PORTS = range(20000, 30000)
# torchrun's own, where an endpoint comes without one.
_DEFAULT_PORT = 29400
_JOIN_SECONDS = 600
_SILENCE_SECONDS = 60

_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class Given:
    """What the user has decided already; None for what is left open.

    Everything but `port` is an option of torchrun, from the command line or its PET_ variable.

    Attributes:
        words: torchrun's options as they were written.
        nnodes: Least and greatest number of machines.
        ranks: To start on this machine.
        rdzv_conf: Keys and values.
        own_rendezvous: The option with which the user arranges a rendezvous of another kind.
    """

    words: tuple[str, ...] = ()
    nnodes: tuple[int, int] | None = None
    ranks: int | None = None
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] | None = None
    local_addr: str | None = None
    numa_binding: str | None = None
    own_rendezvous: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Machine:
    """What this machine has.

    Attributes:
        cores: Processor cores that this process may use.
        ranks: How many ranks to start.
        binding: The option that binds each rank to the part of the machine that its GPU is near to.
    """

    network: Network
    cores: int
    ranks: ExplainedValue[int]
    binding: ExplainedValue[str] | None = None


@dataclass(frozen=True)
class Endpoint:
    """Where the machines of a run meet.

    Attributes:
        head: The first machine, as it was named.
        address: Its address.
        is_host: Whether this is the machine.
        run_id: Tells runs apart.
        local_address: This machine's address for the others.
        node_rank: Which machine this is, if anybody knows.
        fewest_nodes: The run starts with so many.
        hosts: All machines, if anybody knows.
        seconds: How long they wait for each other.
        silence_seconds: How long the first may be silent while the run goes on.
    """

    head: str
    address: str
    port: int
    is_host: bool
    run_id: str
    local_address: str
    node_rank: int | None
    fewest_nodes: int
    hosts: tuple[str, ...]
    seconds: int
    silence_seconds: int

    def others(self) -> list[str]:
        """Return the machines that are known besides this one."""
        return [host for rank, host in enumerate(self.hosts) if rank != self.node_rank]

    def __str__(self) -> str:
        return join_port(self.address, self.port)


@dataclass(frozen=True)
class Plan:
    """What to run on this machine.

    Attributes:
        options: Options of torchrun that were worked out; they go before the user's.
        words: The user's, and what has to go behind them.
        variables: Additions to the environment.
        endpoint: Where to meet, or None for one machine and for a rendezvous of the user's own.
    """

    job: Job
    options: tuple[ExplainedValue[str], ...]
    words: tuple[str, ...]
    variables: Mapping[str, ExplainedValue[str]]
    endpoint: Endpoint | None = None
    notes: tuple[str, ...] = ()

    def torchrun(self) -> list[str]:
        """Return torchrun's options."""
        return [*(option.value for option in self.options), *self.words]

    def shown(self, command: Sequence[str]) -> str:
        """Return the command with its environment, to be pasted into a shell, and the reasons."""
        variables = [f"{name}={shlex.quote(c.value)}" for name, c in self.variables.items()]
        reasons = [choice.reason for choice in self.variables.values()]
        choices = [*self.options, *map(ExplainedValue, variables, reasons)]
        width = max((len(choice.value) for choice in choices), default=0)
        lines = [f"# environment: {self.job.environment} ({self.job.evidence})"]
        lines += [f"# note: {note}" for note in (*self.job.notes, *self.notes)]
        lines += [f"#   {choice.value:{width}}  {choice.reason}" for choice in choices]
        if self.endpoint is not None:
            others = ", ".join(self.endpoint.others()) or "the other machines"
            lines.append(
                f"# the same on {others}, each with its own is_host, address and interface"
            )
        lines.append(" ".join([*variables, "torchrun", shlex.join([*self.torchrun(), *command])]))
        return "".join(f"{line}\n" for line in lines)


def make_plan(given: Given, job: Job, machine: Machine, variables: Mapping[str, str]) -> Plan:
    """Work out what the user has left open.

    Args:
        given: What the user has decided; it wins.
        job: What the environment says.
        machine: What this machine has.
        variables: The environment; what is set in it stays.

    Raises:
        ConfigError: If the machines could not meet as things are.
        AddressError: If the first machine has no address, or there is no way to it.
    """
    options = []
    if given.ranks is None:
        options.append(
            ExplainedValue(f"--nproc-per-node={machine.ranks.value}", machine.ranks.reason)
        )
    if machine.binding is not None and given.numa_binding is None:
        options.append(machine.binding)
    plan = Plan(job, tuple(options), given.words, _threads(given, machine, variables))
    if given.own_rendezvous is not None:
        return plan
    nodes = given.nnodes[1] if given.nnodes else job.nodes.value if job.nodes else None
    if nodes is None and job.environment == "kubernetes":
        raise ConfigError(
            "--nnodes", None, "Kubernetes does not tell how many pods the Job has; say it here"
        )
    one = nodes in (None, 1)
    if one and not _has_port(given.rdzv_endpoint):
        if given.nnodes is None and given.rdzv_endpoint is None:
            plan = _with(plan, ExplainedValue("--standalone", "one machine"))
        return plan
    plan = _several(plan, given, machine.network, variables)
    if one and plan.endpoint is not None and not plan.endpoint.is_host:
        raise ConfigError(
            "--rdzv-endpoint",
            given.rdzv_endpoint,
            f"the run has one machine, and this is not {plan.endpoint.head}; it has: "
            f"{machine.network.described()}. Say --nnodes where several are meant, or leave "
            "--rdzv-endpoint out",
        )
    return plan


def _has_port(endpoint: str | None) -> bool:
    """Whether an endpoint is a certain port: with port 0 torchrun takes any that is free."""
    return endpoint is not None and not endpoint.strip().endswith(":0")


def _threads(
    given: Given, machine: Machine, variables: Mapping[str, str]
) -> dict[str, ExplainedValue[str]]:
    if "OMP_NUM_THREADS" in variables:
        return {}
    ranks = given.ranks or machine.ranks.value
    reason = f"{_count(machine.cores, 'core')} / {_count(ranks, 'rank')}"
    return {"OMP_NUM_THREADS": ExplainedValue(str(max(1, machine.cores // ranks)), reason)}


def _several(plan: Plan, given: Given, network: Network, variables: Mapping[str, str]) -> Plan:
    """Let this machine meet others."""
    job = plan.job
    head, port = _head_and_port(given, job)
    rank = (
        ExplainedValue(given.node_rank, "--node-rank")
        if given.node_rank is not None
        else job.node_rank
    )
    conf = dict(given.rdzv_conf or {})
    address, address_reason = address_of(head, rank, job, network)
    is_host, host_reason = _is_host(conf, address, rank, network)
    local_address, local_reason = _local_address(given, address, network)
    run_id = given.rdzv_id or (job.name.value if job.name else "none")
    endpoint = Endpoint(
        head=head.value,
        address=address,
        port=port.value,
        is_host=is_host,
        run_id=run_id,
        local_address=local_address,
        node_rank=None if rank is None else rank.value,
        fewest_nodes=_fewest_nodes(given, job),
        hosts=job.hosts,
        seconds=join_seconds(conf),
        silence_seconds=_seconds(conf, "read_timeout", _SILENCE_SECONDS),
    )
    if given.nnodes is None and job.nodes is not None:
        plan = _with(plan, ExplainedValue(f"--nnodes={job.nodes.value}", job.nodes.reason))
    if not given.rdzv_backend:
        plan = _with(
            plan, ExplainedValue("--rdzv-backend=c10d", "torchrun's own, which can restart")
        )
    if given.rdzv_endpoint is None:
        reason = f"{address_reason}; port: {port.reason}"
        plan = _with(plan, ExplainedValue(f"--rdzv-endpoint={endpoint}", reason))
    if given.rdzv_id is None:
        reason = job.name.reason if job.name else "torchrun's default"
        plan = _with(plan, ExplainedValue(f"--rdzv-id={run_id}", reason))
    if given.local_addr is None:
        plan = _with(plan, ExplainedValue(f"--local-addr={local_address}", local_reason))
    conf = {"is_host": str(is_host).lower(), **conf}
    option = "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items())
    plan = _with(plan, ExplainedValue(option, host_reason))
    if given.rdzv_conf:
        # Of several, torchrun takes the last one whole.
        plan = replace(plan, words=(*given.words, option), options=plan.options[:-1])
    interface, notes = _interface(local_address, network, variables)
    variables_chosen = {**plan.variables, **interface}
    return replace(plan, endpoint=endpoint, variables=variables_chosen, notes=notes)


def _with(plan: Plan, option: ExplainedValue[str]) -> Plan:
    return replace(plan, options=(*plan.options, option))


def _head_and_port(given: Given, job: Job) -> tuple[ExplainedValue[str], ExplainedValue[int]]:
    if given.rdzv_endpoint is not None:
        if given.port is not None:
            raise ConfigError("--port", given.port, "write the port into --rdzv-endpoint HOST:PORT")
        host, port = split_endpoint(given.rdzv_endpoint)
        return ExplainedValue(host, "--rdzv-endpoint"), ExplainedValue(
            port or _DEFAULT_PORT, "--rdzv-endpoint"
        )
    if job.head is None:
        raise ConfigError(
            "--rdzv-endpoint",
            None,
            "several machines need the address of the first one: give --rdzv-endpoint HOST[:PORT] "
            "on each of them, or start them all from one with --hosts HOST,HOST,...",
        )
    if given.port is not None:
        return job.head, ExplainedValue(given.port, "--port")
    if job.name is None:
        return job.head, ExplainedValue(_DEFAULT_PORT, "torchrun's default")
    return job.head, port_of(job.name.value)


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Return host and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ConfigError: If it is none of these.
    """
    parts = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::([0-9]+))?", endpoint.strip())
    if parts is None or not 0 < int(parts[3] or 1) < 2**16:
        raise ConfigError(
            "--rdzv-endpoint", endpoint, "must be HOST, HOST:PORT or [IPV6]:PORT of the first host"
        )
    return parts[1] or parts[2], int(parts[3]) if parts[3] else None


def port_of(name: str) -> ExplainedValue[int]:
    """Return a port for a job: the same on all its machines, hardly ever that of another job."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return ExplainedValue(
        _PORTS[digest % len(_PORTS)], f"from the job's name {name}; change with --port"
    )


def address_of(
    head: ExplainedValue[str], rank: ExplainedValue[int] | None, job: Job, network: Network
) -> tuple[str, str]:
    """Return the first machine's address for all, and the reason.

    Raises:
        AddressError: If it has none that the others could use.
    """
    try:
        address = network.resolve(head.value)
    except AddressError as error:
        raise AddressError(
            f"the first host of the run cannot be found: {error}. {head.value!r} is: "
            f"{head.reason}. Give an address that all can reach: --rdzv-endpoint ADDRESS:PORT"
        ) from None
    if not is_loopback(address) or _means_this_machine(head.value, job, network):
        return address, head.reason
    if rank is not None and rank.value != 0:
        raise AddressError(
            f"the first host of the run cannot be found: {head.value!r} ({head.reason}) is "
            f"{address} here, which stands for this machine, and this is number {rank.value}. "
            "Correct /etc/hosts, or give its address with --rdzv-endpoint ADDRESS:PORT"
        )
    return network.default_address(), (
        f"{head.reason}; {head.value!r} is {address} here, so the address of the default route"
    )


def _means_this_machine(head: str, job: Job, network: Network) -> bool:
    """Whether a loopback address is meant: all "machines" are this one."""
    if head == "localhost" or re.fullmatch(r"[0-9.]+|.*:.*", head):
        return True
    try:
        return bool(job.hosts) and all(is_loopback(network.resolve(host)) for host in job.hosts)
    except AddressError:
        return False


def _is_host(
    conf: Mapping[str, str], address: str, rank: ExplainedValue[int] | None, network: Network
) -> tuple[bool, str]:
    if "is_host" in conf:
        word = conf["is_host"].lower()
        if word not in (*_TRUE, *_FALSE):
            raise ConfigError("--rdzv-conf is_host", conf["is_host"], "use true or false")
        return word in _TRUE, "--rdzv-conf"
    own = network.is_own(address)
    if rank is None:
        reason = f"{address} is {'' if own else 'not '}an address of this machine"
        return own, reason
    if rank.value == 0 and not own:
        raise ConfigError(
            "--rdzv-endpoint",
            address,
            f"this is the first host ({rank.reason} = 0) and has no such address; it has: "
            f"{network.described()}. Where addresses are translated, add --rdzv-conf is_host=true "
            "here",
        )
    return rank.value == 0, f"{rank.reason} = {rank.value}"


def _local_address(given: Given, address: str, network: Network) -> tuple[str, str]:
    if given.local_addr is not None:
        own = network.resolve(given.local_addr)
        if not network.is_own(own):
            raise ConfigError(
                "--local-addr",
                given.local_addr,
                f"this machine has no such address; it has: {network.described()}",
            )
        return own, "--local-addr"
    if network.is_own(address):
        return address, "the first host is this machine"
    source = network.source(address)
    if is_loopback(source):
        raise AddressError(f"no route leads from this machine to {address}")
    return source, f"from here the way to {address} begins"


def _interface(
    local_address: str, network: Network, variables: Mapping[str, str]
) -> tuple[dict[str, ExplainedValue[str]], tuple[str, ...]]:
    """Choose one interface for gloo and NCCL, and look at what the user has chosen."""
    interface = network.interface_of(local_address)
    if interface is None:
        return {}, ()
    reason = f"the interface that has {local_address}"
    # "=" makes NCCL compare whole names: eth1 would mean eth10 too.
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    chosen = {
        name: ExplainedValue(value, reason)
        for name, value in wanted.items()
        if not variables.get(name)
    }
    notes: tuple[str, ...] = ()
    given = variables.get("GLOO_SOCKET_IFNAME")
    if given:
        _check_interface(given, local_address, network)
        if interface not in given.split(","):
            notes = (
                f"GLOO_SOCKET_IFNAME={given} is set and stays; the first host is reached through "
                f"{interface}",
            )
    return chosen, notes


def _check_interface(given: str, local_address: str, network: Network) -> None:
    """Refuse what gloo could not use: it would fail late, or wait for hosts that cannot answer."""
    for name in given.split(","):
        if name not in network.interfaces:
            problem = "this machine has no such interface"
        elif not is_loopback(local_address) and all(map(is_loopback, network.interfaces[name])):
            problem = "other hosts cannot be reached through it"
        else:
            continue
        raise ConfigError(
            "GLOO_SOCKET_IFNAME",
            given,
            f"{problem}; unset it, or choose one of: {network.described()}",
        )


def _fewest_nodes(given: Given, job: Job) -> int:
    if given.nnodes is not None:
        return given.nnodes[0]
    return job.nodes.value if job.nodes else 1


def join_seconds(conf: Mapping[str, str]) -> int:
    """Return how long machines wait for each other, from `--rdzv-conf`.

    Raises:
        ConfigError: If that is not a time.
    """
    return _seconds(conf, "join_timeout", _JOIN_SECONDS)


def _seconds(conf: Mapping[str, str], key: str, default: int) -> int:
    text = conf.get(key, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--rdzv-conf {key}", text, "use a whole number of seconds above 0")
    return int(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
