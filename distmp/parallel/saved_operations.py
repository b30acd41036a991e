"""Operations whose results activation checkpointing keeps instead of recomputing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distmp.errors import ConfigError, nearest

SETTING = "activation_checkpointing.save"
OPERATIONS = {
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
}
"""Operators of torch, by the names of the setting."""


def operators(names: Sequence[str]) -> list[Any]:
    """Return all overloads of the operators that names select.

    Args:
        names: Keys of `OPERATIONS`, or names of operators of torch, such as `aten.mm`.

    Raises:
        ConfigError: If there is no such operation.
    """
    single = [part for name in names for part in OPERATIONS.get(name, (name,))]
    return [overload for name in single for overload in _overloads(name)]


def _overloads(name: str) -> list[Any]:
    namespace, _, operator = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operator)
        return [getattr(packet, overload) for overload in packet.overloads()]
    except (AttributeError, RuntimeError, ValueError):
        problem = f"{nearest(name, OPERATIONS)}, or name an operator of torch, such as aten.mm"
        raise ConfigError(SETTING, name, problem) from None
