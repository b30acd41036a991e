"""Norms and sums of gradients in a fixed order, without waiting for the device.

Sums of `chunk_norms` have bits that depend on the number of ranks. `chunk_squares` and
`pairwise_sums` take longer, and give the same bits on any 2^k ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from distmp.utils.host_copy import cpu_number

# Number of elements per norm on the CPU: enough to keep a core busy.
CHUNK = 2**14
# Number of small tensors above which one call takes less time than a loop in Python.
FEW = 8
# Number of elements that are copied at once to scale them.
_BLOCK = 64 * CHUNK
# Smallest norm for which an FP32 sum of squares is precise, although small squares underflow.
_PRECISE_FROM = 2.0**-40


def summed(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of 0-dim tensors, 0-dim; FP64 zero if there are none.

    Starting from zero would launch two more kernels.
    """
    if not numbers:
        return torch.zeros((), dtype=torch.float64, device=device)
    return reduce(operator.add, numbers)


def chunk_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms of chunks of the tensors, in a fixed order; finite for finite values.

    On the CPU torch computes the norm of a tensor on a single thread, at half the bandwidth of two,
    but distributes the rows of a matrix over all threads. Sums in FP64 take 20 times as long there,
    so only squares that FP32 cannot represent are computed again.

    Args:
        tensors: One or more dense tensors with the same device and dtype.

    Returns:
        1-dim, FP64. On CUDA one chunk per tensor.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    small = [tensor for tensor in tensors if tensor.numel() <= CHUNK]
    large = [tensor for tensor in tensors if tensor.numel() > CHUNK]
    if len(small) <= FEW:
        small, large = [], tensors
    parts = [part for tensor in large for part in _by_rows(tensor)]
    if small:
        dtype = torch.promote_types(small[0].dtype, torch.float32)
        parts.append(torch.stack(torch._foreach_norm(small, 2, dtype=dtype)))
    norms = torch.cat(parts).double()
    if _PRECISE_FROM <= cpu_number(norms.amax()) < math.inf:
        return norms
    return _of_scaled(tensors, norms)


def _by_rows(tensor: Tensor) -> Iterator[Tensor]:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    flat = tensor.reshape(-1)
    rows = flat.numel() // CHUNK * CHUNK
    if rows:
        yield torch.linalg.vector_norm(flat[:rows].view(-1, CHUNK), dim=1, dtype=dtype)
    if rows < flat.numel():
        yield torch.linalg.vector_norm(flat[rows:], dtype=dtype).view(1)


def _of_scaled(tensors: list[Tensor], norms: Tensor) -> Tensor:
    """Compute the norms again from values that a power of two scales to magnitudes below 1."""
    limits = torch.stack([limit.double() for tensor in tensors for limit in tensor.aminmax()])
    largest = cpu_number(limits.abs().amax())
    if not 0 < largest < math.inf:
        return norms
    exponent = max(math.frexp(largest)[1], -126)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    parts = (
        part
        for tensor in tensors
        for block in tensor.reshape(-1).split(_BLOCK)
        for part in _by_rows(block.to(dtype) * 2.0**-exponent)
    )
    return torch.cat([*parts]).double() * 2.0**exponent


# Number of elements that are squared at once; it does not change the bits. On a CPU a block fits
# into the cache. On a GPU a block takes 16 launches and 8 bytes per element: at most 128 MiB.
ELEMENTS_PER_BLOCK = {"cpu": 16 * CHUNK}
DEFAULT_ELEMENTS_PER_BLOCK = 2**24
# Leaves of a subtree, a power of two. The chunks of a bucket of 25 MiB fit into one.
SUBTREE = 512


def chunk_squares(shards: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each chunk of `CHUNK` elements of the shards, 1-dim FP64.

    Uses element-wise operations only: the order in which torch's reductions add their terms depends
    on the shape and the device.

    Args:
        shards: 1-dim FP32 on one device; the number of elements is a multiple of `CHUNK`.
    """
    device = shards[0].device
    size = ELEMENTS_PER_BLOCK.get(device.type, DEFAULT_ELEMENTS_PER_BLOCK)
    elements = sum(len(shard) for shard in shards)
    # Allocated once: a CPU may return freed memory to the system, and clear it for each block.
    buffer = torch.empty(min(size, elements), dtype=torch.float64, device=device)
    return torch.cat([_squares_of_block(block, buffer) for block in _blocks(shards, size)])


def pairwise_sums(parts: Sequence[Tensor]) -> Tensor:
    """Sum each 1-dim tensor as a balanced binary tree; zeros at the end do not change the bits.

    One operation computes a level of all trees: the longest tensor determines the launches.

    Args:
        parts: At least one tensor; all have the same dtype and device, and at least one element.

    Returns:
        The sums, 1-dim, of shape (number of tensors,).
    """
    zeros = parts[0].new_zeros(SUBTREE)
    while any(len(part) > 1 for part in parts):
        padded = [leaves for part in parts for leaves in (part, zeros[: -len(part) % SUBTREE])]
        rows = torch.cat(padded).view(-1, SUBTREE)
        while rows.shape[1] > 1:
            rows = rows[:, ::2] + rows[:, 1::2]
        parts = rows[:, 0].split([-(-len(part) // SUBTREE) for part in parts])
    return torch.cat([*parts])


def _blocks(shards: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield blocks of up to `size` elements, in order; split large shards and join small ones."""
    block: list[Tensor] = []
    filled = 0
    for piece in (piece for shard in shards for piece in shard.split(size)):
        if filled + len(piece) > size:
            yield block
            block, filled = [], 0
        block.append(piece)
        filled += len(piece)
    yield block


def _squares_of_block(block: list[Tensor], buffer: Tensor) -> Tensor:
    lengths = [len(piece) for piece in block]
    values = buffer[: sum(lengths)]
    torch._foreach_copy_(values.split(lengths), block)
    sums = values.square_().view(-1, CHUNK)
    while sums.shape[1] > 2:
        left, right = sums.chunk(2, dim=1)
        sums = left.add_(right)
    return sums[:, 0] + sums[:, 1]
