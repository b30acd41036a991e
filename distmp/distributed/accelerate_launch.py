"""Reads the variables that `accelerate launch` sets for its ranks, beside torchrun's."""

from __future__ import annotations

from collections.abc import Mapping

from distmp.errors import ConfigError

# accelerate sets it for every process that it launches.
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def check_started(variables: Mapping[str, str]) -> None:
    """Refuse to be the only process of several that were asked for.

    `accelerate launch --cpu` starts one process whatever `--num-processes` is; only the address at
    which the others would be met tells that there should be more.

    Raises:
        ConfigError: With a launcher that starts all of them.
    """
    if PRECISION_VARIABLE in variables and "MASTER_ADDR" in variables and "RANK" not in variables:
        raise ConfigError(
            "RANK",
            None,
            "accelerate launch was asked for several processes and started one without a rank, as "
            "it does with --cpu; use `accelerate launch --multi-gpu` (on CPUs too), torchrun or "
            "`distmp launch`",
        )


def wants_cpu(variables: Mapping[str, str]) -> bool:
    """Whether the run was launched with `--cpu`."""
    return is_true(variables, "ACCELERATE_USE_CPU")


def is_true(variables: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to true, in one of the spellings that accelerate reads."""
    return variables.get(name, "").lower() in ("1", "true", "yes", "on")
