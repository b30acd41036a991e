"""Corrects the reduce dtype of FSDP2 for modules that `parallelize_module` made tensor-parallel."""

from __future__ import annotations

from torch import nn

from distmp.errors import ConfigError
from distmp.parallel import fsdp_internals


def apply_reduce_dtype(module: nn.Module) -> None:
    """Make FSDP2 reduce gradients over tensor-parallel ranks in the policy's `reduce_dtype`.

    Tensor-parallel ranks hold partial sums of the gradient of a parameter that they replicate,
    such as a norm weight under sequence parallelism. FSDP2 of torch 2.13 adds them in the dtype of
    the gradient; only over data-parallel ranks it uses `MixedPrecisionPolicy.reduce_dtype`
    (pytorch#190626). Call this function once, after `fully_shard` and before training. Blocks with
    such parameters then need memory for their gathered gradients in the reduce dtype, one block at
    a time.

    Args:
        module: A module to which `fully_shard` was applied, with a policy that has a
            `reduce_dtype`.

    Raises:
        ConfigError: If no part of the module has such a policy.
        SetupError: If this version of torch is not supported.
    """
    if not fsdp_internals.reduce_partial_in_reduce_dtype(module):
        raise ConfigError(
            "module",
            type(module).__name__,
            "has no reduce dtype to apply; call fully_shard() first, with "
            "mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)",
        )
