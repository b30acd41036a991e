"""Records what a step launches on a fake CUDA device, for `benchmarks.timeline`.

Tensors are fake, and other ranks too (`distmp.commands.explain.fake_ranks`). Streams, events and
collectives are those of the code that runs, so the recorded order is what a GPU would have to keep.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.timeline import Kind, Operation
from distmp.commands.explain.fake_ranks import communicate
from distmp.commands.explain.trace_steps import Collective, started

aten = torch.ops.aten
FLASH = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
)
# They launch nothing.
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "detach_", "is_pinned"),
    *("device", "layout", "dim", "is_same_size"),
}
# They write to an argument that they do not read.
OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_"}
# They work on lists of tensors, more slowly than a copy; `_foreach_copy_` is as fast.
MANY_TENSORS = ("_foreach_norm", "_foreach_mul", "_fused_adam", "_amp_foreach")
# They read as many elements of their first argument as they return.
LOOKUPS = {"embedding", "gather", "index", "index_select"}
# They read and write as many bytes as one of their arguments has: its position.
COPIES = {"all_gather_copy_in": 0, "split_with_sizes_copy": 0, "scatter_add_": 3}


class StepRecorder(TorchDispatchMode):
    """Records the operations that are launched inside of it.

    Enter it inside of `simulate_ranks`, and create streams inside of `watched_streams`.

    Attributes:
        operations: The operations, in the order of their launches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        # What the next operation of each stream waits for: its last one, and those of events.
        self._frontiers: dict[object, tuple[int, ...]] = defaultdict(tuple)
        self._priorities: dict[object, int] = {}
        # C++ knows only the base class of works, and would lose their Python part.
        self._works: list[_RecordedWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operator of its local tensors
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional":
            self._communicate_functionally(name, args)
        elif name == "_local_scalar_dense":
            self.wait_on_host(self.frontier() if args[0].is_cuda else ())
        elif not func.is_view and name not in FREE and _on_gpu((args, kwargs, result)):
            self._add_kernel(func, args, kwargs, result)
        return result

    def frontier(self) -> tuple[int, ...]:
        """Return what an event waits for that is recorded on the current stream now."""
        return self._frontiers[_current()]

    def wait_on_stream(self, after: tuple[int, ...], stream: object | None = None) -> None:
        """Make the next operation of a stream, by default the current one, wait for others."""
        self._frontiers[_current() if stream is None else stream] += after

    def wait_on_host(self, after: tuple[int, ...]) -> None:
        """Make the host wait for operations."""
        if after:
            self.operations.append(Operation("wait", "wait", None, after))

    def _add(self, name: str, kind: Kind, *queues: object, **costs: Any) -> int:
        """Add an operation of the first queue, which waits for all of them."""
        after = {index for queue in queues for index in self._frontiers[queue]}
        priority = self._priorities.get(queues[0], 0)
        self.operations.append(
            Operation(name, kind, queues[0], (*sorted(after),), priority=priority, **costs)
        )
        self._frontiers[queues[0]] = (len(self.operations) - 1,)
        return len(self.operations) - 1

    def _add_kernel(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._add(
            func.overloadpacket.__name__,
            "kernel",
            _current(),
            nbytes=bytes_moved(func, args, kwargs, result),
            flops=_flops(func, args, kwargs, result),
            itemsize=_itemsize(args),
            many_tensors=func.overloadpacket.__name__.startswith(MANY_TENSORS),
        )
        if _blocks_host(func, args, kwargs, result):
            self.wait_on_host(self.frontier())

    def _communicate(self, func: Any, args: Any) -> Any:
        collective = started(func, args)
        work = _RecordedWork(self)
        if collective is not None:
            work.after = self._add_collective(collective, _group(args), _is_async(func, args))
        self._works.append(work)
        return communicate(func, args, work)

    def _communicate_functionally(self, name: str, args: Any) -> None:
        """Record a collective of DTensor, which only reduces numbers here."""
        if name == "wait_tensor":
            self.wait_on_stream(self._frontiers["functional"])
            return
        ranks = range(dist.get_world_size())
        collective = Collective("all-reduce", args[0].dtype, args[0].numel(), ranks, 0, False)
        self._frontiers["functional"] = self._add_collective(collective, "default", True)

    def _add_collective(
        self, collective: Collective, group: str, is_async: bool
    ) -> tuple[int, ...]:
        """Add a collective on the current stream, or on that of its group if it is asynchronous.

        A communicator runs its collectives in the order of their launches, on any stream.
        """
        queues = [_current(), group]
        index = self._add(
            collective.kind,
            "collective",
            *(reversed(queues) if is_async else queues),
            nbytes=collective.nbytes,
            between=collective.bytes_between_machines(8),
        )
        self._frontiers[group] = (index,)
        return (index,) if is_async else ()

    @contextlib.contextmanager
    def watched_streams(self) -> Iterator[None]:
        """Record the priorities of streams, and what they and the host wait for."""
        stream, event = torch.cuda.Stream, torch.cuda.Event
        create, record = stream.__new__, event.record

        def new(cls: Any, device: Any = None, priority: int = 0, **number: Any) -> Any:
            created = create(cls, device, priority, **number)
            if not number:
                self._priorities[created.stream_id] = priority
            return created

        def record_event(self_: Any, on: Any = None) -> None:
            record(self_, on or torch.cuda.current_stream())
            self_.after = self._frontiers[on.stream_id if on else _current()]

        def wait_event(self_: Any, waited: Any) -> None:
            self.wait_on_stream(getattr(waited, "after", ()), self_.stream_id)

        def wait(self_: Any, on: Any = None) -> None:
            self.wait_on_stream(getattr(self_, "after", ()), on and on.stream_id)

        def synchronize(self_: Any) -> None:
            self.wait_on_host(getattr(self_, "after", ()))

        def synchronize_stream(self_: Any) -> None:
            self.wait_on_host(self._frontiers[self_.stream_id])

        patches: dict[Any, dict[str, Any]] = {
            stream: {"__new__": new, "wait_event": wait_event, "synchronize": synchronize_stream},
            event: {"record": record_event, "wait": wait, "synchronize": synchronize},
        }
        flash = mock.patch.object(F, "scaled_dot_product_attention", _flash_attention)
        with contextlib.ExitStack() as stack, flash:
            for owner, methods in patches.items():
                for name, method in methods.items():
                    stack.enter_context(mock.patch.object(owner, name, method, create=True))
            yield


class _RecordedWork(dist.Work):
    """A collective; the current stream waits for it in `wait`."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.after: tuple[int, ...] = ()

    def wait(self, *timeout: Any) -> bool:
        self._recorder.wait_on_stream(self.after)
        return True


def bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes, as if it were one kernel."""
    name = func.overloadpacket.__name__
    if name in COPIES:
        return 2 * _bytes(args[COPIES[name]])
    if name in LOOKUPS:
        return 2 * _bytes(result) + _bytes(args[1:])
    schema = func._schema
    given = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
    moved = sum(_bytes(value) for value in given.values())
    for argument in schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = given.get(argument.name)
        if argument.name == "grads" and given.get("grad_scale") is None:
            continue  # fused optimizers write gradients only if they unscale them
        if not argument.is_out and name not in OVERWRITES:
            moved += _bytes(value)  # read and written
    if all(returned.alias_info is None for returned in schema.returns):
        moved += _bytes(result)
    return moved


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0
    if func.overloadpacket is aten.addmm:
        args, kwargs = args[:3], {}  # the formula does not take an output dtype
    # A causal kernel skips half of the products.
    skipped = 2 if func.overloadpacket in FLASH else 1
    return float(formula(*args, **kwargs, out_val=result)) / skipped


def _itemsize(args: Any) -> int:
    sizes = [leaf.dtype.itemsize for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return max(2, min(sizes, default=4))


def _bytes(values: Any) -> int:
    """Return the bytes of tensors on the GPU; an expanded dimension counts once."""
    return sum(
        leaf.dtype.itemsize
        * prod(size for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride)
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda"
    )


def _on_gpu(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(values))


def _blocks_host(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether an operator copies to the host and waits for the copy."""
    name = func.overloadpacket.__name__
    if name not in ("_to_copy", "copy_") or result.is_cuda:
        return False
    return not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def _is_async(func: Any, args: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    position = next(names.index(name) for name in ("asyncOp", "async_op") if name in names)
    return position >= len(args) or bool(args[position])  # omitted if it is True, the default


def _group(args: Any) -> str:
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return str(dist.ProcessGroup.unbox(leaf).group_name)
    raise AssertionError("a collective without a group")


def _current() -> int:
    return torch.cuda.current_stream().stream_id


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute attention by the kernel that a GPU would choose."""
    assert options["is_causal"]
    result: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
    return result
