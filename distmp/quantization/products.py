"""Matrix products of narrow operands: an exact emulation for every device, and GPU kernels.

The emulation is the specification: operands have the values of the format, products of two values
are exact in FP32, and sums are FP32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distmp.quantization.operands import Operand

Product = Callable[[Operand, Operand], Tensor]


def emulated_product(a: Operand, b: Operand) -> Tensor:
    """Return `a @ b.T` with FP32 sums.

    Args:
        a: [m, k].
        b: [n, k].

    Returns:
        FP32 [m, n].
    """
    product = _exact_product(a.block_scaled(), b.block_scaled().t())
    return product * a.outer * b.outer.t()


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the FP32 product of two FP32 matrices whose values bfloat16 represents exactly."""
    if a.device.type != "cpu":
        return a @ b
    # An operator, as the compiler could not see that the product depends on the switch.
    return _product_on_cpu(a, b) if torch.compiler.is_compiling() else _with_bf16_inputs(a, b)


def _with_bf16_inputs(a: Tensor, b: Tensor) -> Tensor:
    """Let the processor convert the inputs to bfloat16, which is exact here and twice as fast.

    It sums in FP32.
    """
    switch = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        return a @ b
    finally:
        switch.fp32_precision = before


@torch.library.custom_op("distmp::product_on_cpu", mutates_args=())
def _product_on_cpu(a: Tensor, b: Tensor) -> Tensor:
    return _with_bf16_inputs(a, b)


@_product_on_cpu.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
