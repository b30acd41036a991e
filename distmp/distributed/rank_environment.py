"""Reads rank and world size of this process from the variables of torchrun and other launchers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

from distmp.errors import ConfigError, require

# accelerate sets it for every process that it launches.
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def check_started(variables: Mapping[str, str]) -> None:
    """Refuse to run as the only one of several requested processes.

    `accelerate launch --cpu` starts one process for any `--num-processes`. MASTER_ADDR without
    RANK shows that more were requested.

    Raises:
        ConfigError: With the launchers that start all processes.
    """
    requested = {PRECISION_VARIABLE, "MASTER_ADDR"} <= variables.keys()
    problem = (
        "several processes were requested of accelerate launch, which started one without a rank, "
        "as it does with --cpu; use `accelerate launch --multi-gpu` (on CPUs too), torchrun or "
        "`distmp launch`"
    )
    require("RANK" in variables or not requested, "RANK", None, problem)


def wants_cpu(variables: Mapping[str, str]) -> bool:
    """Return whether the run was launched with `--cpu`."""
    return is_true("ACCELERATE_USE_CPU", variables)


def is_true(name: str, variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether a variable is set to true, in one of the spellings that accelerate reads."""
    return variables.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")


# Set by `distmp launch` on several machines: RUN_ID@HOST:PORT of its store.
STORE_VARIABLE = "DISTMP_STORE"
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables by which torchrun numbers a rank."""


def is_under_torchrun() -> bool:
    """Return whether torchrun's agent started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process among all ranks and among those of its machine.

    The default is a single process.

    Attributes:
        rank: Global rank, 0 to `world_size` - 1.
        local_rank: Rank on this machine, 0 to `local_world_size` - 1.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this machine.

    Raises:
        ConfigError: If the numbers contradict each other; it names torchrun's variable.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    def __post_init__(self) -> None:
        _check("RANK", self.rank, "WORLD_SIZE", self.world_size)
        _check("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size)
        local, problem = self.local_world_size, f"is more than WORLD_SIZE = {self.world_size}"
        require(local <= self.world_size, "LOCAL_WORLD_SIZE", local, problem)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read torchrun's variables; without them this is a single process.

        WORLD_SIZE=1 without RANK is a single process, even if a launcher started others.

        Raises:
            ConfigError: If some of the variables are missing, a value is impossible, accelerate
                launched one process in place of several, or another launcher (mpirun, srun) has
                started several processes, see `adopt_ranks`.
        """
        present = [name for name in VARIABLES if name in variables]
        if present == ["WORLD_SIZE"] and variables["WORLD_SIZE"] == "1":
            return cls()
        if not present:
            check_started(variables)
            refuse_several(variables)
            return cls()
        if missing := [name for name in VARIABLES if name not in present]:
            others = f" (nor {', '.join(missing[1:])})" if missing[1:] else ""
            raise ConfigError(
                missing[0],
                None,
                f"is not set although {present[0]} is{others}; start the run with torchrun or "
                f"`distmp launch`, or unset {', '.join(present)} for a single process",
            )
        return cls(**{name.lower(): read_integer(variables, name) for name in VARIABLES})


def local_world_size(world_size: int) -> int:
    """Return the number of ranks on this machine; `world_size` if LOCAL_WORLD_SIZE is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def read_integer(variables: Mapping[str, str], name: str, *, default: str | None = None) -> int:
    """Return the value of a variable of the launcher.

    Raises:
        ConfigError: If it is not an integer.
    """
    text = variables[name] if default is None else variables.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, text, "must be an integer, as torchrun sets it") from None


def _check(rank_name: str, rank: int, size_name: str, size: int) -> None:
    require(size >= 1, size_name, size, "must be at least 1")
    require(0 <= rank < size, rank_name, rank, f"must be from 0 to {size_name} - 1 = {size - 1}")


# Variables by which launchers other than torchrun describe the processes that they start

Variables = Mapping[str, str]

_ALONE = "or set WORLD_SIZE=1 for processes that train independently"


class LauncherVariables(NamedTuple):
    """Names of the variables of one launcher; empty where it has none.

    Attributes:
        size: Number of processes, or of machines with one process each.
        rank: Rank of this process, from 0.
        local_size: Number of processes on this machine.
        local_rank: Rank of this process on its machine.
        head: Address of the first machine.
    """

    size: str
    rank: str
    local_size: str = ""
    local_rank: str = ""
    head: str = "MASTER_ADDR"

    @property
    def port(self) -> str:
        """Name of the variable with the port of the first machine."""
        prefix, found, _ = self.head.rpartition("ADDR")
        return f"{prefix}PORT" if found else ""

    def show_several(self, variables: Variables) -> bool:
        """Return whether the variables show more than this one process."""
        size, rank = variables.get(self.size), variables.get(self.rank, "")
        if size is not None:
            return size.strip() not in ("", "0", "1")
        return rank not in ("", "0") or (rank == "0" and self.head in variables)

    def describe_ranks(self, variables: Variables) -> bool:
        """Return whether all four numbers of a rank are set."""
        return {self.size, self.rank, self.local_size, self.local_rank} <= variables.keys()

    def set_in(self, variables: Variables) -> list[str]:
        """Return the names that are set."""
        return [name for name in self if name in variables]


def _prefixed(prefix: str) -> LauncherVariables:
    return LauncherVariables(
        *(prefix + end for end in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
    )


# Machines with one process each. A pod of Kubeflow Trainer has torchrun's own options (PET_).
MACHINES = (
    LauncherVariables("PET_NNODES", "PET_NODE_RANK", head="PET_MASTER_ADDR"),
    LauncherVariables("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", head="SKYPILOT_NODE_IPS"),
    LauncherVariables("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", head="DSTACK_MASTER_NODE_IP"),
    LauncherVariables("SM_HOST_COUNT", "SM_CURRENT_HOST_RANK", head="SM_MASTER_ADDR"),
    LauncherVariables("NNODES", "NODE_RANK"),
)
# torchrun's own names, which PyTorchJob, Volcano, Azure ML and many scripts set as well.
TORCHRUN = LauncherVariables("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
_SLURM_STEP = LauncherVariables(
    "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", head=""
)
# In order of precedence: mpirun starts its processes within those of srun, and Flux sets PMI_SIZE.
PROCESSES = (
    *map(_prefixed, ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "JSM_NAMESPACE_")),
    LauncherVariables("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "", "FLUX_TASK_LOCAL_ID"),
    LauncherVariables("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    # PMIx provides no number of processes; mpirun also sets this one.
    LauncherVariables("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", head=""),
)


def adopt_ranks(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables to the numbers of mpirun, srun or another launcher of ranks.

    This needs MASTER_ADDR and MASTER_PORT. Without them, and for processes that WORLD_SIZE or RANK
    describe differently, nothing changes.

    Raises:
        ConfigError: If machines have different numbers of processes.
    """
    if TORCHRUN.rank in variables or not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        return
    for source in (*PROCESSES, _SLURM_STEP):
        if not (source.describe_ranks(variables) and source.show_several(variables)):
            continue
        size = variables[source.size]
        if variables.setdefault(TORCHRUN.size, size) == size:
            variables[TORCHRUN.rank] = variables[source.rank]
            variables[TORCHRUN.local_rank] = variables[source.local_rank]
            variables[TORCHRUN.local_size] = _local_size(variables, source.local_size)
        return


def _local_size(variables: Variables, name: str) -> str:
    """Return the number of processes of this machine; Slurm writes `4(x2)` for two machines."""
    parts = re.fullmatch(r"(\d+)(\(x\d+\))?", variables[name])
    if parts is None:
        raise ConfigError(
            name, variables[name], "start the same number of processes on each machine"
        )
    return parts[1]


def refuse_several(variables: Variables = os.environ) -> None:
    """Refuse to train alone if a launcher has started several processes.

    Raises:
        ConfigError: If it has; names the variable that shows it.
    """
    started = [row for row in (*PROCESSES, _SLURM_STEP) if row.show_several(variables)]
    if started:
        name = started[0].set_in(variables)[0]
        raise ConfigError(
            name,
            _value(variables, name),
            f"{variables.get(started[0].size, 'several')} processes were started together, but "
            "torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR ...) are not set, so each would "
            "train alone; start one `distmp launch` or torchrun per machine, set MASTER_ADDR and "
            f"MASTER_PORT for ranks that srun or mpirun starts, {_ALONE}",
        )
    # A test trains alone on purpose, on whichever machine it runs.
    if "PYTEST_CURRENT_TEST" not in variables:
        _refuse_requested(variables)


def _refuse_requested(variables: Variables) -> None:
    """Refuse to train alone where several machines or tasks were requested."""
    machines = [row for row in MACHINES if row.show_several(variables)]
    name = machines[0].set_in(variables)[0] if machines else "SLURM_NTASKS"
    if not machines and not _is_batch_script_of_several(variables):
        return
    what = "this is one of several machines" if machines else "this batch script has several tasks"
    raise ConfigError(
        name,
        _value(variables, name),
        f"{what}, but this process was started without torchrun or srun, so it would train alone; "
        f"start it with `distmp launch` or torchrun, {_ALONE}",
    )


def _is_batch_script_of_several(variables: Variables) -> bool:
    """Return whether this process runs in a Slurm batch script with several tasks, without srun.

    In a shell of salloc, where SLURM_PROCID is not set or a step has one task, a single process is
    intended.
    """
    in_script = "SLURM_PROCID" in variables and "SLURM_STEP_ID" not in variables
    return in_script and variables.get("SLURM_NTASKS", "1") != "1"


def _value(variables: Variables, name: str) -> int | str:
    text = variables[name]
    return int(text) if text.isascii() and text.isdecimal() else text
