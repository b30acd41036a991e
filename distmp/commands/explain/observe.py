"""Observe the dtypes of the traced steps, module by module, and compare them with the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.commands.explain.types import NO_MODULE, ModuleGroup, group_name
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization import LowPrecisionLayers
from distmp.quantization.operands import Operand
from distmp.quantization.products import Product
from distmp.utils.dtypes import dtype_name
from distmp.utils.tensor_trees import parameter_name

# Operations whose inputs show in which dtype a module computes, by kind.
OPERATIONS = {
    "products": {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addmv",
        "mv",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "mkldnn_linear",
        "_scaled_mm",
    },
    "norms": {
        "native_layer_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "native_group_norm",
        "_fused_rms_norm",
        "rms_norm",
        "batch_norm_with_update",
        # Part of a norm for which torch has no kernel.
        "rsqrt",
    },
    "softmax": {"_softmax", "_log_softmax", "softmax", "log_softmax"},
    "lookups": {"embedding"},
}
_KIND = {name: kind for kind, names in OPERATIONS.items() for name in names}
# Autograd's name of backward of a layer with low-precision matmuls. Its products in FP32 are
# Hadamard transforms, which kernels compute while they round.
_LOW_PRECISION_BACKWARD = "_LowPrecisionLinearBackward"


@dataclass(frozen=True)
class ObservedDtypes:
    """The dtypes observed in a step.

    Attributes:
        stored: Dtypes of parameters, by group of modules.
        computed: Dtypes of the inputs of operations in forward, by group and kind of operation.
        backward: Dtypes of the matrix products in backward.
        accumulated: Dtypes of the buffers in which gradients were summed.
        low_precision: Formats of the operands of low-precision matmuls, by group.
    """

    stored: dict[str, set[torch.dtype]]
    computed: dict[str, dict[str, set[torch.dtype]]]
    backward: set[torch.dtype]
    accumulated: set[torch.dtype]
    low_precision: dict[str, set[str]]

    def in_group(self, name: str) -> set[torch.dtype]:
        """Return the dtypes in which a group of modules was observed to compute."""
        return {dtype for dtypes in self.computed.get(name, {}).values() for dtype in dtypes}


class DtypeRecorder(TorchDispatchMode):
    """Records the dtypes of the inputs of operations, by the module that runs them.

    Args:
        model: The model, prepared by a strategy.
        layers: Its layers with low-precision matmuls: their formats are recorded in place of the
            dtype that emulates them.

    Attributes:
        observed: What has been observed so far; the caller adds `accumulated`.
    """

    def __init__(self, model: nn.Module, layers: LowPrecisionLayers | None) -> None:
        super().__init__()
        self.observed = ObservedDtypes(_stored(model), {}, set(), set(), {})
        self._in_low_precision_matmul = False
        self._names = {
            id(part): parameter_name(name).removeprefix("module.")
            for name, part in model.named_modules()
        }
        self._running: list[str] = []
        self._hooks: list[Any] = []
        for name, state in layers.states.items() if layers is not None else ():
            state.product = self._watched(name, state.product)

    def __enter__(self) -> DtypeRecorder:
        """Start recording, and register hooks that track the current module."""
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording."""
        super().__exit__(*exception)
        for handle in self._hooks:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KIND.get(func.overloadpacket.__name__)
        if kind is not None and not self._in_low_precision_matmul:
            self._record(
                kind,
                [
                    leaf.dtype
                    for leaf in pytree.tree_leaves(args)
                    if isinstance(leaf, Tensor) and leaf.is_floating_point()
                ],
            )
        return func(*args, **(kwargs or {}))

    def _record(self, kind: str, inputs: list[torch.dtype]) -> None:
        if torch._C._current_graph_task_id() != -1:
            if kind == "products" and not _is_transform(inputs[0]):
                self.observed.backward.update(inputs)
            return
        name = self._running[-1] if self._running else NO_MODULE
        # A norm may take FP32 statistics besides 16-bit activations: only its first input counts.
        relevant = inputs if kind == "products" else inputs[:1]
        self.observed.computed.setdefault(name, {}).setdefault(kind, set()).update(relevant)

    def _watched(self, layer: str, product: Product) -> Product:
        formats = self.observed.low_precision.setdefault(group_name(layer), set())

        def watched(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
            formats.update((a.number_format.name, b.number_format.name))
            self._in_low_precision_matmul = True
            try:
                return product(a, b, dtype)
            finally:
                self._in_low_precision_matmul = False

        return watched

    def _begin(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module), NO_MODULE)
        self._running.append(group_name(name) or type(module).__name__)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()


def _stored(model: nn.Module) -> dict[str, set[torch.dtype]]:
    stored: dict[str, set[torch.dtype]] = {}
    for name, value in model.named_parameters():
        owner = group_name(parameter_name(name).rpartition(".")[0]) or type(model).__name__
        stored.setdefault(owner, set()).add(value.dtype)
    return stored


def _is_transform(dtype: torch.dtype) -> bool:
    """Whether a product with this dtype is the transform of a low-precision matmul."""
    if dtype != torch.float32:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == _LOW_PRECISION_BACKWARD


def differences(
    observed: ObservedDtypes, groups: Sequence[ModuleGroup], policy: PrecisionPolicy
) -> Iterator[str]:
    """Yield a line for each observation that differs from the policy."""

    def line(what: str, actual: set[torch.dtype], expected: torch.dtype) -> str:
        return (
            f"{what} in {_names(actual)}, but the policy {policy.name} specifies "
            f"{dtype_name(expected)}"
        )

    for group in groups:
        stored = observed.stored.get(group.name, set())
        if stored - {group.stored}:
            yield line(f"{group.name} is stored", stored, group.stored)
        for kind, actual in observed.computed.get(group.name, {}).items():
            expected = group.computed
            if expected is not None and _differs(actual, expected, exact=kind == "products"):
                yield line(f"{group.name} computes {kind}", actual, expected)
        if group.low_precision and observed.low_precision.get(group.name, set()) != {
            *group.low_precision
        }:
            found = " and ".join(sorted(observed.low_precision.get(group.name, ()))) or "none"
            yield (
                f"{group.name} has low-precision operands in {found}, but the policy {policy.name} "
                f"specifies {' and '.join(group.low_precision)}"
            )
    known = {group.name for group in groups}
    for name, kinds in observed.computed.items():
        for kind, actual in kinds.items() if name not in known else ():
            expected = policy.output_dtype if name == NO_MODULE else policy.compute_dtype
            if _differs(actual, expected, exact=False):
                yield line(f"{name} computes {kind}", actual, expected)
    if _differs(observed.backward, policy.compute_dtype, exact=not policy.keep_fp32):
        yield line("backward computes products", observed.backward, policy.compute_dtype)
    if observed.accumulated - {policy.accumulate_dtype}:
        yield line("gradients are summed", observed.accumulated, policy.accumulate_dtype)


def _differs(actual: set[torch.dtype], expected: torch.dtype, *, exact: bool) -> bool:
    """Whether a dtype differs from the expected one; a wider one counts only if `exact`."""
    return any(
        dtype != expected and (exact or dtype.itemsize <= expected.itemsize) for dtype in actual
    )


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))
