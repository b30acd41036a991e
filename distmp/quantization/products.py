"""Matrix products of low-precision operands: an exact emulation for every device, and GPU kernels.

The emulation is the specification: operands have the values of the format, products of two values
are exact in FP32, and sums are FP32. Tensor cores of Hopper sum with fewer bits. `torch._scaled_mm`
runs on GPUs from compute capability 8.9 on (row scales: 9.0).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distmp.precision.notation import computes_low_precision
from distmp.quantization.operands import Operand

# Returns `a @ b.T` in the given dtype, rounded once.
Product = Callable[[Operand, Operand, torch.dtype], Tensor]


def choose_product(scaling: str, forward: str | None, device: torch.device) -> Product:
    """Return the kernel for a device, or the emulation.

    Args:
        scaling: "tensor", "row", "block32" or "block16".
        forward: Format of inputs and weights in forward; None is the compute dtype.
        device: Device of the model.
    """
    if device.type == "cuda" and computes_low_precision(
        scaling, forward, torch.cuda.get_device_capability(device)
    ):
        return scaled_product
    return emulated_product


def emulated_product(a: Operand, b: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `a @ b.T` with FP32 sums.

    Args:
        a: [m, k].
        b: [n, k].
        dtype: Dtype of the result, FP32 or bfloat16; each sum is rounded once.

    Returns:
        [m, n].
    """
    first, second = a.values, b.values.t()
    if dtype == torch.bfloat16 and first.device.type == "cpu":
        # bfloat16 represents the operands exactly, and this product sums in FP32. It is four times
        # as fast.
        product = first.to(dtype) @ second.to(dtype)
    else:
        product = first @ second
    return (product * a.outer * b.outer.t()).to(dtype)  # by powers of two


def scaled_product(a: Operand, b: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `a @ b.T` from the FP8 kernel of torch.

    Args:
        a: [m, k], with scales for rows or for all; k is a multiple of 16.
        b: [n, k], with scales for rows or for all; n is a multiple of 16.
        dtype: Dtype of the result, FP32 or bfloat16. With row scales, the kernel of GPUs returns
            bfloat16 in any case.

    Returns:
        [m, n].
    """
    if b.number_format.dtype == torch.float8_e5m2:  # a phase has another format than the policy
        return emulated_product(a, b, dtype)
    scale_a, scale_b = a.outer, b.outer.t()
    by_row = a.outer.numel() > 1 or b.outer.numel() > 1
    if by_row:
        scale_a = scale_a.expand(len(a.values), 1).contiguous()
        scale_b = scale_b.expand(1, len(b.values)).contiguous()
    product: Tensor = torch._scaled_mm(
        a.values.to(a.number_format.dtype).contiguous(),
        b.values.to(b.number_format.dtype).contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=torch.bfloat16 if by_row else dtype,
    )
    return product.to(dtype)
