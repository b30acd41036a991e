"""Selects the policy that a device computes natively, and says what a device lacks for a policy."""

from __future__ import annotations

from typing import NamedTuple

import torch

from distmp.errors import ConfigError
from distmp.precision.notation import PolicyLike, policy
from distmp.precision.policy import SIXTEEN_BIT, PrecisionPolicy
from distmp.utils.dtypes import dtype_name

# First compute capability with tensor cores for the dtype; below, it is emulated or slow. TF32 has
# that of bfloat16.
CAPABILITIES = {torch.bfloat16: (8, 0), torch.float16: (7, 0)}
FP8_CAPABILITY = (8, 9)
# CPU features that compute with the dtype, as the kernel lists them.
CPU_FEATURES = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "asimdhp"),
}
# First compute capability with a kernel of torch for low-precision matmuls, by the scaling of a
# policy. Matmuls with other scalings are emulated on every device.
NARROW_CAPABILITY = {"tensor": FP8_CAPABILITY, "row": (9, 0)}


class Resolution(NamedTuple):
    """A policy, and why it was selected.

    Attributes:
        policy: The policy to use.
        reason: Why it was selected and what the device lacks for it, as text.
    """

    policy: PrecisionPolicy
    reason: str


def resolve(requested: PolicyLike, device: torch.device | str) -> Resolution:
    """Resolve "auto" to the policy that `device` computes natively; return other policies as is.

    A requested policy runs on every device with its dtypes and formats. If the device only emulates
    them, or has no TF32, the reason states it. "auto" never selects fewer than 16 bits.

    Args:
        requested: A policy, the name of a preset, its text or mapping (see `distmp.policy`), or
            "auto".
        device: Device of the model.

    Returns:
        The policy, and the reason as text.

    Raises:
        ConfigError: If there is no such policy or device.

    Example:
        >>> resolve("fp32", torch.device("cpu")).policy.name
        'fp32'
    """
    device = _as_device(device)
    if isinstance(requested, str) and requested == "auto":
        return _resolve_cuda(device) if device.type == "cuda" else _resolve_cpu(device)
    given = isinstance(requested, PrecisionPolicy)
    chosen = requested if isinstance(requested, PrecisionPolicy) else policy(requested)
    reason = "given" if given else "configured"
    limit = _limit(chosen, device)
    return Resolution(chosen, f"{reason}; {limit}" if limit else reason)


def _as_device(device: torch.device | str) -> torch.device:
    try:
        if isinstance(device, torch.device | str):
            return torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", device, "is not a device; use 'cpu' or 'cuda'") from error
    raise ConfigError("device", device, "is not a device; use 'cpu' or 'cuda'")


def native_dtypes(device: torch.device) -> list[torch.dtype]:
    """Return the 16-bit dtypes that `device` computes natively."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return [dtype for dtype, first in CAPABILITIES.items() if capability >= first]
    if device.type == "cpu":
        return [dtype for dtype, features in CPU_FEATURES.items() if _cpu_features(features)]
    return []


def _resolve_cuda(device: torch.device) -> Resolution:
    gpu, capability = _gpu(device), torch.cuda.get_device_capability(device)
    native = native_dtypes(device)
    if torch.bfloat16 in native:
        # Fewer bits than 16 change the training, so they are never chosen automatically.
        faster = "; fp8 may be faster: distmp calibrate --policies bf16,fp8"
        hint = faster if capability >= FP8_CAPABILITY else ""
        return Resolution(policy("bf16"), f"{gpu} computes bfloat16 natively{hint}")
    if torch.float16 in native:
        return Resolution(
            policy("fp16"), f"{gpu} computes float16 natively and only emulates bfloat16"
        )
    return Resolution(policy("fp32"), f"{gpu} has no tensor cores")


def _resolve_cpu(device: torch.device) -> Resolution:
    if device.type != "cpu":
        return Resolution(policy("fp32"), f"what {device.type} computes natively is not known")
    if features := _cpu_features(CPU_FEATURES[torch.bfloat16]):
        return Resolution(policy("bf16"), f"this CPU computes bfloat16 natively ({features[0]})")
    return Resolution(
        policy("fp32"), "this CPU has no bfloat16 instructions, 16-bit arithmetic would be emulated"
    )


def _limit(chosen: PrecisionPolicy, device: torch.device) -> str:
    """Return what a device lacks for a policy; an empty text if nothing, or if there is no GPU."""
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        return ""
    name, capability = "this CPU", (0, 0)
    if device.type == "cuda":
        name, capability = _gpu(device), torch.cuda.get_device_capability(device)
    if chosen.tf32 and capability < CAPABILITIES[torch.bfloat16]:
        return f"{name} has no TF32, so products keep all bits of float32"
    if chosen.is_narrow and not computes_narrow(chosen.scaling, capability):
        return f"{name} only emulates matmuls with scaling={chosen.scaling}, which is slow"
    if chosen.compute_dtype in SIXTEEN_BIT and chosen.compute_dtype not in native_dtypes(device):
        return f"{name} only emulates {dtype_name(chosen.compute_dtype)}, which is slow"
    return ""


def computes_narrow(scaling: str, capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability has a kernel for low-precision matmuls."""
    return scaling in NARROW_CAPABILITY and capability >= NARROW_CAPABILITY[scaling]


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def _cpu_features(features: tuple[str, ...]) -> list[str]:
    """Return those of some features that the CPU has, according to `/proc/cpuinfo`."""
    try:
        with open("/proc/cpuinfo") as lines:
            available = {
                word
                for line in lines
                if line.startswith(("flags", "Features"))
                for word in line.split()
            }
    except OSError:  # not Linux: assume that they are missing, which is slow at worst
        return []
    return [feature for feature in features if feature in available]
