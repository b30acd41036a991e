"""What a policy promises for each group of modules: in which type what is done with it."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import nn

from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision.keep import modules_in_fp32
from distmp.precision.policy import PrecisionPolicy

NO_MODULE = "(outside of modules)"


class Group(NamedTuple):
    """Modules that are alike but for the numbers in their names.

    Attributes:
        name: Their name, with `*` for numbers.
        modules: How many.
        parameters: Elements of all their own parameters, of those that are shared only once.
        stored: The type in which the module holds parameters, or a rank its shards of them.
        stepped: The type of what the optimizer steps.
        computed: The type of the inputs of matrix products and of everything else; None where
            autocast chooses by the operation.
        reduced: The type in which gradients travel.
        accumulated: The type in which gradients of microbatches are summed.
        kept: Whether it runs in FP32 under a policy with 16 bits.
    """

    name: str
    modules: int
    parameters: int
    stored: torch.dtype
    stepped: torch.dtype
    computed: torch.dtype | None
    reduced: torch.dtype
    accumulated: torch.dtype
    kept: bool


def group_name(name: str) -> str:
    """Return the name of a module with `*` in place of numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def promised(model: nn.Module, policy: PrecisionPolicy, strategy: str) -> list[Group]:
    """Return the groups of modules that have parameters of their own, in order of registration.

    Args:
        model: The model as it is built, before a strategy changes it; values do not matter.
        policy: The policy, resolved.
        strategy: The strategy, resolved.
    """
    kept = {id(part) for top in modules_in_fp32(model, policy).values() for part in top.modules()}
    groups: dict[tuple[str, bool], Group] = {}
    counted: set[int] = set()
    for name, part in model.named_modules():
        own = [value for value in part.parameters(recurse=False) if id(value) not in counted]
        if not own:
            continue
        counted.update(map(id, own))
        key = (group_name(name) or type(part).__name__, id(part) in kept)
        group = groups.get(key) or _group(*key, part, policy, strategy)
        count = sum(value.numel() for value in own)
        groups[key] = group._replace(modules=group.modules + 1, parameters=group.parameters + count)
    return list(groups.values())


def _group(name: str, kept: bool, part: nn.Module, policy: PrecisionPolicy, strategy: str) -> Group:
    fp32 = torch.float32
    sharded = strategy in SHARDED_STRATEGIES
    stepped = fp32 if kept else policy.param_dtype
    # FSDP's shards are what the optimizer steps; they are cast when they are gathered.
    held = policy.param_dtype if sharded else policy.module_dtype
    # One group of FSDP2 has one type on the wire; flat buckets and FSDP1's hook have one for all.
    own_wire = kept and strategy in ("fsdp", "hsdp")
    return Group(
        name=name,
        modules=0,
        parameters=0,
        stored=fp32 if kept else held,
        stepped=stepped,
        computed=fp32 if kept else _computed(part, policy),
        reduced=fp32 if own_wire else policy.reduce_dtype,
        accumulated=policy.accumulate_dtype,
        kept=kept,
    )


def _computed(part: nn.Module, policy: PrecisionPolicy) -> torch.dtype | None:
    multiplies = any(value.dim() >= 2 for value in part.parameters(recurse=False))
    if policy.autocast and (isinstance(part, nn.Embedding) or not multiplies):
        return None
    return policy.compute_dtype
