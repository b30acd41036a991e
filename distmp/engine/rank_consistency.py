"""Compares replicated weights and state between ranks, bit by bit.

Replicas stay equal by induction: equal weights, equal reduced gradients, equal updates. Faulty
memory, a nondeterministic library or code that only one rank runs break this silently. A digest is
computed of every tensor on its device, and one digest of all of these. One collective of two
integers shows whether the ranks agree; only if they do not, the digests are exchanged.

A digest covers every bit: one flipped bit always changes it, any other change with a probability of
at least 1 - 2^-31. It does not depend on the type of the device, on strides or on the number of
threads.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import TrainingError, rank_names
from distmp.utils.dtensor import is_dtensor
from distmp.utils.flat_shard import FlatShard
from distmp.utils.host_copy import to_device

if TYPE_CHECKING:
    from distmp.engine.engine import Engine

# Words per row sum. Part of the definition of a digest, so the same on every device.
ROW = 16384
# Rows per block, which does not change the digest. On a CPU a block fits into the cache.
ROWS_PER_BLOCK = {"cpu": 4}
DEFAULT_ROWS_PER_BLOCK = 256
# Integer type that a tensor is read as, by bytes per element; wider elements are read as int32.
WORDS = {1: torch.uint8, 2: torch.int16}

# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SHIFTS = (30, 27, 31)


class Difference(NamedTuple):
    """A difference between ranks.

    Attributes:
        name: Name of the first tensor that differs.
        deviating: Ranks whose values are not those of most ranks (without a majority, not those of
            rank 0).
        others: The other ranks.
        differing: Number of tensors that differ between any ranks.
        compared: Number of tensors that were compared.
        same_specs: Whether tensors differ only in their values, not in name, shape or dtype.
    """

    name: str
    deviating: tuple[int, ...]
    others: tuple[int, ...]
    differing: int
    compared: int
    same_specs: bool

    def __str__(self) -> str:
        return (
            f"{_describe(self.name)} of {rank_names(self.deviating)} differs from that of "
            f"{rank_names(self.others)} ({self.differing} of {self.compared} tensors differ)"
        )


def check(engine: Engine, average: Mapping[str, Tensor] | None = None) -> None:
    """Compare the replicated tensors of an engine between ranks; every rank has to call it.

    Compares weights, 16-bit parameters, optimizer state, loss scale and step counts. Shards and
    buffers differ by design and are not compared: buffers follow the samples of each rank. The host
    waits for the device.

    Args:
        engine: An engine, between two steps.
        average: The `values` of a `WeightAverage`, to compare them, too.

    Raises:
        TrainingError: On every rank, for a difference.
    """
    world = engine.world
    if world.group is None:
        return
    tensors = _replicated_tensors(engine.module, engine.state_dict())
    for name, value in (average or {}).items():
        if (local := _local(value)) is not None:
            tensors[f"ema/{name}"] = local
    difference = compare(tensors, world.group, world.device)
    if difference is not None:
        raise TrainingError(_advice(difference))


def compare(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device
) -> Difference | None:
    """Return the first difference between the ranks of a group, or None.

    Every rank of the group has to call it.

    Args:
        tensors: Tensors by name that should have the same bits on every rank. Names, shapes and
            dtypes are compared too, so they may differ between ranks.
        group: The ranks.
        device: Device of the group's collectives.
    """
    own_digests = digests(tensors, device)
    specs = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    keys = torch.tensor([_hash_text(spec) for spec in specs], dtype=torch.int64, device=device)
    total = _mix(own_digests + keys).sum()
    # ~ reverses the order of all integers, so one maximum also yields the smallest total.
    extremes = torch.stack([total, ~total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    largest, smallest_reversed = extremes.tolist()
    if largest == ~smallest_reversed:
        return None
    entries = {
        name: (spec, digest)
        for name, spec, digest in zip(tensors, specs, own_digests.tolist(), strict=True)
    }
    by_rank: list[dict[str, tuple[str, int]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, entries, group)
    return _first_difference(by_rank, dist.get_process_group_ranks(group))


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
    mixed = _mix(torch.cat([empty, *sums]) + rows * GOLDEN)
    return torch.zeros(len(counts), dtype=torch.int64, device=device).index_add_(0, owners, mixed)


def _row_sums(tensor: Tensor) -> Tensor:
    """Return the weighted sum of the words of each row; the weight of a column is an odd number."""
    words = tensor.reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))
    weights = _weights(tensor.device)
    max_rows = ROWS_PER_BLOCK.get(tensor.device.type, DEFAULT_ROWS_PER_BLOCK)
    buffer = torch.empty(
        min(max_rows, -(-len(words) // ROW)) * ROW, dtype=torch.int64, device=tensor.device
    )
    sums = []
    for chunk in words.split(max(1, len(buffer))):
        block = buffer[: -(-len(chunk) // ROW) * ROW]
        block[: len(chunk)].copy_(chunk)
        block[len(chunk) :].zero_()
        sums.append(block.view(-1, ROW).mul_(weights).sum(1))
    return torch.cat(sums)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return the weight of each column, int64 of shape (ROW,)."""
    columns = torch.arange(1, ROW + 1, dtype=torch.int64, device=device)
    return _mix(columns * GOLDEN) | 1


def _mix(values: Tensor) -> Tensor:
    """Return a hash of each int64 number; different numbers have different hashes (splitmix64)."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        # >> copies the sign bit; the mask removes the copies.
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return values


def _hash_text(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _replicated_tensors(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local tensors that should be equal on all ranks."""
    buffers = {f"model/{name}" for name, _ in module.named_buffers(remove_duplicate=False)}
    entries = {name: tensor for name, tensor in state.items() if name not in buffers}
    for name, parameter in module.named_parameters():
        entries[f"module/{name}"] = parameter.detach()
    replicated: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.dtype]] = set()
    for name, tensor in entries.items():
        local = _local(tensor)
        if local is None:
            continue
        # Without 16-bit parameters the module's parameters are the FP32 weights.
        memory = (local.data_ptr(), local.dtype)
        if local.numel() and memory in seen:
            continue
        seen.add(memory)
        replicated[name] = local
    return replicated


def _local(tensor: Tensor) -> Tensor | None:
    """Return the local values of a replicated tensor; None for a shard."""
    if isinstance(tensor, FlatShard):
        return None
    if is_dtensor(tensor) and all(part.is_replicate() for part in tensor.placements):
        return tensor.to_local()
    return None if is_traceable_wrapper_subclass(tensor) else tensor


def _first_difference(
    by_rank: Sequence[Mapping[str, tuple[str, int]]], ranks: Sequence[int]
) -> Difference:
    """Return the first difference between the entries of ranks, of which there is at least one."""
    names = list(dict.fromkeys(name for entries in by_rank for name in entries))
    versions = {name: [entries.get(name) for entries in by_rank] for name in names}
    differing = [name for name in names if len(set(versions[name])) > 1]
    first = versions[differing[0]]
    # Without a majority `most_common` returns the version that it saw first, that of rank 0.
    usual, _ = Counter(first).most_common(1)[0]
    specs = [{name: spec for name, (spec, _) in entries.items()} for entries in by_rank]
    return Difference(
        name=differing[0],
        deviating=tuple(rank for rank, one in zip(ranks, first, strict=True) if one != usual),
        others=tuple(rank for rank, one in zip(ranks, first, strict=True) if one == usual),
        differing=len(differing),
        compared=len(names),
        same_specs=all(spec == specs[0] for spec in specs),
    )


def _describe(name: str) -> str:
    section, _, rest = name.partition("/")
    if section == "loss_scale":
        return "the loss scale" if rest == "value" else f"the loss scale's {rest}"
    titles = {
        "model": "parameter",
        "module": "16-bit parameter",
        "optimizer": "optimizer state",
        "engine": "the engine's",
        "ema": "the average (EMA) of",
    }
    return f"{titles[section]} {rest!r}" if section in titles else repr(name)


def _advice(difference: Difference) -> str:
    message = f"ranks differ: {difference}; "
    if not difference.same_specs:
        return message + "names, shapes or dtypes differ: give every rank the same model"
    return message + (
        "continue from a checkpoint with --resume, and check the hardware of that machine if it "
        "happens again"
    )
