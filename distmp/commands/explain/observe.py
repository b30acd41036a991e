"""The dtypes that a policy specifies for each group of modules, and those of the traced steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.commands.explain.fake_ranks import fake_device
from distmp.errors import listed
from distmp.parallel.blocks import find_blocks
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision.keep import modules_in_fp32, outermost, storage_dtype
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization.layers import LowPrecisionLayers, product_formats
from distmp.quantization.operands import FORMATS, Operand
from distmp.quantization.products import Product
from distmp.quantization.selection import select
from distmp.utils.dtypes import dtype_name
from distmp.utils.tensor_trees import parameter_name, tensors_in

NO_MODULE = "(outside of modules)"


@dataclass(frozen=True)
class ModuleGroup:
    """Modules whose names differ only in numbers, and that are stored and treated alike.

    Attributes:
        name: Their name, with `*` for numbers. If modules of this name are treated differently, the
            numbers of the group follow.
        modules: Names of the modules.
        parameters: Number of elements of their own parameters; shared ones count once.
        stored: Dtype of the module's parameters, or of a rank's shards.
        updated: Dtype of the parameters that the optimizer updates.
        computed: Dtype of the inputs of operations; None if autocast selects it per operation.
        reduced: Communication dtype of gradients.
        accumulated: Dtype in which gradients of microbatches are summed.
        kept: Whether the modules run in FP32 under a 16-bit policy.
        low_precision: Formats of the operands of low-precision matmuls; empty without any.
        trained: Whether one of their parameters is.
    """

    name: str
    modules: tuple[str, ...]
    parameters: int
    stored: torch.dtype
    updated: torch.dtype
    computed: torch.dtype | None
    reduced: torch.dtype
    accumulated: torch.dtype
    kept: bool
    low_precision: tuple[str, ...] = ()
    trained: bool = False


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def group_name(name: str) -> str:
    """Return the name of a module with numbers replaced by `*`."""
    return _NUMBER.sub("*", name)


def expected_groups(
    model: nn.Module, policy: PrecisionPolicy, strategy: str, wrap: Sequence[str] = ()
) -> list[ModuleGroup]:
    """Return the groups of modules that own parameters or are kept, in order of registration.

    Args:
        model: The model before a strategy changes it; its values do not matter.
        policy: The resolved policy.
        strategy: The resolved strategy.
        wrap: Patterns of the model's blocks, see `distmp.parallel.blocks.find_blocks`.

    Raises:
        ConfigError: If the policy has low-precision matmuls and does not fit the model.
    """
    low_precision: set[int] = set()
    if policy.has_low_precision_matmuls:
        selection = select(model, policy, [*outermost(model, find_blocks(model, wrap))])
        low_precision = set(map(id, selection.low_precision.values()))
    tops = modules_in_fp32(model, policy).values()
    kept = {id(part) for top in tops for part in top.modules()}
    shown = {id(top) for top in tops if next(top.parameters(), None) is None}
    groups: dict[tuple[str, bool, bool, torch.dtype], ModuleGroup] = {}
    counted: set[int] = set()
    for name, part in model.named_modules():
        own = [value for value in part.parameters(recurse=False) if id(value) not in counted]
        if not own and id(part) not in shown:
            continue
        counted.update(map(id, own))
        is_kept = id(part) in kept
        stored = torch.float32 if is_kept else _stored(part, policy, strategy)
        named = group_name(name) or type(part).__name__
        key = named, is_kept, id(part) in low_precision, stored
        group = groups.get(key) or _group(key, part, policy, strategy)
        count = group.parameters + sum(value.numel() for value in own)
        trained = group.trained or any(value.requires_grad for value in own)
        modules = (*group.modules, name)
        groups[key] = replace(group, modules=modules, parameters=count, trained=trained)
    groups_of_name = Counter(group.name for group in groups.values())
    return [
        replace(group, name=_with_numbers(group)) if groups_of_name[group.name] > 1 else group
        for group in groups.values()
    ]


def _with_numbers(group: ModuleGroup) -> str:
    numbers = listed([".".join(_NUMBER.findall(name)) for name in group.modules])
    return f"{group.name} [{numbers}]"


def _stored(part: nn.Module, policy: PrecisionPolicy, strategy: str) -> torch.dtype:
    sharded = strategy in SHARDED_STRATEGIES
    own = [*part.parameters(recurse=False)]
    if own and not any(value.requires_grad for value in own):
        # Frozen shards keep their dtype.
        return own[0].dtype if sharded else storage_dtype(own[0], policy, kept=False)
    # The optimizer updates FSDP's shards, which are cast when they are gathered.
    return policy.param_dtype if sharded else policy.module_dtype


def _group(
    key: tuple[str, bool, bool, torch.dtype],
    part: nn.Module,
    policy: PrecisionPolicy,
    strategy: str,
) -> ModuleGroup:
    name, kept, low_precision, stored = key
    fp32 = torch.float32
    return ModuleGroup(
        name=name,
        modules=(),
        parameters=0,
        stored=stored,
        updated=fp32 if kept else policy.param_dtype,
        computed=fp32 if kept else _computed(part, policy),
        # FSDP2 has a communication dtype per group; flat buckets have one for all.
        reduced=fp32 if kept and strategy in SHARDED_STRATEGIES else policy.reduce_dtype,
        accumulated=policy.accumulate_dtype,
        kept=kept,
        low_precision=_operand_formats(policy) if low_precision else (),
    )


def _operand_formats(policy: PrecisionPolicy) -> tuple[str, ...]:
    formats = product_formats(policy)
    return tuple(sorted({formats.operand, *filter(None, (formats.grad, formats.wgrad))}))


def _computed(part: nn.Module, policy: PrecisionPolicy) -> torch.dtype | None:
    multiplies = any(value.dim() >= 2 for value in part.parameters(recurse=False))
    if policy.autocast and (isinstance(part, nn.Embedding) or not multiplies):
        return None
    return policy.compute_dtype


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
        groups: Its groups. Other modules are recorded by name, with `*` for numbers.

    Attributes:
        observed: What has been observed so far; the caller adds `accumulated`.
        is_paused: Whether operations are not recorded, as those of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LowPrecisionLayers | None,
        groups: Sequence[ModuleGroup] = (),
    ) -> None:
        super().__init__()
        self.observed = ObservedDtypes({}, {}, set(), set(), {})
        self.is_paused = False
        self._groups = {name: group.name for group in groups for name in group.modules}
        self._names: dict[int, str] = {}
        for name, part in model.named_modules():
            plain_name = parameter_name(name).removeprefix("module.")
            group = self._group(plain_name) or type(part).__name__
            self._names[id(part)] = group
            for value in part.parameters(recurse=False):
                self.observed.stored.setdefault(group, set()).add(value.dtype)
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
        if (device := fake_device(func, args)) is not None:
            return device
        kind = _KIND.get(func.overloadpacket.__name__)
        if kind is not None and not self.is_paused:
            self._record(kind, [t.dtype for t in tensors_in(args) if t.is_floating_point()])
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
        formats = self.observed.low_precision.setdefault(self._group(layer), set())
        names = {number_format: name for name, number_format in FORMATS.items()}

        def watched(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
            formats.update((names[a.number_format], names[b.number_format]))
            self.is_paused = True
            try:
                return product(a, b, dtype)
            finally:
                self.is_paused = False

        return watched

    def _group(self, name: str) -> str:
        return self._groups.get(name) or group_name(name)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names.get(id(module), NO_MODULE))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()


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
        formats = observed.low_precision.get(group.name, set())
        if group.low_precision and formats != {*group.low_precision}:
            found = " and ".join(sorted(formats)) or "none"
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
