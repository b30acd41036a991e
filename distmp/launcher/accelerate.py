"""What `accelerate launch` tells its ranks, beside torchrun's variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distmp.errors import ConfigError
from distmp.precision.accelerate import ACCELERATE_WORDS
from distmp.precision.policy import PrecisionPolicy

# accelerate sets it for every process that it launches.
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def check_started(variables: Mapping[str, str]) -> None:
    """Refuse to be the only process of several that were asked for.

    `accelerate launch --cpu` starts one process whatever `--num-processes` is; only the address at
    which the others would be met tells that there should be more.

    Raises:
        ConfigError: With a launcher that starts all of them.
    """
    if _PRECISION in variables and "MASTER_ADDR" in variables and "RANK" not in variables:
        raise ConfigError(
            "RANK",
            None,
            "accelerate launch was asked for several processes and started one without a rank, as "
            "it does with --cpu; use `accelerate launch --multi-gpu` (on CPUs too), torchrun or "
            "`distmp launch`",
        )


def wants_cpu(variables: Mapping[str, str]) -> bool:
    """Whether the run was launched with `--cpu`."""
    return _is_true(variables, "ACCELERATE_USE_CPU")


def overruled(
    variables: Mapping[str, str], policy: PrecisionPolicy, strategy: str
) -> Iterator[str]:
    """Yield, for people, what accelerate was told and the configuration decides otherwise."""
    word = variables.get(_PRECISION, "no")
    if word not in ("no", ACCELERATE_WORDS[policy.compute_dtype]):
        yield (
            f"accelerate launch was told mixed precision {word}; precision.policy decides, and "
            f"computes in {policy.name}"
        )
    for name, engine in _ENGINES.items():
        if _is_true(variables, name) and not strategy.startswith(engine.lower()):
            yield f"accelerate launch was told to use {engine}; strategy decides, and is {strategy}"
    backend = variables.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend.upper() != "NO":
        yield f"accelerate launch was told to compile with {backend}; it does not reach this run"
    steps = variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        yield (f"accelerate launch was told {steps} accumulation steps; the section batch decides")


def _is_true(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in ("1", "true", "yes", "on")
