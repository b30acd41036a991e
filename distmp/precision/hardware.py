"""The policy that a device really supports."""

from __future__ import annotations

from typing import NamedTuple

import torch

from distmp.precision.notation import policy
from distmp.precision.policy import PrecisionPolicy

# First compute capabilities with tensor cores for the type; below it is emulated or slow.
BF16_CAPABILITY = (8, 0)
FP16_CAPABILITY = (7, 0)


class Resolution(NamedTuple):
    """A policy and, in words, why it was chosen."""

    policy: PrecisionPolicy
    reason: str


def resolve(wanted: str | PrecisionPolicy, device: torch.device) -> Resolution:
    """Turn "auto" into the policy that `device` computes natively; anything else is kept.

    Args:
        wanted: A policy, the name of a preset, or "auto".
        device: Where the model will run.
    """
    if isinstance(wanted, PrecisionPolicy):
        return Resolution(wanted, "given")
    if wanted != "auto":
        return Resolution(policy(wanted), "configured")
    if device.type == "cuda":
        return _resolve_cuda(
            torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        )
    return _resolve_cpu()


def _resolve_cuda(device_name: str, capability: tuple[int, int]) -> Resolution:
    generation = f"{device_name} (compute capability {capability[0]}.{capability[1]})"
    if capability >= BF16_CAPABILITY:
        return Resolution(policy("bf16"), f"{generation} computes bfloat16 natively")
    if capability >= FP16_CAPABILITY:
        return Resolution(
            policy("fp16"), f"{generation} computes float16 natively and only emulates bfloat16"
        )
    return Resolution(policy("fp32"), f"{generation} has no fast 16-bit arithmetic")


def _resolve_cpu() -> Resolution:
    features = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if _cpu_has(name)]
    if features:
        return Resolution(policy("bf16"), f"this CPU computes bfloat16 natively ({features[0]})")
    return Resolution(
        policy("fp32"), "this CPU has no bfloat16 instructions, 16-bit arithmetic would be emulated"
    )


def _cpu_has(feature: str) -> bool:
    """Whether the CPU has an instruction set, as the kernel lists it (`/proc/cpuinfo` flags)."""
    try:
        with open("/proc/cpuinfo") as lines:
            return any(
                feature in line.split() for line in lines if line.startswith(("flags", "Features"))
            )
    except OSError:  # not Linux: assume the instructions are missing, which is slow at worst
        return False
