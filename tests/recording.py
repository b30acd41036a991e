"""Records what torch executes: collectives, and operations that make the host wait."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.distributed.world import World


class Collectives(TorchDispatchMode):
    """Records every collective that starts in the context, with its first tensor.

    Attributes:
        found: Name of each c10d operation and address of its first tensor, in order.
        sent: Dtype and number of elements of the same tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        self.sent: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self.found.append((func.overloadpacket.__name__, tensors[0].data_ptr()))
            self.sent.append((tensors[0].dtype, tensors[0].numel()))
        return func(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        """Return the names of the operations, in order."""
        return [name for name, _ in self.found]

    def addresses(self, name: str) -> list[int]:
        """Return the addresses of the first tensors of operations called `name`, in order."""
        return [address for found, address in self.found if found == name]


class Operators(TorchDispatchMode):
    """Counts the operations that torch dispatches in the context; most of them launch a kernel.

    Attributes:
        counts: Number of calls of each operation, by names such as "aten::copy_".
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[f"{func.namespace}::{func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


aten = torch.ops.aten
# Operations that return a value, or a shape that depends on values, to the host, or create a tensor
# from Python values.
READS = (
    aten._local_scalar_dense,
    aten.equal,
    aten.lift_fresh,
    aten.masked_select,
    aten.nonzero,
    aten._unique2,
)


class HostReads(TorchDispatchMode):
    """Records the operations in which, on CUDA, the host waits for the device.

    Attributes:
        found: Names of the operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS or _indexes_by_mask(func, args):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _indexes_by_mask(func: Any, args: Any) -> bool:
    """Return whether an operation has to count the elements that a mask selects."""
    return func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise if the host waits for a CUDA device.

    Fake devices also notice what torch does not: waits for a stream or for the whole device, and
    copies from memory that is not pinned, for which the host of a real device may wait.

    Ranks that share a real device communicate over gloo, whose collectives wait on the host: there,
    nothing is checked.
    """
    torch.cuda.synchronize()
    fake: Any = sys.modules.get("tests.fake_cuda.device")
    if fake is None and World.current("cuda").backend == "gloo":
        yield
        return
    if fake is not None:
        fake.take_counters()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if fake is not None:
        counters = fake.take_counters()
        # An event of an earlier step is past on a real device; a fake one runs as late as it may.
        del counters.waits["event.synchronize"]
        assert not counters.waits, f"the host waited: {dict(counters.waits)}"
        assert counters.pageable_copies == 0, "copied from memory that is not pinned"
