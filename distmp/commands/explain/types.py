"""The dtypes that a policy specifies for each group of modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from distmp.parallel.blocks import find_blocks, outermost
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision.keep import modules_in_fp32
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization.layers import product_formats
from distmp.quantization.selection import select

NO_MODULE = "(outside of modules)"


@dataclass(frozen=True)
class ModuleGroup:
    """Modules whose names differ only in numbers.

    Attributes:
        name: Their name, with `*` for numbers.
        modules: Number of modules.
        parameters: Number of elements of their own parameters; shared ones count once.
        stored: Dtype of the module's parameters, or of a rank's shards.
        updated: Dtype of the parameters that the optimizer updates.
        computed: Dtype of the inputs of operations; None if autocast selects it per operation.
        reduced: Communication dtype of gradients.
        accumulated: Dtype in which gradients of microbatches are summed.
        kept: Whether the modules run in FP32 under a 16-bit policy.
        low_precision: Formats of the operands of low-precision matmuls; empty without any.
    """

    name: str
    modules: int
    parameters: int
    stored: torch.dtype
    updated: torch.dtype
    computed: torch.dtype | None
    reduced: torch.dtype
    accumulated: torch.dtype
    kept: bool
    low_precision: tuple[str, ...] = ()


def group_name(name: str) -> str:
    """Return the name of a module with numbers replaced by `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def expected_groups(
    model: nn.Module, policy: PrecisionPolicy, strategy: str, wrap: Sequence[str] = ()
) -> list[ModuleGroup]:
    """Return the groups of modules that own parameters, in order of registration.

    Args:
        model: The model before a strategy changes it; its values do not matter.
        policy: The resolved policy.
        strategy: The resolved strategy.
        wrap: Patterns of the model's blocks, see `distmp.parallel.blocks.find_blocks`.

    Raises:
        ConfigError: If the policy has low-precision matmuls and does not fit the model.
    """
    low_precision = _low_precision_modules(model, policy, wrap)
    kept = {id(part) for top in modules_in_fp32(model, policy).values() for part in top.modules()}
    groups: dict[tuple[str, bool, bool], ModuleGroup] = {}
    counted: set[int] = set()
    for name, part in model.named_modules():
        own = [value for value in part.parameters(recurse=False) if id(value) not in counted]
        if not own:
            continue
        counted.update(map(id, own))
        key = (group_name(name) or type(part).__name__, id(part) in kept, id(part) in low_precision)
        group = groups.get(key) or _group(*key, part, policy, strategy)
        count = sum(value.numel() for value in own)
        groups[key] = replace(group, modules=group.modules + 1, parameters=group.parameters + count)
    return list(groups.values())


def _low_precision_modules(
    model: nn.Module, policy: PrecisionPolicy, wrap: Sequence[str]
) -> set[int]:
    """Return the `id` of each linear layer with low-precision matmuls."""
    if not policy.has_low_precision_matmuls:
        return set()
    selection = select(model, policy, [*outermost(find_blocks(model, wrap))])
    return {id(part) for part in selection.low_precision.values()}


def _group(
    name: str,
    kept: bool,
    low_precision: bool,
    part: nn.Module,
    policy: PrecisionPolicy,
    strategy: str,
) -> ModuleGroup:
    fp32 = torch.float32
    sharded = strategy in SHARDED_STRATEGIES
    updated = fp32 if kept else policy.param_dtype
    # The optimizer updates FSDP's shards, which are cast when they are gathered.
    held = policy.param_dtype if sharded else policy.module_dtype
    own = [*part.parameters(recurse=False)]
    if sharded and not any(value.requires_grad for value in own):
        held = own[0].dtype  # frozen shards keep it
    # FSDP2 has a communication dtype per group; flat buckets have one for all.
    reduces_in_fp32 = kept and sharded
    return ModuleGroup(
        name=name,
        modules=0,
        parameters=0,
        stored=fp32 if kept else held,
        updated=updated,
        computed=fp32 if kept else _computed(part, policy),
        reduced=fp32 if reduces_in_fp32 else policy.reduce_dtype,
        accumulated=policy.accumulate_dtype,
        kept=kept,
        low_precision=_operand_formats(policy) if low_precision else (),
    )


def _operand_formats(policy: PrecisionPolicy) -> tuple[str, ...]:
    formats = product_formats(policy)
    return tuple(sorted({formats.operand, *filter(None, (formats.grad, formats.wgrad))}))


def _computed(part: nn.Module, policy: PrecisionPolicy) -> torch.dtype | None:
    multiplies = any(value.dim() >= 2 for value in part.parameters(recurse=False))
    if policy.autocast and (isinstance(part, nn.Embedding) or not multiplies):
        return None
    return policy.compute_dtype
