"""Selects the linear layers of a model with low-precision matmuls."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from distmp.errors import ConfigError, require
from distmp.precision.keep import matching_modules, modules_in_fp32, with_submodules
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization.operands import BLOCK_SIZES

# `first2` and `last15%`: the layers in the first or last blocks of the model.
_BLOCKS = re.compile(r"(first|last)(\d+)(%?)")
# GPU kernels of FP8 products need feature counts that are multiples of this.
_MULTIPLE = 16
# Words of `hp` that may match nothing.
OPTIONAL = ("head", "embedding")


class Selection(NamedTuple):
    """The linear layers of a model.

    Attributes:
        low_precision: Layers with low-precision matmuls, by name.
        high_precision: Why each other linear layer stays in the compute dtype, by name.
    """

    low_precision: dict[str, nn.Linear]
    high_precision: dict[str, str]


def select(model: nn.Module, policy: PrecisionPolicy, blocks: Sequence[str]) -> Selection:
    """Return which linear layers have low-precision matmuls under a policy, and why others do not.

    Args:
        model: The model.
        policy: A policy with low-precision formats.
        blocks: Names of the model's blocks, in order.

    Raises:
        ConfigError: If a pattern of the policy matches nothing or the whole model, or no layer is
            suitable.
    """
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    in_fp32 = with_submodules(modules_in_fp32(model, policy).values())
    reasons = _unsuitable(model, linear, policy)
    reasons |= {name: "keep_fp32" for name, part in linear.items() if id(part) in in_fp32}
    for pattern in policy.hp:
        for name in _matched(model, linear, pattern, blocks):
            reasons.setdefault(name, f"hp={pattern}")
    low_precision = {name: part for name, part in linear.items() if name not in reasons}
    if not low_precision:
        problem = f"gives no linear layer low-precision matmuls; {_why(reasons)}"
        raise ConfigError("precision.policy", policy.name, problem)
    return Selection(low_precision, {name: reasons[name] for name in linear if name in reasons})


def _why(reasons: dict[str, str]) -> str:
    if not reasons:
        return "the model has no nn.Linear; use bf16"
    name, reason = next(iter(reasons.items()))
    example = f"for example {name!r} stays in the compute dtype because of {reason}"
    return f"{example}; use bf16, or change hp"


def _unsuitable(
    model: nn.Module, linear: Mapping[str, nn.Linear], policy: PrecisionPolicy
) -> dict[str, str]:
    multiple = max(_MULTIPLE, BLOCK_SIZES.get(policy.scaling, 1))
    attention = (part for part in model.modules() if isinstance(part, nn.MultiheadAttention))
    called_by_parent = with_submodules(attention)
    reasons = {}
    for name, part in linear.items():
        if id(part) in called_by_parent:
            reasons[name] = "nn.MultiheadAttention, which uses its weights without calling it"
        elif type(part).forward is not nn.Linear.forward or "forward" in vars(part):
            reasons[name] = f"a forward of its own ({type(part).__name__})"
        elif part.in_features % multiple or part.out_features % multiple:
            sizes = f"{part.in_features} -> {part.out_features}"
            reasons[name] = f"its features, {sizes}, which are not multiples of {multiple}"
    return reasons


def _matched(
    model: nn.Module, linear: Mapping[str, nn.Linear], pattern: str, blocks: Sequence[str]
) -> list[str]:
    """Return the names of the linear layers that a pattern of `hp` matches."""
    tops: Sequence[str]
    if found := _BLOCKS.fullmatch(pattern):
        tops = _some_blocks(pattern, *found.groups(), blocks=blocks)
    elif pattern == "embedding":
        tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        return [name for name, part in linear.items() if id(part.weight) in tables]
    else:
        optional = pattern in OPTIONAL
        tops = [*matching_modules(model, pattern, "precision.policy.hp", optional=optional)]
        problem = "keeps the whole model in the compute dtype; use bf16"
        require("" not in tops or optional, "precision.policy.hp", pattern, problem)
    return [name for name in linear if any(f"{name}.".startswith(f"{top}.") for top in tops)]


def _some_blocks(
    pattern: str, which: str, number: str, percent: str, *, blocks: Sequence[str]
) -> Sequence[str]:
    """Return the first or last blocks; a percentage is rounded up to whole blocks."""
    count = math.ceil(int(number) * len(blocks) / 100) if percent else int(number)
    if not blocks:
        problem = (
            "the model has neither a module list nor _no_split_modules, so its blocks are unknown; "
            "name them in sharding.wrap, or set hp without this pattern, as in hp=head|embedding"
        )
    elif count == 0:
        problem = "selects no block; use 1 or more"
    elif count > len(blocks):
        problem = f"the model has {len(blocks)} blocks"
    else:
        return blocks[:count] if which == "first" else blocks[len(blocks) - count :]
    raise ConfigError("precision.policy.hp", pattern, problem)
