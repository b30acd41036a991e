"""Reads the variables that `accelerate launch` sets in addition to torchrun's."""

from __future__ import annotations

from collections.abc import Mapping

from distmp.errors import ConfigError

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
    return is_true(variables, "ACCELERATE_USE_CPU")


def is_true(variables: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is set to true, in one of the spellings that accelerate reads."""
    return variables.get(name, "").lower() in ("1", "true", "yes", "on")
