"""Sets torch's process-wide switches of matrix products for a policy, and restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from distmp.precision.policy import PrecisionPolicy

_BACKENDS = torch.backends
# torch's switches for FP32 products: "ieee", "tf32", "bf16" or "none" (not set).
_FP32_PRODUCTS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn.conv,  # type: ignore[attr-defined]
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul,  # type: ignore[attr-defined]
)
# Whether partial sums of 16-bit products may be rounded to 16 bits.
_REDUCED_SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextlib.contextmanager
def product_switches(policy: PrecisionPolicy) -> Iterator[None]:
    """Set the switches of the policy inside the block, and restore the former ones after it.

    FP32 products (matrix, convolution, recurrent) use TF32 if the policy has `tf32`, and full
    precision otherwise; torch's default rounds the inputs of convolutions. Partial sums of 16-bit
    products stay in FP32; torch's default lets cuBLAS round them.
    """
    with contextlib.ExitStack() as previous:
        _remember(previous)
        # torch refuses to read its older switches if only the newer ones were set. The older
        # functions set both.
        torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
        _BACKENDS.cudnn.allow_tf32 = policy.tf32
        for products in _FP32_PRODUCTS:
            products.fp32_precision = "tf32" if policy.tf32 else "ieee"
        for name in _REDUCED_SUMS:
            setattr(_BACKENDS.cuda.matmul, name, False)
        yield


def _remember(stack: contextlib.ExitStack) -> None:
    """Register callbacks that restore every switch, in reverse order."""
    for products in _FP32_PRODUCTS:
        stack.callback(setattr, products, "fp32_precision", products.fp32_precision)
    for name in _REDUCED_SUMS:
        value = getattr(_BACKENDS.cuda.matmul, name)
        # Newer versions of torch have a second switch, which setting the first resets to its
        # default unless both are set.
        split_k = getattr(_BACKENDS.cuda.matmul, f"{name}_split_k", None)
        stack.callback(
            setattr, _BACKENDS.cuda.matmul, name, value if split_k is None else (value, split_k)
        )
    # Unreadable if only the newer switches were set; then only those are used.
    with contextlib.suppress(RuntimeError):
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    with contextlib.suppress(RuntimeError):
        stack.callback(setattr, _BACKENDS.cudnn, "allow_tf32", _BACKENDS.cudnn.allow_tf32)
