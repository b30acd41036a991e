"""Keeps the gradients of some weights over the microbatches of a step, to compare them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Gradients with more elements are compared in evenly spaced ones, to save memory.
MOST_ELEMENTS = 2**18


class GradientMatch(NamedTuple):
    """A gradient, compared with the same gradient in FP32.

    Attributes:
        cosine: Cosine of the angle between them.
        norm: Norm, divided by that of the gradient in FP32.
    """

    cosine: float
    norm: float


class WeightGradients:
    """Sums the gradients of the weights of some layers in a `with` block, in FP32, on each rank.

    Args:
        layers: The layers, by name.

    Attributes:
        sums: Gradients, FP32 with at most `MOST_ELEMENTS`, by the name of the layer.
    """

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.sums: dict[str, Tensor] = {}
        self._layers = layers
        self._handles: list[RemovableHandle] = []
        # By id; the reference makes sure that the id is not reused by another tensor.
        self._watched: dict[int, Tensor] = {}

    def __enter__(self) -> WeightGradients:
        for name, layer in self._layers.items():
            self._handles.append(self._watch(name, layer))
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
        self._watched.clear()

    def match(
        self, exact: WeightGradients, group: dist.ProcessGroup | None, device: torch.device
    ) -> tuple[dict[str, GradientMatch], GradientMatch]:
        """Compare the gradients with those of another step on the same batch, over all ranks.

        Args:
            exact: The gradients of the same layers in FP32.
            group: The ranks, all of which have to call this; None for a single process.
            device: Device of the model.

        Returns:
            The comparison of each layer, and that of all layers together.
        """
        found = [_products(self.sums.get(name), exact.sums.get(name)) for name in self._layers]
        sums = torch.tensor(found, dtype=torch.float64, device=device)
        if group is not None:
            dist.all_reduce(sums, group=group)
        layers = zip(self._layers, map(_match, sums.tolist()), strict=True)
        return dict(layers), _match(sums.sum(0).tolist())

    def _watch(self, name: str, layer: nn.Linear) -> RemovableHandle:
        def add(gradient: Tensor) -> None:
            flat = gradient.detach().flatten()
            part = flat[:: math.ceil(flat.numel() / MOST_ELEMENTS)].float()
            self.sums[name] = self.sums[name] + part if name in self.sums else part.clone()

        def before(layer: nn.Module, inputs: Any) -> None:
            # FSDP replaces parameters by gathered ones before forward.
            weight: Any = layer.weight
            if weight.requires_grad and id(weight) not in self._watched:
                self._watched[id(weight)] = weight
                self._handles.append(weight.register_hook(add))

        return layer.register_forward_pre_hook(before)


def _products(a: Tensor | None, b: Tensor | None) -> list[float]:
    """Return a * b, a * a and b * b, summed; zeros if a rank has not used the weight."""
    if a is None or b is None:
        return [0.0, 0.0, 0.0]
    a, b = a.double(), b.double()
    return [float(a @ b), float(a @ a), float(b @ b)]


def _match(sums: list[float]) -> GradientMatch:
    both, own, exact = sums
    if not (own > 0 and exact > 0):
        return GradientMatch(math.nan, math.nan)
    return GradientMatch(both / math.sqrt(own * exact), math.sqrt(own / exact))
