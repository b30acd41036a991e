"""Observe the dtypes of a real step, module by module, with a small model on this machine's CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.commands.explain.product_flops import is_transform, watch_products
from distmp.commands.explain.types import NO_MODULE, ModuleGroup, expected_groups, group_name
from distmp.config import RunConfig
from distmp.distributed.world import World
from distmp.parallel.strategy import parameter_name
from distmp.precision.policy import PrecisionPolicy
from distmp.quantization import NarrowLayers
from distmp.training.setup import (
    Progress,
    build_engine,
    prepare,
    round_frozen,
    start_from_weights,
    training_batches,
)
from distmp.utils.dtypes import dtype_name
from distmp.utils.live_bytes import GRADIENTS

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

# A model with more parameters is replaced by a smaller one.
MAX_PARAMETERS = 8_000_000
SMALL_TRANSFORMER: dict[str, Any] = {"layers": 2, "dimension": 64, "heads": 2, "hidden": 128}
SMALL_LENGTH = 32


class ObservedDtypes(NamedTuple):
    """The dtypes observed in a step.

    Attributes:
        of: Description of the observed step.
        stored: Dtypes of parameters, by group of modules.
        computed: Dtypes of the inputs of operations in forward, by group and kind of operation.
        backward: Dtypes of the matrix products in backward.
        accumulated: Dtypes of the buffers in which gradients were summed.
        groups: The dtypes that the policy specifies for this step.
        narrow: Formats of the operands of narrow products, by group.
    """

    of: str
    stored: dict[str, set[torch.dtype]]
    computed: dict[str, dict[str, set[torch.dtype]]]
    backward: set[torch.dtype]
    accumulated: set[torch.dtype]
    groups: list[ModuleGroup]
    narrow: dict[str, set[str]]


class DtypeRecorder(TorchDispatchMode):
    """Records the dtypes of the inputs of operations, by the module that runs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.forward: dict[str, dict[str, set[torch.dtype]]] = {}
        self.backward: set[torch.dtype] = set()
        self.narrow: dict[str, set[str]] = {}
        self._in_narrow_product = False
        self._names = {
            id(part): parameter_name(name).removeprefix("module.")
            for name, part in model.named_modules()
        }
        self._running: list[str] = []
        self._hooks: list[Any] = []

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
        if kind is not None and not self._in_narrow_product:
            inputs = [
                leaf.dtype
                for leaf in pytree.tree_leaves(args)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]
            if torch._C._current_graph_task_id() != -1:
                if kind == "products" and not is_transform(inputs[0]):
                    self.backward.update(inputs)
            else:
                name = self._running[-1] if self._running else NO_MODULE
                # A norm may take FP32 statistics besides 16-bit activations: only its first input
                # counts.
                relevant = inputs if kind == "products" else inputs[:1]
                self.forward.setdefault(name, {}).setdefault(kind, set()).update(relevant)
        return func(*args, **(kwargs or {}))

    def watch(self, layers: NarrowLayers | None) -> None:
        """Record the formats of narrow products, in place of the dtype that emulates them."""
        watch_products(layers, self._inside)

    @contextlib.contextmanager
    def _inside(self, layer: str, a: str, b: str) -> Iterator[None]:
        self.narrow.setdefault(group_name(layer), set()).update((a, b))
        self._in_narrow_product = True
        try:
            yield
        finally:
            self._in_narrow_product = False

    def _begin(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module), NO_MODULE)
        self._running.append(group_name(name) or type(module).__name__)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()


def observe(config: RunConfig, policy: PrecisionPolicy, strategy: str) -> ObservedDtypes:
    """Run one real step of a small run and return the observed dtypes.

    Args:
        config: The configuration, as returned by `smaller`; the step uses two microbatches of one
            sample, or one if the run has no more.
        policy: The resolved policy.
        strategy: The resolved strategy; `hsdp` needs several ranks, and is observed as `fsdp`.

    Raises:
        ConfigError: If the run itself would raise it.
    """
    strategy = "fsdp" if strategy == "hsdp" else strategy
    small = replace(
        config,
        strategy=strategy,
        sharding=replace(config.sharding, shard_size=None, accumulate="auto"),
        batch=replace(
            config.batch,
            global_batch_size=min(config.batch.global_batch_size, 2),
            microbatch_size=1,
        ),
    )
    accumulated: set[torch.dtype] = set()
    with _one_rank(needs_group=strategy != "single") as world:
        parts = prepare(small, world)
        round_frozen(small, parts, policy)
        groups = expected_groups(parts.model, policy, strategy, small.sharding.wrap)

        def loss(module: nn.Module, batch: Any) -> Any:
            # Between microbatches, because FSDP rounds the sums to the dtype of the weights.
            accumulated.update(tensor.dtype for tensor in engine.tensors_by_use()[GRADIENTS])
            return parts.loss(module, batch)

        engine = build_engine(
            small.with_fixed_formats(),
            parts._replace(loss=loss),
            world,
            policy=policy,
            attribution=False,
            first_step_checks=False,
        )
        start_from_weights(parts, engine)
        model = engine.model
        stored: dict[str, set[torch.dtype]] = {}
        for name, value in model.named_parameters():
            owner = group_name(parameter_name(name).rpartition(".")[0]) or type(model).__name__
            stored.setdefault(owner, set()).add(value.dtype)
        with contextlib.closing(training_batches(small, parts, world, Progress())) as batches:
            batch = next(batches)
        with DtypeRecorder(model) as recorder:
            recorder.watch(engine.narrow_products.layers)
            engine.step(batch)
    count = sum(value.numel() for value in model.parameters())
    description = f"one step with {count:,} parameters as {strategy!r} on one CPU rank"
    return ObservedDtypes(
        description,
        stored,
        recorder.forward,
        recorder.backward,
        accumulated,
        groups,
        recorder.narrow,
    )


def smaller(config: RunConfig, parameters: int) -> RunConfig | None:
    """Return a run of the same kind that takes seconds on this machine, or None.

    Args:
        config: The configuration of the run.
        parameters: Number of elements of all parameters of its model.
    """
    if config.model.name != "transformer":
        return config if parameters <= MAX_PARAMETERS else None
    length = min(config.data.sequence_length, SMALL_LENGTH)
    data = config.data
    if not data.is_import_path:
        data = replace(data, sequence_length=length)
    if parameters <= MAX_PARAMETERS:
        return replace(config, data=data)
    return replace(config, data=data, model=replace(config.model, **SMALL_TRANSFORMER))


def differences(observed: ObservedDtypes, policy: PrecisionPolicy) -> Iterator[str]:
    """Yield a line for each observation that differs from the policy."""

    def line(what: str, actual: set[torch.dtype], expected: torch.dtype) -> str:
        return (
            f"{what} in {_names(actual)}, but the policy {policy.name} specifies "
            f"{dtype_name(expected)}"
        )

    for group in observed.groups:
        stored = observed.stored.get(group.name, set())
        if stored - {group.stored}:
            yield line(f"{group.name} is stored", stored, group.stored)
        for kind, actual in observed.computed.get(group.name, {}).items():
            expected = group.computed
            if expected is not None and _differs(actual, expected, exact=kind == "products"):
                yield line(f"{group.name} computes {kind}", actual, expected)
        if group.narrow and observed.narrow.get(group.name, set()) != {*group.narrow}:
            found = " and ".join(sorted(observed.narrow.get(group.name, ()))) or "none"
            yield (
                f"{group.name} has narrow operands in {found}, but the policy {policy.name} "
                f"specifies {' and '.join(group.narrow)}"
            )
    known = {group.name for group in observed.groups}
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


def types_of(observed: ObservedDtypes, name: str) -> set[torch.dtype]:
    """Return the dtypes in which a group of modules was observed to compute."""
    return {dtype for dtypes in observed.computed.get(name, {}).values() for dtype in dtypes}


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(dtype_name, dtypes)))


@contextlib.contextmanager
def _one_rank(*, needs_group: bool) -> Iterator[World]:
    if needs_group:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        yield World.current(torch.device("cpu"))
    finally:
        if needs_group:
            dist.destroy_process_group()
