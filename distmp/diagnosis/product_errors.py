"""Measures the errors of narrow matrix products on the operands of real steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from distmp.quantization import NarrowState, ProductFormats, narrow_linear
from distmp.quantization.counts import STATISTICS
from distmp.quantization.linear import GRAD, INPUT, OPERANDS, WEIGHT, WGRAD_GRAD, WGRAD_INPUT

PRODUCTS = ("forward", "grad", "wgrad")
# The operands of each product.
_OPERANDS = ((INPUT, WEIGHT), (GRAD, WEIGHT), (WGRAD_GRAD, WGRAD_INPUT))
_SUMS = ("error", "exact", "saturated", "underflowed", "elements")


class ProductError(NamedTuple):
    """The rounding error of a product of a layer.

    Attributes:
        error: Relative error: the norm of the difference from the FP32 product, divided by the norm
            of the FP32 product. None if the step has no such product: a frozen weight has no wgrad.
        saturated: Share of the operands' values that are saturated or not finite.
        underflowed: Share of the operands' values that are rounded to zero.
    """

    error: float | None
    saturated: float
    underflowed: float


class Candidate(NamedTuple):
    """Formats to measure.

    Attributes:
        formats: The formats of the three products.
        layers: The linear layers that would have them, by name.
    """

    formats: ProductFormats
    layers: Mapping[str, nn.Linear]


class ProductErrors:
    """Measures the products of linear layers in a `with` block, without changing the step.

    In backward, each layer computes its three products again: in FP32, and with the formats of each
    candidate, from the input, the weight and the output gradient of the step.

    Args:
        candidates: Formats by name.
        device: Device of the model.
    """

    def __init__(self, candidates: Mapping[str, Candidate], device: torch.device) -> None:
        self._candidates = candidates
        self._layers = {
            name: layer for each in candidates.values() for name, layer in each.layers.items()
        }
        shape = (len(candidates), len(self._layers), len(PRODUCTS), len(_SUMS))
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._handles: list[RemovableHandle] = []
        self._measured = 0

    def __enter__(self) -> ProductErrors:
        for index, (name, layer) in enumerate(self._layers.items()):
            self._handles.append(self._watch(index, name, layer))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def errors(self, group: dist.ProcessGroup | None) -> dict[str, dict[str, list[ProductError]]]:
        """Return the errors of `PRODUCTS`, by candidate and layer, over all ranks and microbatches.

        Args:
            group: The ranks, all of which have to call this; None for a single process.
        """
        total = self._sums.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        found = total.tolist()
        return {
            candidate: {
                layer: [_product_error(*sums) for sums in found[row][column]]
                for column, layer in enumerate(self._layers)
                if layer in self._candidates[candidate].layers
            }
            for row, candidate in enumerate(self._candidates)
        }

    def _watch(self, index: int, name: str, layer: nn.Linear) -> RemovableHandle:
        def after(layer: Any, inputs: Any, options: Any, output: Tensor) -> None:
            x = (inputs[0] if inputs else options["input"]).detach()
            if output.requires_grad:
                output.register_hook(lambda dy: self._measure(index, name, layer, x, dy))

        return layer.register_forward_hook(after, with_kwargs=True)

    @torch.no_grad()
    def _measure(self, index: int, name: str, layer: nn.Linear, x: Tensor, dy: Tensor) -> None:
        # Of different batches, but the same in every run.
        self._measured += 1
        key = torch.tensor(self._measured, device=x.device)
        x, dy = (each.reshape(-1, each.shape[-1]).float() for each in (x, dy))
        weight = layer.weight.detach().float()
        exact = (x @ weight.t(), dy @ weight, dy.t() @ x)
        computed = len(PRODUCTS) if layer.weight.requires_grad else len(PRODUCTS) - 1
        for row, candidate in enumerate(self._candidates.values()):
            if name not in candidate.layers:
                continue
            narrow, counts = narrow_products(x, weight, dy, candidate.formats, key)
            for product in range(computed):
                self._sums[row, index, product] += torch.stack(
                    [
                        _square(narrow[product] - exact[product]),
                        _square(exact[product]),
                        *counts[[*_OPERANDS[product]], 1:].sum(0),
                    ]
                )


def narrow_products(
    x: Tensor, weight: Tensor, dy: Tensor, formats: ProductFormats, key: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Compute the three products of a linear layer as a step does, with FP32 results.

    Args:
        x: Input, FP32 [tokens, input features].
        weight: FP32 [output features, input features].
        dy: Gradient of the output, FP32 [tokens, output features].
        formats: The formats of the products.
        key: Key of random numbers for stochastic rounding, int64, 0-dim.

    Returns:
        The output, the gradient of the input and that of the weight; and the statistics of the
        operands, FP64 [5, 4], see `distmp.quantization.counts`.
    """
    shape = (len(OPERANDS), len(STATISTICS))
    counts = torch.zeros(shape, dtype=torch.float64, device=x.device)
    state = NarrowState(formats, counts, key)
    with torch.enable_grad():
        x, weight = (each.detach().requires_grad_() for each in (x, weight))
        y = narrow_linear(x, weight, None, state)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    return (y.detach(), dx, dw), counts


def _square(values: Tensor) -> Tensor:
    return values.double().square().sum()


def _product_error(
    error: float, exact: float, saturated: float, underflowed: float, elements: float
) -> ProductError:
    if not elements:
        return ProductError(None, 0.0, 0.0)
    relative = math.sqrt(error / exact) if exact else math.inf if error else 0.0
    return ProductError(relative, saturated / elements, underflowed / elements)
