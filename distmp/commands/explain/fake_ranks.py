"""Simulate one of any number of ranks in one process, without the memory of the model.

Tensors of the model are torch's fake tensors: they have shapes, dtypes and a device, but no values.
Collectives return immediately, as if every other rank had the same data. The real engine runs on
them. Of `distmp.commands.explain`, only this file uses private parts of torch.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import TorchDispatchMode

from distmp.buckets import reduction
from distmp.engine.outcome import StepOutcome
from distmp.errors import ConfigError, SetupError
from distmp.parallel import fsdp_internals
from distmp.parallel.collective_order import CollectiveOrder
from distmp.parallel.reproducible import CUBLAS_VARIABLE, CUBLAS_WORKSPACES
from distmp.scaling.step_decision import StepDecision
from distmp.utils.tensor_trees import tensors_in

# Integer tensors up to this size (counts, token ids of a batch, bucket orders) are real, because
# the host may read them.
MAX_REAL_ELEMENTS = 2**20

aten = torch.ops.aten


class FakeRanks(TorchDispatchMode):
    """Replaces other ranks by fake collectives, and makes floating-point and large tensors fake."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := fake_device(func, args)) is not None:
            return device
        if func.namespace == "c10d":
            return communicate(func, args)
        kwargs, is_fake = kwargs or {}, FakeTensor in types
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._pin_memory.default and isinstance(args[0], FakeTensor):
            return args[0]
        is_factory = not (is_fake or tensors_in((args, kwargs)))
        if is_factory and (large := self._large(func, args, kwargs)) is not None:
            return large
        if func is aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        if is_fake and not func._schema.returns:
            return None  # a fused optimizer, which writes in place
        return func(*args, **kwargs)

    def _large(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the fake tensor that a factory creates for the model; None for one of the host."""
        with self._fake:
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return None
        # `torch.load` replaces the memory of empty tensors by that of a file.
        of_model = result.is_floating_point() and result.dim() > 0 and result.numel() > 0
        return result if of_model or result.numel() > MAX_REAL_ELEMENTS else None


def fake_device(func: Any, args: Any) -> torch.device | None:
    """Return the device of a fake tensor if an operation asks for it.

    Two thirds of the operations on fake tensors are such questions of torch's own. A mode that
    answers them saves the way through the modes below it.
    """
    is_asked = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
    return args[0].fake_device if is_asked else None


def _without_masks(indices: Any) -> list[Any]:
    """Replace real masks by indices, because fake tensors cannot be indexed with a mask."""
    result: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        if is_mask and not isinstance(index, FakeTensor):
            result.extend(index.nonzero().unbind(1))
        else:
            result.append(index)
    return result


def communicate(func: Any, args: Any, work: dist.Work | None = None) -> Any:
    """Return the result of a collective; only `allgather_` writes data, that of this rank.

    Args:
        func: The c10d operation.
        args: Its arguments.
        work: The work that it returns; None: one that is complete.
    """
    if func is torch.ops.c10d.allgather_.default:
        # Ranks compare these values: pretend that all ranks have the same ones.
        for outputs, value in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(value)
    boxed = (work or c10d.FakeWork()).boxed()
    tensors = [argument for argument in args if isinstance(argument, (Tensor, list))]
    results = [
        boxed if "Work" in str(returned.type) else tensors[index]
        for index, returned in enumerate(func._schema.returns)
    ]
    return tuple(results) if len(results) > 1 else results[0]


class SetDataMode(TorchFunctionMode):
    """Makes `parameter.data = tensor` also set the device of a fake parameter.

    torch updates only its shape and dtype. Models, `nn.Module.to` and FSDP2 move parameters in this
    way.
    """

    _SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == self._SET_DATA and isinstance(args[0], FakeTensor):
            args[0].fake_device = args[1].device
        return result


@contextlib.contextmanager
def simulate_ranks(
    world_size: int, ranks_per_machine: int | None = None, *, group: bool = True
) -> Iterator[None]:
    """Simulate rank 0 of `world_size` ranks inside the context.

    Args:
        world_size: Number of ranks.
        ranks_per_machine: Number of ranks on each machine; None: all of them.
        group: Whether to create a process group for a single rank; several ranks always have one.
    """
    if dist.is_initialized():
        raise SetupError(
            {0: "explain simulates all ranks in one process; do not start it with torchrun"},
            exit_code=2,
        )
    group = group or world_size > 1
    # Nothing is computed: CUDA may have been initialized without the variable.
    cublas = {CUBLAS_VARIABLE: os.environ.get(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])}
    with (
        mock.patch.dict(os.environ, cublas),
        fake_ranks(world_size, ranks_per_machine, group=group),
        _missing_values_refused(),
        mock.patch.object(nn.Module, "_apply", _apply),
        mock.patch(fsdp_internals.CHUNKS, _first_chunk),
        # One operation sums the shards of all ranks: nothing stays in a cache.
        mock.patch.dict(reduction.SUMS_PER_BLOCK, clear=True),
        SetDataMode(),
        FakeRanks(),
        warnings.catch_warnings(),
    ):
        # Buckets compare the addresses of parameters, and read nothing there.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextlib.contextmanager
def fake_ranks(
    world_size: int, ranks_per_machine: int | None = None, *, group: bool = True
) -> Iterator[None]:
    """Make this process rank 0 of `world_size` ranks, which are not compared with each other.

    The arguments are those of `simulate_ranks`. Collectives need `FakeRanks`.
    """
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks_per_machine or world_size)}
    if group:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    original = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "backend": None})

    try:
        with (
            mock.patch.dict(os.environ, local if group else {}),
            mock.patch.object(dist, "new_group", new_group),
            # Values are not real, and ranks cannot differ.
            mock.patch.object(StepOutcome, "ranks_differ", False),
            mock.patch.object(CollectiveOrder, "_compare"),
        ):
            yield
    finally:
        if group:
            dist.destroy_process_group()


def applied_steps() -> contextlib.AbstractContextManager[object]:
    """Apply every step inside the context: without values, the host would read an overflow."""
    found_inf = property(lambda self: torch.zeros((), device=self.sums.device), lambda *_: None)
    return mock.patch.object(StepDecision, "found_inf", found_inf, create=True)


@contextlib.contextmanager
def _missing_values_refused() -> Iterator[None]:
    try:
        yield
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    ) as error:
        cause = f"cannot be traced without the values of its tensors, at the operation {error.func}"
        raise ConfigError("model.name", "the model or its loss", cause) from error


def _first_chunk(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Return the part of rank 0 for every rank: computing all parts would take minutes."""
    rows = -(-tensor.size(dim) // ranks)
    return ranks * [tensor.narrow(dim, 0, rows)]


def _apply(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """Convert parameters and buffers in place; `nn.Module._apply` would swap fake tensors."""
    for child in module.children() if recurse else ():
        child._apply(convert)
    with torch.no_grad():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = convert(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
    return module
