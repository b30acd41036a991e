"""Where am I: what the environment of a process says about the machines of its run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distmp.errors import ConfigError
from distmp.launcher.explained_value import ExplainedValue
from distmp.launcher.network import AddressError
from distmp.launcher.nodelist import expand

Variables = Mapping[str, str]

# Slurm counts its own steps (batch script, interactive shell, ...) from here on.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Job:
    """A process's place among the machines of a run, as its environment tells it.

    What the environment does not tell is None.

    Attributes:
        environment: One of `ENVIRONMENTS`.
        evidence: The variables that say so.
        nodes: Number of machines.
        node_rank: Which of them this is, from 0.
        head: Name or address of the first.
        name: Identifies the job: the same on all machines, another for every other job.
        hosts: All machines in order.
        names_appear: Whether a name gets its address only when its machine starts.
        spread: Whether this process stands for the whole job, outside of its machines' steps.
        notes: What else the environment looks like, and why this was chosen.
    """

    environment: str
    evidence: str
    nodes: ExplainedValue[int] | None = None
    node_rank: ExplainedValue[int] | None = None
    head: ExplainedValue[str] | None = None
    name: ExplainedValue[str] | None = None
    hosts: tuple[str, ...] = ()
    names_appear: bool = False
    spread: bool = False
    notes: tuple[str, ...] = ()


def detect(variables: Variables, hostname: str, wanted: str | None = None) -> Job:
    """Find out what started this process.

    The innermost wins: what starts processes inside of a job of something else is asked first.

    Args:
        variables: Environment variables.
        hostname: This machine's name with its domain.
        wanted: The environment to take whatever else there is, one of `ENVIRONMENTS`.

    Raises:
        ConfigError: If the variables are incomplete or contradict each other.
    """
    present = [name for name, (evidence, _) in _TABLE.items() if evidence(variables)]
    if wanted is not None:
        if wanted not in ENVIRONMENTS:
            raise ConfigError("--environment", wanted, f"use one of {', '.join(ENVIRONMENTS)}")
        if wanted != "local" and wanted not in present:
            raise ConfigError(
                "--environment",
                wanted,
                f"this process was not started by it; found: {', '.join(present) or 'none'}",
            )
        present = [wanted, *(name for name in present if name != wanted)]
    if not present or present[0] == "local":
        job = Job("local", "no job of a scheduler" if not present else "--environment")
        return replace(job, notes=_notes(present, variables, wanted))
    job = _TABLE[present[0]][1](variables, hostname)
    return replace(job, notes=job.notes + _notes(present, variables, wanted))


def _notes(present: list[str], variables: Variables, wanted: str | None) -> tuple[str, ...]:
    """Explain why the first of several environments was chosen."""
    if len(present) < 2:
        return ()
    taken, *others = present
    seen = "; ".join(f"{name}: {_TABLE[name][0](variables)}" for name in others)
    reason = "--environment asks for it" if wanted else _INNERMOST[taken]
    return (
        f"took {taken}, because {reason}; there is also {seen}. "
        f"`--environment {others[0]}` takes that, `--environment local` this machine alone",
    )


# SkyPilot


def _skypilot_evidence(variables: Variables) -> str:
    return _shown(variables, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")


def _skypilot(variables: Variables, hostname: str) -> Job:
    addresses = _required(variables, "SKYPILOT_NODE_IPS").split()
    nodes = ExplainedValue(len(addresses), "addresses in SKYPILOT_NODE_IPS")
    if "SKYPILOT_NUM_NODES" in variables and _number(variables, "SKYPILOT_NUM_NODES") != len(
        addresses
    ):
        raise ConfigError(
            "SKYPILOT_NUM_NODES",
            variables["SKYPILOT_NUM_NODES"],
            f"but SKYPILOT_NODE_IPS has {len(addresses)} addresses; start the task anew",
        )
    return Job(
        "skypilot",
        _skypilot_evidence(variables),
        nodes=nodes,
        node_rank=_rank(variables, "SKYPILOT_NODE_RANK", nodes.value),
        head=ExplainedValue(addresses[0], "first of SKYPILOT_NODE_IPS"),
        name=_first(variables, "SKYPILOT_TASK_ID", "SKYPILOT_INTERNAL_JOB_ID"),
        hosts=tuple(addresses),
    )


# Kubernetes: a Job with completionMode Indexed, and a headless Service


def _kubernetes_evidence(variables: Variables) -> str:
    return _shown(variables, "JOB_COMPLETION_INDEX")


def _kubernetes(variables: Variables, hostname: str) -> Job:
    index = _number(variables, "JOB_COMPLETION_INDEX")
    # Kubernetes names the pods of an indexed Job after the Job and their index.
    pod, _, domain = hostname.partition(".")
    pod = variables.get("HOSTNAME", pod).partition(".")[0]
    name, separator, last = pod.rpartition("-")
    if not separator or last != str(index):
        raise ConfigError(
            "JOB_COMPLETION_INDEX",
            index,
            f"but this pod's name {pod!r} does not end in -{index}; name the first pod yourself "
            "with --rdzv-endpoint, or take another --environment",
        )
    head = f"{name}-0"
    if domain and hostname.partition(".")[0] == pod:
        head = f"{head}.{domain}"
    return Job(
        "kubernetes",
        _kubernetes_evidence(variables),
        node_rank=ExplainedValue(index, "JOB_COMPLETION_INDEX"),
        head=ExplainedValue(head, f"index 0 of the Job to which pod {pod} belongs"),
        name=ExplainedValue(name, f"the Job's name, from pod {pod}"),
        names_appear=True,
    )


# MPI: one process on every machine


def _mpi_evidence(variables: Variables) -> str:
    if "OMPI_COMM_WORLD_RANK" in variables:
        return _shown(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    # srun speaks these protocols too, and sets them in its steps.
    if _slurm_step(variables) is not None:
        return ""
    if "PMI_RANK" in variables:
        return _shown(variables, "PMI_RANK", "PMI_SIZE")
    return _shown(variables, "PMIX_RANK", "PMIX_NAMESPACE")


def _mpi(variables: Variables, hostname: str) -> Job:
    open_mpi = "OMPI_COMM_WORLD_RANK" in variables
    if not open_mpi and "PMI_RANK" not in variables:
        raise ConfigError(
            "PMIX_RANK",
            variables["PMIX_RANK"],
            "PMIx tells a process's rank and not how many there are; give --nnodes, --node-rank "
            "and --rdzv-endpoint with --environment local",
        )
    rank, size = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if open_mpi else ("PMI_RANK", "PMI_SIZE")
    )
    nodes = _number(variables, size, least=1)
    per_node = "OMPI_COMM_WORLD_LOCAL_SIZE" if open_mpi else "MPI_LOCALNRANKS"
    if per_node in variables and _number(variables, per_node) != 1:
        raise ConfigError(
            per_node,
            variables[per_node],
            "start one process on each machine (Open MPI: --map-by ppr:1:node, MPICH and Intel "
            "MPI: -ppn 1); distmp starts the ranks itself",
        )
    return Job(
        "mpi",
        _mpi_evidence(variables),
        nodes=ExplainedValue(nodes, size),
        node_rank=_rank(variables, rank, nodes),
        head=_mpi_head(variables),
        name=_first(variables, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID", "PMI_JOBID"),
    )


def _mpi_head(variables: Variables) -> ExplainedValue[str] | None:
    """MPI itself does not tell where its first process is."""
    if "MASTER_ADDR" in variables:
        return ExplainedValue(variables["MASTER_ADDR"], "MASTER_ADDR")
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in variables:
            first = expand(variables[name], setting=name)[0]
            return ExplainedValue(first, f"first of {name}, where mpirun puts its first process")
    return None


# Slurm


def _slurm_evidence(variables: Variables) -> str:
    return _shown(variables, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")


def _slurm_step(variables: Variables) -> int | None:
    """Return the number of the step that srun started, or None for scripts and shells."""
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if name in variables and "SLURM_JOB_ID" in variables:
            step = _number(variables, name)
            return step if step < _SLURM_SPECIAL_STEPS else None
    return None


def _slurm(variables: Variables, hostname: str) -> Job:
    job = _required(variables, "SLURM_JOB_ID")
    step = _slurm_step(variables)
    return _slurm_allocation(variables, job) if step is None else _slurm_srun(variables, job, step)


def _slurm_allocation(variables: Variables, job: str) -> Job:
    """A batch script, which runs on the first machine of its job, or a shell of salloc."""
    names = [name for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES") if name in variables]
    nodes = ExplainedValue(
        _number(variables, names[0], least=1) if names else 1, names[0] if names else "one machine"
    )
    on_a_node = "SLURM_NODEID" in variables or "SLURMD_NODENAME" in variables
    return Job(
        "slurm",
        _slurm_evidence(variables),
        nodes=nodes,
        name=ExplainedValue(job, "SLURM_JOB_ID"),
        hosts=_slurm_hosts(variables, "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        spread=nodes.value > 1 or not on_a_node,
        notes=()
        if on_a_node
        else (
            f"this is a shell of job {job} on a machine that does not belong to the job; "
            "`--environment local` trains here instead",
        ),
    )


def _slurm_srun(variables: Variables, job: str, step: int) -> Job:
    hosts = _slurm_hosts(variables, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if not hosts:
        raise ConfigError(
            "SLURM_STEP_NODELIST", None, f"is not set although SLURM_STEP_ID = {step} is"
        )
    nodes = ExplainedValue(len(hosts), "machines in the step's list")
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if {part.partition("(")[0] for part in tasks.split(",")} != {"1"}:
        raise ConfigError(
            "SLURM_STEP_TASKS_PER_NODE",
            tasks,
            "start one task on each machine (srun --ntasks-per-node=1); distmp starts the ranks "
            "itself, --nproc-per-node says how many",
        )
    return Job(
        "slurm",
        _slurm_evidence(variables),
        nodes=nodes,
        node_rank=_rank(variables, "SLURM_NODEID", nodes.value),
        head=ExplainedValue(hosts[0], "first machine in the step's list"),
        name=ExplainedValue(f"{job}.{step}", "SLURM_JOB_ID and SLURM_STEP_ID"),
        hosts=hosts,
    )


def _slurm_hosts(variables: Variables, *names: str) -> tuple[str, ...]:
    for name in names:
        if name in variables:
            return tuple(expand(variables[name], setting=name))
    return ()


def srun_command(variables: Variables, nodes: int, command: list[str]) -> list[str]:
    """Return the command that runs `command` once on every machine of this Slurm job."""
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    # srun does not take the cores of the job for its one task by itself.
    cores = re.sub(r"\(x\d+\)", "", variables.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cores:
        words.append(f"--cpus-per-task={min(map(int, cores.split(',')))}")
    return [*words, *command]


def slurm_resolver(resolve: Callable[[str], str]) -> Callable[[str], str]:
    """Return a resolver that asks Slurm about names that have no address: it may know one.

    Args:
        resolve: Asked first.
    """

    def ask_slurm_too(name: str) -> str:
        try:
            return resolve(name)
        except AddressError:
            address = _node_address(name)
            if address in ("", name):
                raise
            return resolve(address)

    return ask_slurm_too


def _node_address(name: str) -> str:
    """Return what `scontrol show node` has as NodeAddr, or nothing."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else ""


# What all of them use


def _shown(variables: Variables, *names: str) -> str:
    """Return `NAME=value, ...`, or nothing where the first is not set."""
    if names[0] not in variables:
        return ""
    return ", ".join(
        f"{name}={json.dumps(variables[name])[1:-1]}" for name in names if name in variables
    )


def _required(variables: Variables, name: str) -> str:
    value = variables.get(name, "").strip()
    if not value:
        raise ConfigError(name, variables.get(name), "is not set, although its fellows are")
    return value


def _number(variables: Variables, name: str, least: int = 0) -> int:
    text = _required(variables, name)
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ConfigError(name, text, f"must be a whole number of {least} or more")
    return int(text)


def _rank(variables: Variables, name: str, nodes: int) -> ExplainedValue[int]:
    rank = _number(variables, name)
    if rank >= nodes:
        raise ConfigError(name, rank, f"but there are {nodes} machines, numbered from 0")
    return ExplainedValue(rank, name)


def _first(variables: Variables, *names: str) -> ExplainedValue[str] | None:
    for name in names:
        if variables.get(name):
            return ExplainedValue(variables[name], name)
    return None


# Asked in this order.
_TABLE: dict[str, tuple[Callable[[Variables], str], Callable[[Variables, str], Job]]] = {
    "skypilot": (_skypilot_evidence, _skypilot),
    "kubernetes": (_kubernetes_evidence, _kubernetes),
    "mpi": (_mpi_evidence, _mpi),
    "slurm": (_slurm_evidence, _slurm),
}
_INNERMOST = {
    "skypilot": "SkyPilot starts its tasks on top of other clusters",
    "kubernetes": "nothing else starts processes inside of a pod, and variables are inherited",
    "mpi": "mpirun starts its processes inside of jobs of a scheduler",
    "slurm": "nothing else started this process",
}
ENVIRONMENTS = (*_TABLE, "local")
