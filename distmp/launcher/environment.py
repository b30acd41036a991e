"""Who this process is among the ranks of a run, from the variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from distmp.errors import ConfigError
from distmp.launcher.accelerate import check_started

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place among all ranks (`rank`) and among those of its machine (`local_rank`).

    The default is a process alone.

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
        if self.local_world_size > self.world_size:
            raise ConfigError(
                "LOCAL_WORLD_SIZE",
                self.local_world_size,
                f"is more than WORLD_SIZE = {self.world_size}",
            )

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read torchrun's variables; where there are none, the process is alone.

        Raises:
            ConfigError: If some of the variables are missing, a value is impossible, or accelerate
                launched one process in place of several.
        """
        present = [name for name in _VARIABLES if name in variables]
        if not present:
            check_started(variables)
            return cls()
        return cls(**{name.lower(): _read(variables, name, present[0]) for name in _VARIABLES})


def _read(variables: Mapping[str, str], name: str, present: str) -> int:
    text = variables.get(name)
    if text is None:
        raise ConfigError(
            name,
            None,
            f"is not set although {present} is; start the run with torchrun or `distmp launch`, "
            f"or unset {present} for a process alone",
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, text, "must be a whole number, as torchrun sets it") from None


def _check(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise ConfigError(size_name, size, "must be at least 1")
    if not 0 <= rank < size:
        raise ConfigError(rank_name, rank, f"must be from 0 to {size_name} - 1 = {size - 1}")
