"""Assigns parameters to flat buckets, and to offsets in them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distmp.errors import ConfigError, require
from distmp.utils.dtypes import is_dtensor

# In elements. Every parameter and every shard starts at a multiple, which in 16 bits, too, is a
# 64-byte boundary and suits vectorized kernels.
ALIGNMENT = 32
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
# Gloo is as fast with smaller buckets, and a reduction in flight needs the memory of one or two.
CPU_BUCKET_BYTES = 6 * 1024 * 1024


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket and their offsets in its flat buffer.

    Attributes:
        names: Names of the parameters in the model.
        parameters: The parameters, all with the same dtype and device.
        offsets: Index of the first element of each parameter in the flat buffer.
        size: Number of elements of the flat buffer, including padding; the padding is always zero.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    offsets: tuple[int, ...]
    size: int

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.parameters[0].device

    def shard(self, rank: int, world_size: int) -> slice:
        """Return the elements of the flat buffer that `rank` holds when it is sharded."""
        length = self.size // world_size
        return slice(rank * length, (rank + 1) * length)

    def shard_range(self, index: int, shard: slice) -> slice:
        """Return which elements of a flattened parameter, by its index, belong to a shard."""
        offset, size = self.offsets[index], self.parameters[index].numel()
        return slice(
            min(max(shard.start - offset, 0), size), min(max(shard.stop - offset, 0), size)
        )

    def shard_bounds(self, name: str, world_size: int) -> list[int]:
        """Return where the shards of a flattened parameter begin, and where the last one ends."""
        index = self.names.index(name)
        shards = (self.shard(rank, world_size) for rank in range(world_size))
        return [0, *(self.shard_range(index, shard).stop for shard in shards)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view for each parameter, in its shape and memory format.

        torch's fused optimizers on CPU read parameter and gradient as flat memory. They step wrong
        elements if the two have different memory formats, such as channels_last.

        Args:
            flat: A flat buffer, shape (size,).
        """
        return [
            flat.as_strided(parameter.shape, dense_strides(parameter), offset)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]


def refuse_changed(
    names: Iterable[str], current: list[int], known: list[int], problem: str
) -> None:
    """Refuse a parameter whose number, such as its address, is another one than was known.

    Raises:
        ConfigError: Naming the first one.
    """
    if current != known:
        changed = itertools.compress(names, map(operator.ne, current, known))
        raise ConfigError("model", next(changed), problem)


def check_parameters(named_parameters: Iterable[Any]) -> list[tuple[str, nn.Parameter]]:
    """Return named parameters as a list.

    Raises:
        ConfigError: For an entry that is not a name and a parameter, and for a parameter that needs
            no gradient, has a dtype that cannot be summed in FP32, or is not held in full.
    """
    expected = "use model.named_parameters(), without frozen parameters"
    problem = f"is not a list of names and parameters; {expected}"
    valid = isinstance(named_parameters, Iterable) and not isinstance(named_parameters, nn.Module)
    require(valid, "named_parameters", type(named_parameters).__name__, problem)
    by_name: dict[str, nn.Parameter] = {}
    entries = list(named_parameters)
    for entry in entries:
        problem = f"is not a pair (name, parameter); {expected}"
        valid = isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)
        require(valid, "named_parameters", type(entry).__name__, problem)
        name, parameter = entry
        if not isinstance(parameter, nn.Parameter):
            problem = f"is a {type(parameter).__name__}, not a parameter; {expected}"
        elif not parameter.requires_grad:
            problem = f"does not require a gradient; {expected}"
        elif parameter.dtype not in SUMMED_DTYPES:
            problem = f"is {parameter.dtype}; use parameters in float32, bfloat16 or float16"
        elif is_dtensor(parameter) or is_lazy(parameter) or parameter.is_meta:
            problem = "is a DTensor, lazy or on the meta device; use parameters held in full"
        elif by_name.setdefault(name, parameter) is not parameter:
            problem = "is the name of two parameters; use unique names"
        else:
            continue
        raise ConfigError("named_parameters", name, problem)
    require(bool(entries), "named_parameters", [], f"is empty; {expected}")
    return entries


def plan_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    bucket_bytes: int | None = None,
    multiple_of: int = ALIGNMENT,
) -> list[BucketLayout]:
    """Divide parameters into buckets in reverse order of registration.

    Backward computes gradients roughly in that order, so the first bucket is complete early and is
    reduced while backward continues. A parameter that is registered twice is in one bucket, under
    its first name.

    Args:
        named_parameters: Names and parameters, in order of registration.
        bucket_bytes: A bucket is closed once its FP32 buffer has this many bytes; None takes
            25 MiB, on CPUs 6 MiB.
        multiple_of: Number of elements; the size of every bucket is padded to a multiple of it. It
            has to be a multiple of `ALIGNMENT`.
    """
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in named_parameters:
        unique.setdefault(id(parameter), (name, parameter))
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(unique.values()):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
    return [
        _layout(run, multiple_of)
        for (device, _), entries in by_kind.items()
        for run in _cut_into_runs(
            entries,
            bucket_bytes or (CPU_BUCKET_BYTES if device.type == "cpu" else DEFAULT_BUCKET_BYTES),
        )
    ]


def _cut_into_runs(
    entries: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int
) -> list[list[tuple[str, nn.Parameter]]]:
    runs: list[list[tuple[str, nn.Parameter]]] = [[]]
    filled = 0
    for entry in entries:
        if filled >= bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(entry)
        filled += entry[1].numel() * torch.float32.itemsize
    return runs


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter if it is dense, otherwise those of a dense copy."""
    return torch.empty_like(parameter, device="meta").stride()


def _layout(run: Sequence[tuple[str, nn.Parameter]], multiple_of: int) -> BucketLayout:
    sizes = [_round_up(parameter.numel(), ALIGNMENT) for _, parameter in run]
    *offsets, end = itertools.accumulate(sizes, initial=0)
    names, parameters = zip(*run, strict=True)
    return BucketLayout(names, parameters, tuple(offsets), _round_up(max(end, 1), multiple_of))


def _round_up(count: int, multiple_of: int) -> int:
    return -(-count // multiple_of) * multiple_of
