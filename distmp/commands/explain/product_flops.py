"""Counts the floating-point operations of matrix products by the format of their operands."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from distmp.precision.policy import DTYPES, dtype_word
from distmp.quantization import NarrowLayers
from distmp.quantization.operands import Operand
from distmp.quantization.products import Product
from distmp.utils.dtypes import dtype_name

# Autograd's name of backward of a layer with narrow products. Its products in FP32 are Hadamard
# transforms, which kernels compute while they round.
_NARROW_BACKWARD = "_NarrowLinearBackward"
# Attention on CPUs, which torch does not count.
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Products(NamedTuple):
    """The matrix products of a rank in a step.

    Attributes:
        flops: Floating-point operations by the format of the operands, such as "e4m3", "e4m3 x
            e5m2" or "bf16": 2 m n k of each product, and those of attention and convolutions.
        layers: Which linear layers are narrow, and why others are not, as text; empty under wide
            policies.
    """

    flops: dict[str, int]
    layers: str

    def share(self, formats: tuple[str, ...]) -> float:
        """Return the share of the operations with operands of some formats, all narrow."""
        found = sum(
            flops for label, flops in self.flops.items() if {*label.split(" x ")} <= {*formats}
        )
        return found / max(1, sum(self.flops.values()))


class FlopRecorder(TorchDispatchMode):
    """Counts the operations of matrix products inside of it.

    Attributes:
        flops: The operations by the format of the operands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self._narrow: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counted = _flops(func, args, kwargs or {}, result)
        if counted:
            dtype = next(
                leaf.dtype for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)
            )
            if self._narrow is not None:
                self.flops[self._narrow] += counted
            elif not is_transform(dtype):
                self.flops[dtype_word(dtype) if dtype in DTYPES else dtype_name(dtype)] += counted
        return result

    def watch(self, layers: NarrowLayers | None) -> None:
        """Count the products of narrow layers by the formats of their operands."""
        watch_products(layers, lambda _, a, b: self._inside(" x ".join(sorted({a, b}))))

    def start(self) -> None:
        """Start counting a new step."""
        self.flops.clear()

    @contextlib.contextmanager
    def _inside(self, label: str) -> Iterator[None]:
        self._narrow = label
        try:
            yield
        finally:
            self._narrow = None


def watch_products(
    layers: NarrowLayers | None,
    around: Callable[[str, str, str], contextlib.AbstractContextManager[None]],
) -> None:
    """Enter a context around every narrow product.

    Args:
        layers: The narrow layers; None for none.
        around: Returns the context from the name of the layer and the formats of the operands.
    """
    for name, state in layers.states.items() if layers is not None else ():
        state.product = _watched(name, state.product, around)


def _watched(
    name: str,
    product: Product,
    around: Callable[[str, str, str], contextlib.AbstractContextManager[None]],
) -> Product:
    def watched(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        with around(name, a.number_format.name, b.number_format.name):
            return product(a, b, dtype)

    return watched


def is_transform(dtype: torch.dtype) -> bool:
    """Whether a wide product with this dtype that runs now is the transform of a narrow one."""
    if dtype != torch.float32:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == _NARROW_BACKWARD


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    name = packet.__name__
    if name == _CPU_ATTENTION:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if name == f"{_CPU_ATTENTION}_backward":
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    return 0
