"""Arguments for Hugging Face accelerate, built from a policy.

accelerate has one setting for precision, `mixed_precision`. It means autocast with DDP; autocast,
16-bit parameters and 16-bit reduction with FSDP1; and the latter two with FSDP2. These functions
set every field as the policy requires, or refuse the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from distmp.errors import ConfigError, nearest
from distmp.precision.builders import (
    cast_inputs_and_outputs,
    ddp_comm_hook,
    fsdp1_policy,
    fsdp2_policy,
    refuse_low_precision_matmuls,
)
from distmp.precision.keep import cast_buffers, keep_in_fp32, modules_in_fp32
from distmp.precision.policy import DTYPE_WORDS, PRESETS, SIXTEEN_BIT, PrecisionPolicy
from distmp.utils.dtypes import dtype_name

if TYPE_CHECKING:
    from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin

ACCELERATE_WORDS = {dtype: word for word, dtype in DTYPE_WORDS.items()} | {torch.float32: "no"}


# The policy for each value of accelerate's `mixed_precision`.
POLICIES = {"no": "fp32", "bf16": "bf16-autocast", "fp16": "fp16-autocast"}


def policy_of(word: str, setting: str = "mixed_precision") -> PrecisionPolicy:
    """Return the policy for a value of accelerate's `mixed_precision`; it has FP32 weights.

    Args:
        word: "no", "bf16" or "fp16".
        setting: Name of the setting, for the message.

    Raises:
        ConfigError: For other values, such as "fp8", which only distmp.Engine computes.
    """
    if word not in POLICIES:
        raise ConfigError(setting, word, nearest(word, POLICIES))
    return PRESETS[POLICIES[word]]


def mixed_precision(policy: PrecisionPolicy) -> str:
    """Return accelerate's `mixed_precision` for a policy: "no", "bf16" or "fp16".

    With "bf16" or "fp16" accelerate updates FP32 weights, which a pure policy does not have.

    Raises:
        ConfigError: If outputs have 16 bits, which accelerate casts to FP32, the loss is scaled for
            FP32 compute, which accelerate would not unscale, weights are rounded stochastically,
            which only the engine configures, or matrix products have fewer bits.
    """
    refuse_low_precision_matmuls(policy)
    if policy.stochastic_rounding:
        raise ConfigError(
            "precision.policy.stochastic_rounding",
            True,
            "applies to distmp.Engine; remove it here, and pass stochastic_rounding=True to "
            "distmp.optim.AdamW",
        )
    if not (policy.autocast or policy.has_masters):
        if policy.loss_scale is not None:
            raise ConfigError(
                "precision.policy.loss_scale",
                policy.loss_scale,
                "accelerate unscales gradients only for float16 compute; use reduce=fp32",
            )
        return "no"
    if policy.output_dtype != torch.float32:
        raise ConfigError(
            "precision.policy.output",
            policy.output_dtype,
            "accelerate returns outputs in float32; use output=fp32, and cast in your loss",
        )
    return ACCELERATE_WORDS[policy.compute_dtype]


def autocast_kwargs(policy: PrecisionPolicy) -> AutocastKwargs:
    """Return the handler that disables autocast for policies without it."""
    from accelerate.utils import AutocastKwargs

    return AutocastKwargs(enabled=policy.autocast)


def check_replicated(policy: PrecisionPolicy) -> None:
    """Refuse a policy with FP32 master weights or FP32 sums for 16-bit parameters.

    Raises:
        ConfigError: For such a policy; the message suggests another one.
    """
    refuse_low_precision_matmuls(policy)
    if policy.has_masters:
        raise ConfigError(
            "precision.policy",
            policy.name,
            f"has {dtype_name(policy.compute_dtype)} parameters and FP32 master weights, which"
            " accelerate supports only with FSDP; use a policy with autocast, an fsdp_plugin, or"
            " distmp.Engine",
        )
    ddp_comm_hook(policy)


def fsdp_plugin(
    policy: PrecisionPolicy,
    plugin: FullyShardedDataParallelPlugin | None = None,
    *,
    reduces_every_microbatch: bool = True,
) -> FullyShardedDataParallelPlugin:
    """Set the precision of a policy in a plugin, for FSDP1 and FSDP2.

    `prepare_to_shard` applies the parts that FSDP does not implement.

    Args:
        policy: The precision policy.
        plugin: Plugin with all other settings of FSDP; None uses accelerate's defaults and
            environment variables.
        reduces_every_microbatch: Whether gradients are reduced after each backward.

    Returns:
        The plugin, with the reduction dtype of the policy in place of accelerate's 16-bit default.

    Raises:
        ConfigError: If the plugin has another precision, or FSDP would sum microbatches in another
            dtype than the policy.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin() if plugin is None else plugin
    precision = fsdp2_policy(policy) if plugin.fsdp_version == 2 else fsdp1_policy(policy)
    given = plugin.mixed_precision_policy
    if given is not None and given != precision:
        raise ConfigError(
            "fsdp_plugin.mixed_precision_policy",
            given,
            f"the policy {policy.name} sets it to {precision}; remove it",
        )
    if not reduces_every_microbatch:
        _check_sums(policy, plugin.fsdp_version)
    if policy.casts_parameters and policy.keep_fp32:
        raise _cannot_keep(policy, ", ".join(policy.keep_fp32))
    plugin.mixed_precision_policy = precision
    return plugin


def prepare_to_shard(
    module: nn.Module, policy: PrecisionPolicy, device_type: str, *, mixed_dtypes: bool
) -> None:
    """Apply the parts of a policy that FSDP does not implement, before it shards a module.

    Args:
        module: The root module; changed in place.
        policy: The precision policy.
        device_type: Device type of the module: "cuda", "cpu".
        mixed_dtypes: Whether the parameters of a shard may have several dtypes, as in FSDP2.
            Frozen 16-bit parameters then keep their dtype if the policy computes in 16 bits. FSDP1
            needs one dtype.

    Raises:
        ConfigError: If the policy keeps modules in FP32 among 16-bit parameters: accelerate shards
            all modules in the same way; or if matrix products have fewer than 16 bits.
    """
    refuse_low_precision_matmuls(policy)
    if policy.casts_parameters and (kept := modules_in_fp32(module, policy)):
        raise _cannot_keep(policy, next(iter(kept)))
    keeps_frozen = mixed_dtypes and policy.compute_dtype in SIXTEEN_BIT
    for parameter in module.parameters():
        unchanged = keeps_frozen and parameter.dtype in SIXTEEN_BIT and not parameter.requires_grad
        if parameter.is_floating_point() and not unchanged:
            parameter.data = parameter.data.to(policy.param_dtype)
    cast_buffers(module, policy)
    keep_in_fp32(module, policy, device_type)
    cast_inputs_and_outputs(module, policy)


def _check_sums(policy: PrecisionPolicy, version: int) -> None:
    """Refuse to sum microbatches, before their reduction, in another dtype than the policy's."""
    unreduced = policy.reduce_dtype if version == 2 else policy.module_dtype
    if unreduced != policy.accumulate_dtype:
        raise ConfigError(
            "gradient_accumulation_plugin.sync_each_batch",
            False,
            f"FSDP{version} would sum microbatches in {dtype_name(unreduced)}, the policy "
            f"{policy.name} in {dtype_name(policy.accumulate_dtype)}; set it to True",
        )


def _cannot_keep(policy: PrecisionPolicy, what: str) -> ConfigError:
    return ConfigError(
        "precision.policy",
        policy.name,
        f"keeps {what} in FP32 among {dtype_name(policy.compute_dtype)} parameters, but accelerate "
        "shards all modules in the same way; use a policy with autocast, or distmp.Engine",
    )
