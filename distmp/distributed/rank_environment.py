"""Reads rank and world size of this process from the environment variables of torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from distmp.distributed.launcher_variables import refuse_several
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
    if PRECISION_VARIABLE in variables and "MASTER_ADDR" in variables and "RANK" not in variables:
        raise ConfigError(
            "RANK",
            None,
            "several processes were requested of accelerate launch, which started one without a "
            "rank, as it does with --cpu; use `accelerate launch --multi-gpu` (on CPUs too), "
            "torchrun or `distmp launch`",
        )


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
                started several processes, see `launcher_variables.adopt_ranks`.
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
