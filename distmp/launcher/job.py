"""Detect the launch environment of this process: a scheduler, variables, or a single machine."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from distmp.distributed.rank_environment import (
    MACHINES,
    PROCESSES,
    TORCHRUN,
    LauncherVariables,
    Variables,
)
from distmp.errors import ConfigError, require

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class ExplainedValue(Generic[T_co]):
    """A value and its reason as text: the variable it was read from, or a short phrase."""

    value: T_co
    reason: str


_NUMBERS = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_NAME = rf"(?:[^\[\],\s]|{_NUMBERS})+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*")
# Slurm has no larger clusters; the names of a wrong range could fill the memory.
_LIMIT = 2**16


def expand(text: str, *, setting: str) -> list[str]:
    """Return the machines of a list in the order of `scontrol show hostnames`.

    Args:
        text: The list. Numbers in brackets keep their leading zeros. Several brackets in a name
            form a product in which the last one varies fastest.
        setting: The variable that contains the list, for error messages.

    Raises:
        ConfigError: If the text is not such a list.
    """
    names: list[str] = []
    problem = f"is not a list of fewer than {_LIMIT:,} machines such as n[01-03,7],login"
    # Of another text, an empty range.
    for name in re.findall(_NAME, text) if _LIST.fullmatch(text) else ["[1-0]"]:
        pieces = re.split(r"\[(.*?)\]", name)  # the odd ones were in brackets
        choices = [_numbers(piece) if n % 2 else [piece] for n, piece in enumerate(pieces)]
        require(0 < math.prod(map(len, choices)) < _LIMIT - len(names), setting, text, problem)
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ranges, `_LIMIT` of each; none if a range ends before it begins."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found = [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)[:_LIMIT]]
        if not found:
            return []
        numbers += found
    return numbers


_POD_INDEX = "JOB_COMPLETION_INDEX"
# Variables that identify a job of Slurm; the first one is always set.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")
# Slurm numbers its special steps (batch script, interactive shell, ...) from this value up.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
# In an allocation with several tasks per machine, srun ignores --ntasks-per-node without --ntasks.
_SRUN = 'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none'


@dataclass(frozen=True)
class Job:
    """The machines of a run and this machine's place among them, read from the environment.

    A value that the environment does not provide is None.

    Attributes:
        environment: One of `ENVIRONMENTS`.
        evidence: The variables that identify the environment, as `NAME=value, ...`.
        nodes: Number of machines.
        node_rank: Rank of this machine, from 0.
        head: Name or address of the first machine.
        port: Port of the rendezvous on the first machine.
        name: Unique name of the job, the same on all its machines.
        hosts: Names or addresses of all machines, in order of node rank.
        names_appear: Whether a machine's name resolves only after that machine has started.
        notes: Why this environment was selected, and which others were found.
    """

    environment: str
    evidence: str
    nodes: ExplainedValue[int] | None = None
    node_rank: ExplainedValue[int] | None = None
    head: ExplainedValue[str] | None = None
    port: ExplainedValue[int] | None = None
    name: ExplainedValue[str] | None = None
    hosts: tuple[str, ...] = ()
    names_appear: bool = False
    notes: tuple[str, ...] = ()


def detect(variables: Variables, hostname: str, requested: str | None = None) -> Job:
    """Detect the environment that started this process.

    If several are found, the innermost is selected.

    Args:
        variables: Environment variables.
        hostname: This machine's name with its domain.
        requested: The environment to use regardless of what is found, one of `ENVIRONMENTS`.

    Raises:
        ConfigError: If the variables are incomplete or contradict each other, or if several
            launchers were started on this machine.
    """
    present = [name for name, (evidence, _) in _TABLE.items() if evidence(variables)]
    if requested is not None:
        problem = f"its variables are not set; found: {', '.join(present) or 'none'}"
        require(requested in ("local", *present), "--environment", requested, problem)
        present = [requested, *(name for name in present if name != requested)]
    if not present or present[0] == "local":
        job = Job("local", "no job of a scheduler" if not present else "--environment")
    else:
        evidence, read = _TABLE[present[0]]
        job = read(Job(present[0], evidence(variables)), variables, hostname)
    return replace(job, notes=job.notes + _notes(present, variables))


def _notes(present: list[str], variables: Variables) -> tuple[str, ...]:
    """Say which of several environments was selected."""
    if len(present) < 2:
        return ()
    selected, *others = present
    evidence = "; ".join(f"{name}: {_TABLE[name][0](variables)}" for name in others)
    return (
        f"selected {selected}; also found {evidence}. "
        f"`--environment {others[0]}` selects that, `--environment local` only this machine",
    )


# Any launcher that starts one process per machine, and passes it its rank and the first machine


def _numbered_evidence(variables: Variables) -> str:
    source = _numbered_source(variables)
    return _evidence(variables, *source.set_in(variables)) if source else ""


def _numbered_source(variables: Variables) -> LauncherVariables | None:
    """Return the variables that number this machine, complete ones first, or None.

    Variables without a rank do not count in a job of a scheduler, which provides it.
    """
    in_step = _slurm_step(variables) is not None
    of_scheduler = in_step or any(name in variables for name in ("SLURM_JOB_ID", _POD_INDEX))

    def numbers_this(source: LauncherVariables) -> bool:
        # srun sets variables of PMI, and job scripts often set RANK and NODE_RANK for its tasks.
        has_rank = source.describe_ranks(variables) or (source.rank in variables and not in_step)
        return source.show_several(variables) and (has_rank or not of_scheduler)

    found = [source for source in (*MACHINES, *PROCESSES, TORCHRUN) if numbers_this(source)]
    # Azure ML sets NODE_RANK without a number of machines, and WORLD_SIZE and RANK.
    complete = (source for source in found if {source.size, source.rank} <= variables.keys())
    return next(complete, found[0] if found else None)


def _numbered(job: Job, variables: Variables, hostname: str) -> Job:
    source = _numbered_source(variables)
    assert source is not None
    _refuse_several_launchers(source, variables)
    complete = source.rank in variables and variables.get(source.size, "").isdecimal()
    nodes = _number(variables, source.size, least=1) if complete else None
    head = variables.get(source.head, "").split()
    several = (
        f"{job.evidence}: this is one of several machines; `--environment local` trains on this "
        "machine only"
    )
    return replace(
        job,
        nodes=ExplainedValue(nodes, source.size) if nodes else None,
        node_rank=_rank(variables, source.rank, nodes) if source.rank in variables else None,
        head=ExplainedValue(head[0], source.head) if head else None,
        port=_port(variables, source.port) if source.port in variables else None,
        names_appear=bool(head),
        notes=(several,),
    )


def _refuse_several_launchers(source: LauncherVariables, variables: Variables) -> None:
    """Refuse several launchers on one machine: each would start ranks on all of its devices."""
    nested = source == TORCHRUN and "TORCHELASTIC_RUN_ID" in variables
    others = {source.local_size: "1", source.local_rank: "0"}
    name = next((name for name, one in others.items() if variables.get(name, one) != one), None)
    started = "torchrun or another `distmp launch` has started this one"
    problem = (
        f"{started if nested else 'several processes were started on this machine'}, and each "
        "would start a rank for every device; start one `distmp launch` per machine, or `python -m "
        "distmp.train` as one of the ranks; `distmp launch --environment local` trains on this "
        "machine only"
    )
    setting = name or source.size
    require(not nested and name is None, setting, variables.get(setting), problem)


def _port(variables: Variables, name: str) -> ExplainedValue[int]:
    port = _number(variables, name, least=1)
    require(port < 2**16, name, port, "must be a port below 65536")
    return ExplainedValue(port, name)


# Kubernetes: a Job with completionMode Indexed, and a headless Service


def _kubernetes(job: Job, variables: Variables, hostname: str) -> Job:
    index = _number(variables, _POD_INDEX)
    # Kubernetes names the pods of an indexed Job after the Job and their index.
    pod, _, domain = hostname.partition(".")
    pod = variables.get("HOSTNAME", pod).partition(".")[0]
    name, separator, last = pod.rpartition("-")
    problem = (
        f"but this pod's name {pod!r} does not end in -{index}; give the first pod's name with "
        "--rdzv-endpoint, or use another --environment"
    )
    require(separator != "" and last == str(index), _POD_INDEX, index, problem)
    head = f"{name}-0"
    if domain and hostname.partition(".")[0] == pod:
        head = f"{head}.{domain}"
    return replace(
        job,
        node_rank=ExplainedValue(index, _POD_INDEX),
        head=ExplainedValue(head, f"index 0 of the Job of pod {pod}"),
        name=ExplainedValue(name, f"the Job's name, from pod {pod}"),
        names_appear=True,
    )


# Slurm


def _slurm_step(variables: Variables) -> int | None:
    """Return the number of the step that srun started, or None for scripts and shells."""
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if name in variables and "SLURM_JOB_ID" in variables:
            step = _number(variables, name)
            return step if step < _SLURM_SPECIAL_STEPS else None
    return None


def _slurm(job: Job, variables: Variables, hostname: str) -> Job:
    name = _required(variables, "SLURM_JOB_ID")
    step = _slurm_step(variables)
    if step is None:
        return _slurm_allocation(job, variables, name)
    return _slurm_srun(job, variables, name, step)


def _slurm_allocation(job: Job, variables: Variables, name: str) -> Job:
    """Return the job of a script on its only machine; refuse shells, and scripts of several."""
    names = [name for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES") if name in variables]
    nodes = _number(variables, names[0], least=1) if names else 1
    on_a_node = "SLURM_NODEID" in variables or "SLURMD_NODENAME" in variables
    hint = (
        f"start the launcher on each machine of the job with srun: `{_SRUN} distmp launch ...`; "
        "`--environment local` trains on this machine only"
    )
    require(nodes == 1 and on_a_node, "SLURM_JOB_ID", name, hint)
    return replace(
        job,
        nodes=ExplainedValue(nodes, names[0] if names else "one machine"),
        name=ExplainedValue(name, "SLURM_JOB_ID"),
    )


def _slurm_srun(job: Job, variables: Variables, name: str, step: int) -> Job:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    lists = (expand(variables[name], setting=name) for name in names if name in variables)
    hosts = tuple(next(lists, ()))
    problem = f"is not set although SLURM_STEP_ID = {step} is"
    require(len(hosts) > 0, "SLURM_STEP_NODELIST", None, problem)
    nodes = ExplainedValue(len(hosts), "machines in the step's list")
    tasks = variables.get("SLURM_STEP_TASKS_PER_NODE", "1")
    one_each = {part.partition("(")[0] for part in tasks.split(",")} == {"1"}
    hint = (
        f"start one task on each machine: `{_SRUN} distmp launch ...`; distmp starts the ranks "
        "itself, set their number with --nproc-per-node"
    )
    require(one_each, "SLURM_STEP_TASKS_PER_NODE", tasks, hint)
    return replace(
        job,
        nodes=nodes,
        node_rank=_rank(variables, "SLURM_NODEID", nodes.value),
        head=ExplainedValue(hosts[0], "first machine in the step's list"),
        name=ExplainedValue(f"{name}.{step}", "SLURM_JOB_ID and SLURM_STEP_ID"),
        hosts=hosts,
    )


def scheduled_job(variables: Variables) -> tuple[str, int]:
    """Return the name of the scheduler's job, and how often it was requeued; "" without one."""
    requeues = variables.get("SLURM_RESTART_COUNT", "0")
    return variables.get("SLURM_JOB_ID", ""), int(requeues) if requeues.isdecimal() else 0


# Shared helpers


def _evidence(variables: Variables, *names: str) -> str:
    """Return `NAME=value, ...`, or an empty string if the first is not set."""
    if names[0] not in variables:
        return ""
    return ", ".join(
        f"{name}={json.dumps(variables[name])[1:-1]}" for name in names if name in variables
    )


def _required(variables: Variables, name: str) -> str:
    value = variables.get(name, "").strip()
    problem = "is not set, although other variables of its kind are"
    require(value != "", name, variables.get(name), problem)
    return value


def _number(variables: Variables, name: str, least: int = 0) -> int:
    text = _required(variables, name)
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ConfigError(name, text, f"must be an integer of {least} or more")
    return int(text)


def _rank(variables: Variables, name: str, nodes: int | None) -> ExplainedValue[int]:
    rank = _number(variables, name)
    if nodes is not None and rank >= nodes:
        raise ConfigError(name, rank, f"but there are {nodes} machines, numbered from 0")
    return ExplainedValue(rank, name)


# In order of precedence.
_TABLE: dict[str, tuple[Callable[[Variables], str], Callable[[Job, Variables, str], Job]]] = {
    "variables": (_numbered_evidence, _numbered),
    "kubernetes": (lambda variables: _evidence(variables, _POD_INDEX), _kubernetes),
    "slurm": (lambda variables: _evidence(variables, *_SLURM), _slurm),
}
ENVIRONMENTS = (*_TABLE, "local")
