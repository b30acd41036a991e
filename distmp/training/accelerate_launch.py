"""Options of `accelerate launch` that the configuration of a run overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distmp.distributed.accelerate_launch import PRECISION_VARIABLE, is_true
from distmp.precision.accelerate import ACCELERATE_WORDS
from distmp.precision.policy import PrecisionPolicy

_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def overridden_options(
    variables: Mapping[str, str], policy: PrecisionPolicy, strategy: str
) -> Iterator[str]:
    """Yield a message for each option of `accelerate launch` that the configuration overrides."""
    word = variables.get(PRECISION_VARIABLE, "no")
    if word not in ("no", ACCELERATE_WORDS[policy.compute_dtype]):
        yield (
            f"accelerate launch requested mixed precision {word}; precision.policy overrides it "
            f"with {policy.name}"
        )
    for name, engine in _ENGINES.items():
        if is_true(variables, name) and not strategy.startswith(engine.lower()):
            yield f"accelerate launch requested {engine}; strategy overrides it with {strategy}"
    backend = variables.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend.upper() != "NO":
        yield f"accelerate launch requested compilation with {backend}; set compile instead"
    steps = variables.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        yield f"accelerate launch requested {steps} accumulation steps; section batch overrides it"
