"""Describes the low-precision matmuls of a model, for messages and records."""

from __future__ import annotations

import logging
from typing import Any

import torch

from distmp.precision.policy import PrecisionPolicy
from distmp.quantization.layers import NarrowLayers
from distmp.quantization.linear import ProductFormats

logger = logging.getLogger("distmp")


def describe_formats(layers: NarrowLayers) -> str:
    """Return the formats of the policy, how products are computed, and which layers have them.

    Example: "forward e4m3, grad e5m2, wgrad e5m2, scaling tensor; 8 of 9 linear layers have
    low-precision matmuls, emulated; in the compute dtype: head (hp=head)".
    """
    return f"{_formats(layers.policy_formats)}; {layers.describe()}"


def formats_record(layers: NarrowLayers) -> dict[str, Any]:
    """Return what `describe_formats` says, as JSON values.

    Returns:
        "formats", a list of texts; "emulated"; "backend", how products are computed; "narrow", the
        names of the layers with low-precision matmuls; "wide", why each other linear layer stays in
        the compute dtype, by name.
    """
    return {
        "formats": [_formats(layers.policy_formats)],
        "emulated": layers.is_emulated,
        "backend": layers.backend,
        "narrow": [*layers.modules],
        "wide": dict(layers.wide),
    }


def log_formats(layers: NarrowLayers, policy: PrecisionPolicy, device: torch.device) -> None:
    """Log the formats of low-precision matmuls; a warning if a GPU emulates them.

    Args:
        layers: The layers with low-precision matmuls.
        policy: The policy.
        device: Device of the model.
    """
    slow = device.type != "cpu" and layers.is_emulated
    level = logging.WARNING if slow else logging.INFO
    logger.log(level, "precision %s: %s", policy.name, describe_formats(layers))


def _formats(formats: ProductFormats) -> str:
    products = ", ".join(
        f"{product} {getattr(formats, product) or 'bf16'}"
        for product in ("forward", "grad", "wgrad")
    )
    return f"{products}, scaling {formats.scaling}"
