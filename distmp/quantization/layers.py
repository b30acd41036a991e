"""Replaces the matmuls of linear layers by low-precision ones, and holds their state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from distmp.errors import keys_by_value, listed
from distmp.precision.policy import PrecisionPolicy
from distmp.precision.stochastic import parameter_id
from distmp.quantization import linear
from distmp.quantization.operands import STATISTICS
from distmp.quantization.products import choose_product, emulated_product
from distmp.quantization.selection import Selection, select


class LowPrecisionLayers:
    """The linear layers of a model with low-precision matmuls.

    Args:
        selection: The layers.
        policy: The policy, with low-precision formats.
        device: Device of the model.

    Attributes:
        is_emulated: Whether products are emulated, which is slow.
        backend: How products are computed, such as "emulated".
        policy_formats: The formats of the policy.
        formats: The formats of the layers, which may change during the run.
        high_precision: Why each other linear layer stays in the compute dtype, by name.
        states: The state of each low-precision layer, by name.
        modules: The low-precision layers, by name.
        counts: Statistics of this step, FP64 of shape [layers, 5, 4]; see `OPERANDS` in
            `distmp.quantization.linear` and `STATISTICS` in `distmp.quantization.operands`.
    """

    def __init__(self, selection: Selection, policy: PrecisionPolicy, device: torch.device) -> None:
        product = choose_product(policy.scaling, policy.forward_format, device)
        self.is_emulated = product is emulated_product
        self.backend = "emulated" if self.is_emulated else "computed by torch._scaled_mm"
        self.high_precision = selection.high_precision
        self.modules = selection.low_precision
        shape = (len(selection.low_precision), len(linear.OPERANDS), len(STATISTICS))
        self.counts = torch.zeros(shape, dtype=torch.float64, device=device)
        salts = [parameter_id(f"{name}.weight") for name in self.modules]
        self._salts = torch.tensor(salts, dtype=torch.int64, device=device)
        self._keys = self._salts.clone()
        self.policy_formats = self.formats = product_formats(policy)
        self.states = {
            name: linear.LowPrecisionState(self.policy_formats, counts, key)
            for name, counts, key in zip(self.modules, self.counts, self._keys, strict=True)
        }
        for name, module in self.modules.items():
            _replace_forward(module, self.states[name], policy.compute_dtype)

    def begin_step(self) -> None:
        """Clear the statistics."""
        self.counts.zero_()

    def begin_microbatch(self, step: int, microbatch: int) -> None:
        """Derive new random numbers for stochastic rounding.

        Args:
            step: Number of the step in the run.
            microbatch: Index of the microbatch in the global batch.
        """
        mixed = (step * 0x9E3779B1 + microbatch * 0x85EBCA77) & 0xFFFFFFFF
        torch.bitwise_xor(self._salts, mixed, out=self._keys)

    def set_formats(self, formats: linear.ProductFormats) -> None:
        """Change the formats of all layers, between steps."""
        self.formats = formats
        for state in self.states.values():
            state.formats = formats

    def describe(self) -> str:
        """Return which layers have low-precision matmuls, and why others do not, as text."""
        reasons = keys_by_value(self.high_precision)
        count = f"{len(self.modules)} of {len(self.modules) + len(self.high_precision)}"
        text = f"{count} linear layers have low-precision matmuls, {self.backend}"
        others = [f"{listed(names)} ({reason})" for reason, names in reasons.items()]
        return f"{text}; in the compute dtype: {', '.join(others)}" if others else text


def low_precision_layers(
    model: nn.Module, policy: PrecisionPolicy, blocks: Sequence[str], device: torch.device
) -> LowPrecisionLayers | None:
    """Replace the matmuls of the linear layers of a model by low-precision ones, in place.

    Low-precision matmuls of an earlier engine are removed.

    Args:
        model: The model, before it is wrapped or sharded.
        policy: The policy.
        blocks: Names of the model's blocks, in order.
        device: Device of the model.

    Returns:
        The layers; None if the policy has no low-precision matmuls.

    Raises:
        ConfigError: See `distmp.quantization.selection.select`.
    """
    # The formats of an earlier engine of this model must not remain.
    _restore_forward(model)
    if not policy.has_low_precision_matmuls:
        return None
    # In evaluation, torch's encoder layers have a fast path that reads the weights of linear layers
    # without calling these, and their encoder makes nested tensors for it.
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            vars(part).update(use_nested_tensor=False, activation_relu_or_gelu=0)
    return LowPrecisionLayers(select(model, policy, blocks), policy, device)


def product_formats(policy: PrecisionPolicy) -> linear.ProductFormats:
    """Return the formats of the low-precision layers of a policy."""
    return linear.ProductFormats(
        policy.forward_format, policy.grad_format, policy.wgrad_format, policy.scaling
    )


def _replace_forward(
    module: nn.Linear, state: linear.LowPrecisionState, compute_dtype: torch.dtype
) -> None:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - the name of torch
        # Under autocast the parameters are FP32.
        weight = self.weight.to(compute_dtype)
        return linear.low_precision_linear(input.to(compute_dtype), weight, self.bias, state)

    forward.has_low_precision_matmuls = True  # type: ignore[attr-defined]
    # A bound method, so that a deep copy calls its own module.
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _restore_forward(model: nn.Module) -> None:
    """Restore torch's forward in the low-precision layers of an earlier engine."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "has_low_precision_matmuls", False):
            del module.forward


logger = logging.getLogger("distmp")


def describe_formats(layers: LowPrecisionLayers) -> str:
    """Return the formats of the policy, how products are computed, and which layers have them.

    Example: "forward e4m3, grad e5m2, wgrad e5m2, scaling tensor; 8 of 9 linear layers have
    low-precision matmuls, emulated; in the compute dtype: head (hp=head)".
    """
    return f"{_formats(layers.policy_formats)}; {layers.describe()}"


def formats_record(layers: LowPrecisionLayers) -> dict[str, Any]:
    """Return the content of `describe_formats` as JSON values.

    Returns:
        "formats", a list of texts; "emulated"; "backend", how products are computed;
        "low_precision", the names of the layers with low-precision matmuls; "high_precision", why
        each other linear layer stays in the compute dtype, by name.
    """
    return {
        "formats": [_formats(layers.policy_formats)],
        "emulated": layers.is_emulated,
        "backend": layers.backend,
        "low_precision": [*layers.modules],
        "high_precision": dict(layers.high_precision),
    }


def log_formats(
    layers: LowPrecisionLayers, policy: PrecisionPolicy, device: torch.device, *, compiled: bool
) -> None:
    """Log the formats of low-precision matmuls; a warning if they are slow on a GPU.

    Args:
        layers: The layers with low-precision matmuls.
        policy: The policy.
        device: Device of the model.
        compiled: Whether the engine compiles the model.
    """
    on_gpu = device.type != "cpu"
    level = logging.WARNING if on_gpu and layers.is_emulated else logging.INFO
    logger.log(level, "precision %s: %s", policy.name, describe_formats(layers))
    if on_gpu and not compiled and not layers.is_emulated:
        # Each operation of the rounding launches a kernel, which reads and writes all values.
        logger.warning(
            "precision %s is slower than bf16 without a compiler (six times on an H200): set "
            "parallel.compile to 'blocks', unless you compile the model yourself",
            policy.name,
        )


def _formats(formats: linear.ProductFormats) -> str:
    names = ("forward", "grad", "wgrad")
    products = ", ".join(f"{name} {getattr(formats, name) or 'bf16'}" for name in names)
    return f"{products}, scaling {formats.scaling}"
