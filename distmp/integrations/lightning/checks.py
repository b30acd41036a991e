"""Refuses policies and models whose numerics Lightning's strategies would silently change."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distmp.errors import ConfigError
from distmp.parallel.fsdp_internals import fsdp2_policies
from distmp.parallel.strategy import check_parameters
from distmp.precision import PolicyLike, PrecisionPolicy, Resolution, policy, resolve
from distmp.precision.builders import refuse_narrow
from distmp.precision.keep import cast_buffers, keep_in_fp32, storage_dtypes
from distmp.precision.notation import LIGHTNING_POLICIES
from distmp.precision.policy import dtype_word
from distmp.scaling import LossScaleConfig, loss_scale_rules, unused_rules
from distmp.utils.dtensor import is_dtensor
from distmp.utils.dtypes import dtype_name

logger = logging.getLogger("distmp")


def resolved(requested: PolicyLike, device: torch.device) -> Resolution:
    """Return the policy for a distmp policy, a name of Lightning, or "auto".

    Raises:
        ConfigError: If no strategy of Lightning implements it.
    """
    name = LIGHTNING_POLICIES.get(requested, requested) if isinstance(requested, str) else requested
    resolution = resolve(name, device)
    if name == "auto" and resolution.policy.has_masters:
        resolution = Resolution(policy(f"{resolution.policy.name}-autocast"), resolution.reason)
    refuse_narrow(resolution.policy)
    check_policy(resolution.policy)
    return resolution


def scale_rules(policy: PrecisionPolicy, given: LossScaleConfig | None) -> LossScaleConfig | None:
    """Return the rules of the loss scale; warn about given ones that have no effect.

    Raises:
        ConfigError: If policy and rules name two different scales.
    """
    unused = unused_rules(policy.loss_scale, given)
    if unused:
        logger.warning("precision %s: %s", policy.name, unused)
    return loss_scale_rules(policy.loss_scale, given)


def check_policy(policy: PrecisionPolicy) -> None:
    """Refuse fields of a policy that no strategy of Lightning implements.

    Raises:
        ConfigError: Naming the field.
    """
    if policy.param_dtype != torch.float32:
        problem = "has no FP32 weights, and Lightning would sum its gradients in 16 bits"
    elif policy.reduce_dtype != torch.float32:
        problem = "reduces gradients in 16 bits; use reduce=fp32"
    elif policy.output_dtype != torch.float32:
        problem = "returns 16-bit outputs; use output=fp32, and cast in your loss"
    elif policy.casts_parameters and (policy.keep_fp32 or policy.buffer_dtype is not None):
        problem = "sets keep_fp32 or buffer for 16-bit parameters; set them with fully_shard"
    elif policy.loss_scale is not None and policy.compute_dtype != torch.float16:
        problem = "scales the loss although it does not compute in float16; remove loss_scale"
    else:
        return
    raise ConfigError("policy", policy.name, f"{problem}, or use distmp.Engine")


def prepare_module(module: nn.Module, policy: PrecisionPolicy, device_type: str) -> None:
    """Apply the policy to a module that Lightning has not wrapped yet; changed in place.

    Raises:
        ConfigError: If the policy cannot convert the module.
    """
    if policy.casts_parameters:
        return  # fully_shard does it; see `check_parallel`
    check_parameters(module, policy)
    if not any(is_dtensor(parameter) for parameter in module.parameters()):
        _store_in_fp32(module, policy)
    cast_buffers(module, policy)
    keep_in_fp32(module, policy, device_type)


def _store_in_fp32(module: nn.Module, policy: PrecisionPolicy) -> None:
    dtypes = storage_dtypes(module, policy)
    converted = []
    for name, parameter in module.named_parameters():
        if parameter.dtype != dtypes[name]:
            converted.append(f"{name!r} was {dtype_name(parameter.dtype)}")
            parameter.data = parameter.data.to(dtypes[name])
    if converted:
        logger.warning(
            "the policy %s trains FP32 weights: %d parameters become float32 (%s)",
            policy.name,
            len(converted),
            converted[0],
        )


def check_parallel(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Refuse a model whose parameters are gathered, reduced or stepped in other dtypes.

    Args:
        model: The model as Lightning's strategy trains it.
        policy: The policy of the plugin.

    Raises:
        ConfigError: Naming the policy of `fully_shard`, or the parameter.
    """
    refuse_deepspeed(model)
    if not any(isinstance(part, FSDPModule) for part in model.modules()):
        if policy.casts_parameters:
            raise ConfigError(
                "policy",
                policy.name,
                f"has {dtype_name(policy.compute_dtype)} parameters and FP32 master weights, which "
                f"need ModelParallelStrategy and fully_shard; use them, or "
                f"{dtype_word(policy.compute_dtype)}-autocast",
            )
        return
    _check_fsdp2_policies(model, policy)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_sharded(name, parameter)


def refuse_deepspeed(engine: object) -> None:
    """Refuse an engine of DeepSpeed in the place of a model or an optimizer.

    Raises:
        ConfigError: For such an engine.
    """
    if type(engine).__module__.startswith("deepspeed"):
        raise ConfigError(
            "strategy",
            "deepspeed",
            "it casts, reduces and scales on its own, so the policy and the scaler would not"
            " apply; use DDP or ModelParallelStrategy, or Lightning's own precision",
        )


def _check_fsdp2_policies(model: nn.Module, policy: PrecisionPolicy) -> None:
    wanted = policy.compute_dtype if policy.casts_parameters else torch.float32
    for given in fsdp2_policies(model):
        gathered = given.param_dtype or torch.float32
        reduced = given.reduce_dtype or gathered
        if (gathered, reduced) != (wanted, policy.reduce_dtype):
            raise ConfigError(
                "mp_policy",
                given,
                f"gathers {dtype_name(gathered)} and reduces in {dtype_name(reduced)}, but the "
                f"policy {policy.name} gathers {dtype_name(wanted)} and reduces in "
                f"{dtype_name(policy.reduce_dtype)}; call fully_shard(module, "
                f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype_name(wanted)}, "
                "reduce_dtype=torch.float32))",
            )


def _check_sharded(name: str, parameter: Tensor) -> None:
    if not is_dtensor(parameter):
        raise ConfigError(
            "model",
            name,
            "is not sharded although other parameters are, so its gradients are not averaged over "
            "ranks; call fully_shard on the module that holds all of them, too",
        )
    if parameter.dtype != torch.float32:
        raise ConfigError(
            "model",
            name,
            f"is sharded in {dtype_name(parameter.dtype)}, but the policy trains FP32 weights; "
            "call .float() on the model before fully_shard",
        )
