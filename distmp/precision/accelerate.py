"""What Hugging Face accelerate needs to be told, built from a policy.

accelerate knows one word for precision, `mixed_precision`, and lets it mean autocast with DDP,
autocast and 16-bit parameters and a 16-bit reduction with FSDP1, and the latter two with FSDP2.
These functions say instead what the policy means, each field, or refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distmp.errors import ConfigError
from distmp.precision.builders import fsdp2_policy
from distmp.precision.policy import PrecisionPolicy, dtype_name

if TYPE_CHECKING:
    from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecision

_MIXED_PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


def mixed_precision(policy: PrecisionPolicy) -> str:
    """Return accelerate's word for the compute type: "no", "bf16" or "fp16".

    Raises:
        ConfigError: If outputs are to be in 16 bits, which accelerate always widens.
    """
    if policy.output_dtype != torch.float32:
        raise ConfigError(
            "precision.output_dtype",
            dtype_name(policy.output_dtype),
            "accelerate returns outputs in float32; leave it at float32, and cast in your loss",
        )
    return _MIXED_PRECISION[policy.compute_dtype]


def autocast_kwargs(policy: PrecisionPolicy) -> AutocastKwargs:
    """Return the handler that keeps autocast off where FSDP casts the parameters."""
    from accelerate.utils import AutocastKwargs

    return AutocastKwargs(enabled=policy.autocast)


def check_replicated(policy: PrecisionPolicy) -> None:
    """Refuse a policy that needs FP32 master weights beside 16-bit parameters.

    Raises:
        ConfigError: With the policy to use instead.
    """
    if policy.casts_parameters:
        raise ConfigError(
            "precision.policy",
            policy.name,
            f"holds {dtype_name(policy.compute_dtype)} parameters beside FP32 master weights, which"
            f" accelerate has only with FSDP; use {policy.name}-autocast, an fsdp_plugin, or"
            " distmp.Engine",
        )


def fsdp_plugin(
    policy: PrecisionPolicy,
    plugin: FullyShardedDataParallelPlugin | None = None,
    *,
    reduces_every_microbatch: bool = True,
) -> FullyShardedDataParallelPlugin:
    """Complete a plugin with the precision of a policy, for both versions of FSDP.

    Args:
        policy: What is stored, computed and reduced in which type.
        plugin: Everything else about FSDP; None takes accelerate's defaults and environment.
        reduces_every_microbatch: Whether gradients are reduced after each backward.

    Returns:
        The plugin: FP32 shards and FP32 reduction, never accelerate's 16-bit default.

    Raises:
        ConfigError: If the plugin has another precision already, or FSDP1 would accumulate
            gradients in 16 bits.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin() if plugin is None else plugin
    wanted = fsdp2_policy(policy) if plugin.fsdp_version == 2 else fsdp1_mixed_precision(policy)
    given = plugin.mixed_precision_policy
    if given is not None and given != wanted:
        raise ConfigError(
            "fsdp_plugin.mixed_precision_policy",
            given,
            f"the policy {policy.name} makes it {wanted}; leave it out",
        )
    if plugin.fsdp_version == 1 and policy.casts_parameters and not reduces_every_microbatch:
        raise ConfigError(
            "gradient_accumulation_plugin.sync_each_batch",
            False,
            f"FSDP1 would add microbatches up in {dtype_name(policy.compute_dtype)}; set it to "
            f"True, fsdp_version to 2, or use {policy.name}-autocast",
        )
    plugin.mixed_precision_policy = wanted
    return plugin


def fsdp1_mixed_precision(policy: PrecisionPolicy) -> MixedPrecision:
    """Return the `mixed_precision` of FSDP1: FP32 flat parameters and FP32 reduction."""
    from torch.distributed.fsdp import MixedPrecision

    casts: dict[str, Any] = {}
    if policy.casts_parameters:
        casts = {"param_dtype": policy.compute_dtype, "buffer_dtype": policy.compute_dtype}
    return MixedPrecision(reduce_dtype=torch.float32, **casts)
