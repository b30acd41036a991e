"""Builds torch's precision objects from a policy, or refuses it with the reason.

Example:
    >>> import torch, distmp
    >>> from distmp.precision.builders import autocast_context, fsdp2_policy
    >>> fsdp2_policy(distmp.policy("bf16")).reduce_dtype
    torch.float32
    >>> with autocast_context(distmp.policy("bf16-autocast"), torch.device("cpu")):
    ...     print(torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype)
    torch.bfloat16
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from distmp.errors import ConfigError, require
from distmp.precision import keep
from distmp.precision.functions import functions_in_fp32
from distmp.precision.notation import as_device, name_of
from distmp.precision.policy import SIXTEEN_BIT, PrecisionPolicy, dtype_word
from distmp.utils.dtypes import dtype_name, is_dtensor
from distmp.utils.tensor_trees import refuse_shared_memory

logger = logging.getLogger("distmp")

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

# By frozen parameter, the hook that refuses its gradient because DDP does not reduce it.
_unreduced = WeakTensorKeyDictionary()

# Called with DDP's state (the process group) and a bucket; see torch's `register_comm_hook`.
CommHook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def autocast_context(
    policy: PrecisionPolicy, device: torch.device | str
) -> contextlib.AbstractContextManager[Any]:
    """Return the context for forward: autocast if the policy uses it, otherwise a null context.

    Raises:
        ConfigError: If matrix products of the policy have fewer than 16 bits, or there is no such
            device.
    """
    refuse_low_precision_matmuls(policy)
    return autocast_of_dtypes(policy, as_device(device))


def autocast_of_dtypes(
    policy: PrecisionPolicy, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of `autocast_context`, also for policies with low-precision matmuls.

    Autocast's cache would give all uses of a weight the same cast, in whose dtype autograd would
    add their gradients. After a forward without gradients it has casts without a graph of the
    parameters that FSDP2 gathered: a second forward in the same loss function would give them no
    gradient.
    """
    if not policy.autocast:
        return functions_in_fp32(policy.kept_functions)
    return torch.autocast(device.type, dtype=policy.compute_dtype, cache_enabled=False)


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables an autocast of the caller.

    The policy defines all casts, and under autocast backward would cast, too.
    """
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def fsdp2_policy(policy: PrecisionPolicy, *, own_accumulator: bool = False) -> MixedPrecisionPolicy:
    """Return the policy for `fully_shard`: the dtypes of all-gather and reduce-scatter.

    Shards have the `param_dtype` of the policy. With autocast FSDP gathers FP32 parameters, and
    `autocast_context` casts. The rest is applied outside of FSDP: `keep_in_fp32` (with
    `fsdp2_policy` of an FP32 policy for the kept modules), `cast_buffers`, and
    `cast_inputs_and_outputs` on the root module. Nothing is cast between blocks, so a block gets
    the same inputs as without sharding.

    FSDP sums microbatches in the shards if each one is reduced, and in `reduce_dtype` if only the
    last one is. With a 16-bit communication dtype reduce each one.

    Args:
        policy: The policy.
        own_accumulator: Whether the caller takes the gradient of every microbatch from FSDP and
            sums them in `accumulate_dtype` itself.

    Raises:
        ConfigError: If FSDP would sum microbatches in another dtype than the policy, or matrix
            products of the policy have fewer than 16 bits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    refuse_low_precision_matmuls(policy)
    if not own_accumulator:
        _check_shards_accumulate("FSDP2", policy)
    return MixedPrecisionPolicy(
        param_dtype=policy.compute_dtype if policy.casts_parameters else None,
        reduce_dtype=policy.reduce_dtype,
        cast_forward_inputs=False,
    )


def fsdp1_policy(policy: PrecisionPolicy) -> MixedPrecision:
    """Return the policy for `FullyShardedDataParallel`; see `fsdp2_policy`.

    FSDP1 sums microbatches in the shards if each one is reduced, and under `no_sync` in the compute
    dtype: do not use `no_sync` with 16-bit parameters. Its exception for batch norms is disabled.
    Wrap each module that `keep_in_fp32` returns with `fsdp1_policy` of an FP32 policy before you
    wrap the model: FSDP1 gathers all parameters of a unit in one dtype.

    Raises:
        ConfigError: If FSDP would sum microbatches in another dtype than the policy, or matrix
            products of the policy have fewer than 16 bits.
    """
    from torch.distributed.fsdp import MixedPrecision

    refuse_low_precision_matmuls(policy)
    _check_shards_accumulate("FSDP1", policy)
    return MixedPrecision(
        param_dtype=policy.compute_dtype if policy.casts_parameters else None,
        reduce_dtype=policy.reduce_dtype,
        buffer_dtype=policy.buffer_dtype,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(),
    )


def _check_shards_accumulate(target: str, policy: PrecisionPolicy) -> None:
    problem = (
        f"sums microbatches in {dtype_name(policy.accumulate_dtype)}, but {target} "
        f"gives gradients the dtype of their shard, {dtype_name(policy.param_dtype)}; use "
        f"accumulate={dtype_word(policy.param_dtype)}, or param=fp32"
    )
    accumulates = policy.accumulate_dtype == policy.param_dtype
    require(accumulates, "precision.policy", policy.name, problem)


def ddp_comm_hook(policy: PrecisionPolicy) -> CommHook | None:
    """Return the communication hook for `DistributedDataParallel`; None for DDP's default.

    DDP sums microbatches and averages `.grad` in the dtype of the parameter. Call `prepare` on the
    module first. The hook then averages gradients in `reduce_dtype`.

    Raises:
        ConfigError: If DDP would sum microbatches in another dtype than the policy, or matrix
            products of the policy have fewer than 16 bits.
    """
    refuse_low_precision_matmuls(policy)
    problem = (
        f"sums microbatches in {dtype_name(policy.accumulate_dtype)}, but "
        f"DistributedDataParallel sums them in the {dtype_name(policy.module_dtype)} of the "
        f"parameters; use accumulate={dtype_word(policy.module_dtype)}, a policy with autocast,"
        " or distmp.Engine"
    )
    accumulates = policy.accumulate_dtype == policy.module_dtype
    require(accumulates, "precision.policy", policy.name, problem)
    one_dtype = not (policy.casts_parameters and policy.keep_fp32)
    if policy.reduce_dtype == policy.module_dtype and one_dtype:
        return None
    return _averaging_hook(policy.reduce_dtype)


def _averaging_hook(dtype: torch.dtype) -> CommHook:
    def average(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        group = dist.group.WORLD if group is None else group
        gradients = bucket.buffer()
        # Divided in FP32, and before the cast: a sum of many ranks may not fit into 16 bits.
        reduced = gradients.to(torch.float32).div_(group.size()).to(dtype)
        work = dist.all_reduce(reduced, group=group, async_op=True)
        assert work is not None  # None means that this rank is not in the group
        return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))

    # DDP accepts its annotation of the bucket only as a type, not as text; a lambda has none.
    return lambda group, bucket: average(group, bucket)


def refuse_low_precision_matmuls(policy: PrecisionPolicy) -> None:
    """Refuse a policy with matrix products of fewer than 16 bits, which only the engine computes.

    Raises:
        ConfigError: For such a policy.
    """
    if policy.has_low_precision_matmuls:
        problem = (
            "has matrix products with fewer than 16 bits, which only distmp.Engine and the trainer "
            f"compute; use one of them, or here {name_of(policy.high_precision)!r}"
        )
        raise ConfigError("precision.policy", policy.name, problem)


def prepare(module: nn.Module, policy: PrecisionPolicy, device: torch.device | str) -> None:
    """Apply a policy to a module on one device: parameters, buffers, inputs, compute and outputs.

    Run its forward in `autocast_context`. `distmp.Engine` implements the parts of the optimizer:
    master weights, loss scale and the sums of microbatches.

    Args:
        module: The root module; changed in place.
        policy: The precision policy.
        device: Device of the module, or its type: "cuda", "cpu".

    Raises:
        ConfigError: If `keep_fp32` does not fit the module, matrix products of the policy have
            fewer than 16 bits, there is no such device, or a conversion would separate parameters
            that share memory.
    """
    refuse_low_precision_matmuls(policy)
    device_type = as_device(device).type
    convert_parameters(module, policy, quiet=True)
    keep.cast_buffers(module, policy)
    keep.keep_in_fp32(module, policy, device_type)
    cast_inputs_and_outputs(module, policy)


def convert_parameters(
    module: nn.Module, policy: PrecisionPolicy, hint: str = "", *, quiet: bool = False
) -> None:
    """Convert parameters to the dtypes of a policy, and log which ones become FP32 weights.

    A 16-bit parameter that is frozen stays so under a policy with FP32 parameters, and the backward
    that computes its gradient later, after it was unfrozen, raises a `ConfigError`, unless it was
    copied or sharded in between.

    Args:
        module: The root module; changed in place.
        policy: The precision policy.
        hint: What the message ends with.
        quiet: Do not log, because another rank does.

    Raises:
        ConfigError: If a conversion would separate parameters that share memory.
    """
    dtypes = keep.storage_dtypes(module, policy)
    converted = []
    for name, parameter in module.named_parameters():
        if parameter.dtype != dtypes[name]:
            converted.append((name, parameter))
        elif parameter.dtype in SIXTEEN_BIT and not policy.casts_parameters:
            _refuse_gradient(parameter, partial(_refuse_16_bit_weight, name))
    if not converted:
        return
    refuse_shared_memory(module, "precision.policy", policy.name)
    if not quiet:
        name, parameter = converted[0]
        first, count = f"{name!r} was {dtype_name(parameter.dtype)}", len(converted)
        problem = "the policy %s trains FP32 weights: %d parameters become float32 (%s)%s"
        logger.warning(problem, policy.name, count, first, hint)
    for name, parameter in converted:
        parameter.data = parameter.data.to(dtypes[name])


def refuse_unfreezing(module: nn.Module) -> None:
    """Refuse later gradients of parameters that are frozen when DDP wraps a module on many ranks.

    DDP does not reduce them. The backward that computes one raises a `ConfigError`, unless the
    parameter was copied or sharded, or this function was called again after it was unfrozen.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    sharded = any(is_dtensor(parameter) for parameter in module.parameters())
    wraps = dist.is_initialized() and dist.get_world_size() > 1 and not sharded
    for name, parameter in module.named_parameters():
        if former := _unreduced.pop(parameter, None):
            former.remove()
        # Quantized weights are integers, which have no gradients.
        frozen = parameter.is_floating_point() and not parameter.requires_grad
        if wraps and frozen and name not in ignored:
            _unreduced[parameter] = _refuse_gradient(parameter, partial(_refuse_unreduced, name))


def _refuse_gradient(
    parameter: nn.Parameter, refuse: Callable[[Tensor], None]
) -> RemovableHandle | None:
    """Refuse the gradient of a frozen parameter, in the backward that computes it."""
    if parameter.is_inference():  # it cannot be trained
        return None
    parameter.requires_grad_(True)  # otherwise torch refuses hooks
    handle = parameter.register_post_accumulate_grad_hook(refuse)
    parameter.requires_grad_(False)
    return handle


def _refuse_unreduced(name: str, _: Tensor) -> None:
    problem = (
        "was frozen when DDP wrapped the model, so its gradient is not reduced over ranks; unfreeze"
        " it before prepare, setup or fit, or call that again with the unwrapped model (in"
        " Transformers, create a new Trainer)"
    )
    raise ConfigError("model", name, problem)


def _refuse_16_bit_weight(name: str, parameter: Tensor) -> None:
    problem = (
        f"is {dtype_name(parameter.dtype)}, because it was frozen when the policy was applied, but "
        "the policy trains float32 weights; call float() on its module before that"
    )
    require(parameter.dtype not in SIXTEEN_BIT, "model", name, problem)


def cast_inputs_and_outputs(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Register hooks that cast floating-point inputs and outputs of `module`.

    Inputs are cast to the dtype of the parameters (autocast casts further inside), outputs to
    `output_dtype`.
    """
    if policy.cast_inputs:
        keep.cast_inputs(module, policy.module_dtype)
    keep.cast_outputs(module, policy.output_dtype)
