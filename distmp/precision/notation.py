"""Reads and writes policies: names of presets, one line of text, and mappings as in YAML.

Examples are the preset `bf16`, the text `bf16,reduce=bf16,keep_fp32=norm|head`, and the equivalent
mapping `{preset: bf16, reduce: bf16, keep_fp32: [norm, head]}`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distmp.errors import ConfigError, nearest, require
from distmp.precision.policy import (
    DTYPE_WORDS,
    FIELDS,
    PRESETS,
    SIXTEEN_BIT,
    PrecisionPolicy,
    dtype_word,
)
from distmp.utils.dtypes import dtype_name

SETTING = "precision.policy"

# A policy, its name, its text, or its mapping.
PolicyLike = PrecisionPolicy | str | Mapping[str, Any]

_DTYPES = DTYPE_WORDS | {dtype_name(dtype): dtype for dtype in DTYPE_WORDS.values()}
_SWITCHES = {"true": True, "false": False}

# Policies for the names that Lightning uses.
LIGHTNING_POLICIES = {
    "16-mixed": "fp16-autocast",
    "bf16-mixed": "bf16-autocast",
    "32-true": "fp32",
}
# The policies to use in place of others of other libraries.
_SIMILAR = {"16-true": "fp16-autocast", "bf16-true": "bf16-autocast", "no": "fp32"}


def policy(description: str | Mapping[str, Any]) -> PrecisionPolicy:
    """Return the policy that a preset's name, a line of text or a mapping describes.

    Text is a list of `key=value`, separated by commas, that may start with the name of a preset.
    Other keys are as in that preset, or as in `fp32`. The keys are `param`, `compute`,
    `autocast`, `reduce`, `accumulate`, `buffer`, `output`, `loss_scale`, `keep_fp32`
    (patterns separated by `|`), `cast_inputs`, `tf32`, `stochastic_rounding` and
    `name`; types are `fp32`, `bf16`, `fp16`. The keys `forward`, `grad` and `wgrad` take formats of
    the matrix products of linear layers (`e4m3`, `e5m2`, `e2m1`, `bf16`), `scaling` takes `tensor`,
    `row`, `block32` or `block16`, and `hp` takes patterns. A mapping has the same keys, and
    `preset`.

    Raises:
        ConfigError: If there is no such preset, key or value ("auto" needs a device, see
            `distmp.precision.resolve`), or the policy contradicts itself.

    Example:
        >>> policy("bf16,reduce=bf16,keep_fp32=norm|head").keep_fp32
        ('norm', 'head')
    """
    if isinstance(description, str):
        if description in PRESETS:
            return PRESETS[description]
        return _build(_split(description), default_name=description.strip())
    if isinstance(description, Mapping) and description:
        return _build(dict(description), default_name=None)
    problem = "use the name of a preset, a text such as 'bf16,reduce=bf16', or a mapping"
    raise ConfigError(SETTING, description, problem)


def as_text(described: PrecisionPolicy) -> str:
    """Return the line of text from which `policy` builds an equal policy.

    Raises:
        ConfigError: If the name of the policy is the text of another policy.
    """
    with contextlib.suppress(ConfigError):
        if policy(described.name) == described:
            return described.name
    is_word = {*",|="}.isdisjoint(described.name)
    problem = "is the text of another policy; use a word"
    require(is_word, f"{SETTING}.name", described.name, problem)
    changes = _changes(described) or ["preset=fp32"]
    return ",".join([f"name={described.name}", *changes])


def _changes(described: PrecisionPolicy) -> list[str]:
    """Return `key=value` for every field, except the name, that differs from `fp32`."""
    plain = PrecisionPolicy("fp32")
    return [
        f"{key}={_word(getattr(described, name))}"
        for key, name in FIELDS.items()
        if name != "name" and getattr(described, name) != getattr(plain, name)
    ]


def _split(text: str) -> dict[str, Any]:
    """Parse `preset,key=value,...`; values remain text."""
    items: dict[str, Any] = {}
    for index, part in enumerate(text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            if index > 0:
                raise ConfigError(SETTING, text, f"{key!r} lacks a value; write {key or 'key'}=...")
            key, value = "preset", key
        require(key not in items, SETTING, text, f"gives {key} twice")
        items[key] = value
    return items


def _build(items: dict[str, Any], default_name: str | None) -> PrecisionPolicy:
    if items.keys() == {"name"}:
        name = items["name"]
        problem = f"is only a label of an FP32 policy; use preset={name}"
        require(str(name) not in PRESETS, f"{SETTING}.name", name, problem)
    base = _preset(items.pop("preset", "fp32"))
    for key in items:
        if key not in FIELDS:
            problem = nearest(str(key), [*FIELDS, "preset"])
            raise ConfigError(f"{SETTING}.{key}", items[key], f"unknown key; {problem}")
    values = {FIELDS[key]: _value(key, value) for key, value in items.items()}
    if not values:
        return base
    built = replace(base, **({"name": default_name or base.name} | values))
    if default_name is None and "name" not in values:
        return replace(built, name=name_of(built))
    return built


def name_of(built: PrecisionPolicy) -> str:
    """Return the preset that a policy equals except for its name, or the text of its fields."""
    for preset in PRESETS.values():
        if replace(built, name=preset.name) == preset:
            return preset.name
    return ",".join(_changes(built))


def _preset(name: Any) -> PrecisionPolicy:
    problem = (
        "is resolved for a device by distmp.resolve and cannot be changed; name a preset to change "
        "something in it"
    )
    require(name != "auto", SETTING, name, problem)
    if not isinstance(name, str) or name not in PRESETS:
        word = str(name).removeprefix("fp")
        known = {**LIGHTNING_POLICIES, **_SIMILAR}
        advice = f"use {known[word]!r}, which trains FP32 weights" if word in known else None
        raise ConfigError(SETTING, name, advice or nearest(str(name), [*PRESETS, "auto"]))
    return PRESETS[name]


def _value(key: str, value: Any) -> Any:
    """Convert the value of a key to the type of its field; the policy checks it."""
    if value == "none" and key in ("buffer", "forward", "grad", "wgrad", "loss_scale"):
        return None
    if FIELDS[key].endswith("_dtype") and (key, value) != ("buffer", None):
        if not isinstance(value, str) or value not in _DTYPES:
            raise ConfigError(f"{SETTING}.{key}", value, nearest(str(value), DTYPE_WORDS))
        return _DTYPES[value]
    if key in ("autocast", "cast_inputs", "tf32", "stochastic_rounding"):
        return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value
    if key in ("keep_fp32", "hp"):
        if isinstance(value, str):
            return () if value in ("", "none") else tuple(value.split("|"))
        return tuple(value) if isinstance(value, list) else value
    if key == "loss_scale" and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value  # the policy refuses other words


def _word(value: Any) -> str:
    """Return a field's value as text."""
    if isinstance(value, tuple):
        return "|".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, torch.dtype):
        return dtype_word(value)
    return "none" if value is None else str(value)


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
LOW_PRECISION_CAPABILITY = {"tensor": FP8_CAPABILITY, "row": (9, 0)}


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
    device = as_device(device)
    if isinstance(requested, str) and requested == "auto":
        return _resolve_cuda(device) if device.type == "cuda" else _resolve_cpu(device)
    chosen = requested if isinstance(requested, PrecisionPolicy) else policy(requested)
    reason = "given" if chosen is requested else "configured"
    limit = _limit(chosen, device)
    return Resolution(chosen, f"{reason}; {limit}" if limit else reason)


def resolve_without_masters(requested: PolicyLike, device: torch.device) -> Resolution:
    """Resolve as `resolve` does, except that "auto" selects no policy with FP32 master weights."""
    found = resolve(requested, device)
    if requested != "auto" or not found.policy.has_masters:
        return found
    autocast = policy(f"{found.policy.name}-autocast")
    return Resolution(autocast, f"{found.reason}; there are no FP32 master weights here")


def as_device(device: torch.device | str) -> torch.device:
    """Return a device or its name as a device.

    Raises:
        ConfigError: If it is neither.
    """
    with contextlib.suppress(RuntimeError):
        if isinstance(device, torch.device | str):
            return torch.device(device)
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
    problem = "cannot be used here, because torch finds no GPU; use 'cpu'"
    require(torch.cuda.is_available(), "device", str(device), problem)
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
    if chosen.has_low_precision_matmuls and not computes_low_precision(
        chosen.scaling, chosen.forward_format, capability
    ):
        return f"{name} only emulates the matmuls of {chosen.name}, which is slow"
    if chosen.compute_dtype in SIXTEEN_BIT and chosen.compute_dtype not in native_dtypes(device):
        return f"{name} only emulates {dtype_name(chosen.compute_dtype)}, which is slow"
    return ""


def computes_low_precision(scaling: str, forward: str | None, capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability has a kernel for low-precision matmuls.

    No GPU has one for two matrices in e5m2, and some have none for inputs or weights in e5m2.
    """
    if forward == "e5m2":
        return False
    return scaling in LOW_PRECISION_CAPABILITY and capability >= LOW_PRECISION_CAPABILITY[scaling]


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def _cpu_features(features: tuple[str, ...]) -> list[str]:
    """Return which of the features the CPU has, according to `/proc/cpuinfo`."""
    try:
        with open("/proc/cpuinfo") as text:
            available = text.read().split()
    except OSError:  # not Linux: assume that they are missing, which is slow at worst
        return []
    return [feature for feature in features if feature in available]
