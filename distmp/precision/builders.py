"""torch's own precision objects, built from a policy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.precision.keep import floating_point_cast
from distmp.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def autocast_context(
    policy: PrecisionPolicy, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which forward runs: autocast if the policy asks for it, or nothing."""
    if not policy.autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=policy.compute_dtype)


def fsdp2_policy(policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy for `fully_shard`: FP32 shards, FP32 reduction, compute as the policy says.

    With autocast FSDP gathers FP32 parameters, and `autocast_context` does the rest.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not policy.casts_parameters:
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy(
        param_dtype=policy.compute_dtype,
        reduce_dtype=torch.float32,
        # The root module casts its inputs and outputs once (`cast_inputs_and_outputs`); between
        # blocks nothing is cast, so that a block gets what it gets without sharding.
        output_dtype=None,
        cast_forward_inputs=False,
    )


def cast_inputs_and_outputs(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Make `module` cast floating-point inputs to the compute type and outputs to the output type.

    Inputs are cast only where the module holds 16-bit parameters; autocast casts by itself.
    """
    if policy.casts_parameters:
        to_compute = floating_point_cast(policy.compute_dtype)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (
                pytree.tree_map_only(Tensor, to_compute, args),
                pytree.tree_map_only(Tensor, to_compute, kwargs),
            ),
            with_kwargs=True,
        )
    to_output = floating_point_cast(policy.output_dtype)
    module.register_forward_hook(
        lambda _, args, output: pytree.tree_map_only(Tensor, to_output, output)
    )
