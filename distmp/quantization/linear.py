"""A linear layer whose three matrix products each have a format.

    forward:  y  = x w^T      [tokens, out] from [tokens, in] and [out, in]
    grad:     dx = dy w       [tokens, in]  from [tokens, out] and [out, in]
    wgrad:    dw = dy^T x     [out, in]     from [tokens, out] and [tokens, in]

Inputs, weights and output gradients are rounded to the format of the product where it has one;
`x` and `w` have the format of `forward` in all products (e4m3 or e2m1 if forward has the compute
dtype). Sums are FP32, and results are rounded to the dtype of `x` once.
"""

# Note [One rounded weight]
#
# The rounded weight of forward is that of backward: scales of weights belong to rows (output
# features) or square blocks, so the transposed weight has the same values. For "row", grad sums
# over the rows, so a scale of a row cannot be applied to the result. It is a power of two, and is
# multiplied into dy instead, before dy is rounded, which is exact:
#
#     dx = dy diag(s) q = (dy diag(s)) q

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distmp.precision.builders import autocast_off
from distmp.precision.stochastic import uniform
from distmp.quantization.operands import BLOCK_SIZES, Counts, LayerCounts, Operand, quantize
from distmp.quantization.products import choose_product
from distmp.utils.autograd import refuse_second_derivatives

SIZE = 16
_NO_SECOND = (
    "low-precision matmuls have no second derivatives; use grad=bf16 and wgrad=bf16 in "
    "precision.policy, or bf16"
)
# One random sign for each of 16 positions.
_SIGNS = (1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, -1, -1)


def hadamard(matrix: Tensor, transform: Tensor) -> Tensor:
    """Transform each block of 16 rows.

    Args:
        matrix: FP32 [rows, columns]; rows is a multiple of 16.
        transform: FP32 [16, 16], from `random_transform`.
    """
    rows, columns = matrix.shape
    blocks = matrix.view(rows // SIZE, SIZE, columns)
    return (transform @ blocks).view(rows, columns)


def random_transform(device: torch.device) -> Tensor:
    """Return the orthogonal matrix, FP32 [16, 16]; its entries are -1/4 and 1/4."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix * torch.tensor(_SIGNS) / SIZE**0.5).to(device)


# Rows of `LowPrecisionState.counts`.
OPERANDS = ("input", "weight", "grad", "wgrad_input", "wgrad_grad")
INPUT, WEIGHT, GRAD, WGRAD_INPUT, WGRAD_GRAD = range(len(OPERANDS))


@dataclass(frozen=True)
class ProductFormats:
    """The formats of the three products of a linear layer; None is the compute dtype.

    Attributes:
        forward: Format of input and weight in forward.
        grad: Format of the output gradient in the product for the gradient of the input.
        wgrad: Format of the output gradient in the product for the gradient of the weight.
        scaling: Which values share a scale, see `distmp.quantization.operands`.
    """

    forward: str | None
    grad: str | None
    wgrad: str | None
    scaling: str = "tensor"

    @property
    def operand(self) -> str:
        """Format of inputs and weights in low-precision matmuls."""
        if self.forward is not None:
            return self.forward
        return "e2m1" if self.scaling == "block16" else "e4m3"


class LowPrecisionState:
    """The changing state of a linear layer with low-precision matmuls.

    Attributes:
        formats: The formats of its products; may be changed between steps.
        counts: Statistics of each of `OPERANDS` in this step.
        key: Key of the random numbers of this microbatch, int64, 0-dim.
        transform: The Hadamard transform of "block16".
        product: Computes low-precision matmuls.
    """

    def __init__(self, formats: ProductFormats, counts: Tensor, key: Tensor) -> None:
        self.formats = formats
        self.counts = LayerCounts(counts)
        self.key = key
        self.transform = random_transform(counts.device)
        self.product = choose_product(formats.scaling, formats.forward, counts.device)


def low_precision_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LowPrecisionState
) -> Tensor:
    """Return `x @ weight.T + bias`, with the products of `state`.

    Args:
        x: [..., input features].
        weight: [output features, input features], with the dtype of `x`.
        bias: [output features], or None.
        state: The state of the layer. Its counts are updated if gradients are enabled.

    Returns:
        [..., output features], in the dtype of `x`.
    """
    counts = state.counts if torch.is_grad_enabled() else None
    y: Tensor = _LowPrecisionLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, state, counts)
    # As in F.linear, the result is no view: FSDP loses its hook if a view is changed in place.
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: LowPrecisionState,
        counts: LayerCounts | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Backward uses the formats of this forward.
        ctx.state, ctx.formats, ctx.counts = state, state.formats, counts
        ctx.bias_dtype = None if bias is None else bias.dtype
        formats = state.formats
        if formats.forward is None:
            return F.linear(x, weight, bias)
        with autocast_off(x.device):  # it would round the sums before the bias is added
            inputs = quantize(x, formats.operand, formats.scaling, counts=_row(counts, INPUT))
            weights = quantize(
                weight, formats.operand, formats.scaling, square=True, counts=_row(counts, WEIGHT)
            )
            if bias is None:
                return state.product(inputs, weights, x.dtype)
            return (state.product(inputs, weights, torch.float32) + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.formats.grad or ctx.formats.wgrad:  # rounding has no derivative
            refuse_second_derivatives(_NO_SECOND)
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = _input_gradient(ctx, dy, weight) if needs_x else None
        dw = _weight_gradient(ctx, dy, x) if needs_weight else None
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, None


def _input_gradient(ctx: Any, dy: Tensor, weight: Tensor) -> Tensor:
    formats, counts, dtype = ctx.formats, ctx.counts, dy.dtype
    if formats.grad is None:
        return dy @ weight
    not_counted = _row(counts, WEIGHT) if formats.forward is None else None
    weights = quantize(weight, formats.operand, formats.scaling, square=True, counts=not_counted)
    dy = dy.float()
    if formats.scaling == "row":  # see Note [One rounded weight]
        dy = dy * weights.outer.t()
        weights = weights._replace(outer=torch.ones_like(weights.outer[:1]))
    gradients = _rounded(ctx, dy, formats.grad, GRAD)
    return ctx.state.product(gradients, weights.transposed(), dtype)


def _weight_gradient(ctx: Any, dy: Tensor, x: Tensor) -> Tensor:
    formats, counts, dtype = ctx.formats, ctx.counts, dy.dtype
    if formats.wgrad is None:
        return dy.t() @ x
    dy, x = dy.float(), x.float()
    # The sum is over tokens, padded to full blocks; FP8 kernels need a multiple of 16. A microbatch
    # without tokens has one block of zeros.
    size = BLOCK_SIZES.get(formats.scaling, 16)
    if padding := -len(x) % size if len(x) else size:
        dy, x = F.pad(dy, (0, 0, 0, padding)), F.pad(x, (0, 0, 0, padding))
    if formats.scaling == "block16":
        transform = ctx.state.transform
        dy, x = hadamard(dy, transform), hadamard(x, transform)
    dy, x = dy.t(), x.t()
    gradients = _rounded(ctx, dy, formats.wgrad, WGRAD_GRAD)
    inputs = quantize(x, formats.operand, formats.scaling, counts=_row(counts, WGRAD_INPUT))
    return ctx.state.product(gradients, inputs, dtype)


def _rounded(ctx: Any, dy: Tensor, number_format: str, operand: int) -> Operand:
    """Return a gradient in a low-precision format.

    With 4 bits it is rounded stochastically: rounding to nearest is biased, most values of a
    gradient would become zero.
    """
    noise = uniform(dy.shape, ctx.state.key + operand) if number_format == "e2m1" else None
    counts = _row(ctx.counts, operand)
    return quantize(dy, number_format, ctx.formats.scaling, uniform=noise, counts=counts)


def _row(counts: LayerCounts | None, operand: int) -> Counts | None:
    return None if counts is None else Counts(counts, operand)
