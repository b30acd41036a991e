"""Digests of tensors that should be equal on all ranks.

A digest covers every bit: one flipped bit always changes it, any other change with a probability of
at least 1 - 2^-31. It does not depend on the type of the device, on strides or on the number of
threads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.precision.stochastic import INCREMENT, mixed
from distmp.utils.dtypes import dtype_name, is_dtensor
from distmp.utils.flat_shard import FlatShard
from distmp.utils.host_copy import to_device
from distmp.utils.tensor_trees import parameter_name

# Words per row sum. Part of the definition of a digest, so the same on every device.
ROW = 16384
# Rows per block, which does not change the digest. On a CPU a block fits into the cache.
ROWS_PER_BLOCK = {"cpu": 4}
DEFAULT_ROWS_PER_BLOCK = 256
# Integer type that a tensor is read as, by bytes per element; wider elements are read as int32.
WORDS = {1: torch.uint8, 2: torch.int16}

MASK = 2**64 - 1


def describe(
    module: nn.Module, state: Mapping[str, Tensor], device: torch.device
) -> dict[str, str]:
    """Return the replicated tensors of a module and a state as text with digests, by name."""
    tensors = _replicated_tensors(module, state)
    found = digests(tensors, device).tolist()
    return {
        name: f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)} {digest & MASK:016x}"
        for (name, tensor), digest in zip(tensors.items(), found, strict=True)
    }


def digests(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return a digest of the bits of each tensor, int64 of shape (len(tensors),), on `device`.

    Equal bits in the same logical order give equal digests for any strides and device.
    """
    sums = [to_device(_row_sums(tensor.detach()), device) for tensor in tensors.values()]
    counts = [len(rows) for rows in sums]
    # For each row the index of its tensor, and the index of the row in the tensor.
    indices = [[index, row] for index, count in enumerate(counts) for row in range(count)]
    owners, rows = torch.tensor(indices, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    hashes = mixed(torch.cat([empty, *sums]) + rows * INCREMENT)
    return torch.zeros(len(counts), dtype=torch.int64, device=device).index_add_(0, owners, hashes)


def _row_sums(tensor: Tensor) -> Tensor:
    """Return the weighted sum of the words of each row; the weight of a column is an odd number."""
    words = tensor.reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))
    weights = _weights(tensor.device)
    max_rows = ROWS_PER_BLOCK.get(tensor.device.type, DEFAULT_ROWS_PER_BLOCK)
    sums = []
    for chunk in words.split(max_rows * ROW):
        padded = functional.pad(chunk.to(torch.int64), (0, -len(chunk) % ROW))
        sums.append(padded.unflatten(0, (len(padded) // ROW, ROW)).mul(weights).sum(1))
    return torch.cat(sums)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return the weight of each column, int64 of shape (ROW,)."""
    columns = torch.arange(1, ROW + 1, dtype=torch.int64, device=device)
    return mixed(columns * INCREMENT) | 1


def _replicated_tensors(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local tensors that should be equal on all ranks."""
    names = (name for name, _ in module.named_buffers(remove_duplicate=False))
    buffers = {f"model/{parameter_name(name)}" for name in names}
    entries = {name: tensor for name, tensor in state.items() if name not in buffers}
    for name, parameter in module.named_parameters():
        entries[f"module/{name}"] = parameter.detach()
    replicated: dict[object, tuple[str, Tensor]] = {}
    for name, tensor in entries.items():
        if (local := _local(tensor)) is not None:
            # Without 16-bit parameters the module's parameters are the FP32 weights.
            memory = (local.data_ptr(), local.dtype) if local.numel() else name
            replicated.setdefault(memory, (name, local))
    return dict(replicated.values())


def _local(tensor: Tensor) -> Tensor | None:
    """Return the local values of a replicated tensor; None for a shard."""
    if isinstance(tensor, FlatShard):
        return None
    if is_dtensor(tensor) and all(part.is_replicate() for part in tensor.placements):
        return tensor.to_local()
    return None if is_traceable_wrapper_subclass(tensor) else tensor
