"""Gathers values per sample from all ranks, each sample once and in order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from distmp.distributed.compare_ranks import raise_difference
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.utils.dtypes import dtype_name

T = TypeVar("T")


class _Offer(NamedTuple):
    """What a rank contributes, without its values.

    Attributes:
        rows: Number of rows.
        described: Structure, dtypes and row shapes as text by name; the same on all ranks.
        problem: Arguments of a `ConfigError` if the rank cannot contribute; None if it can.
    """

    rows: int
    described: dict[str, str]
    problem: tuple[str, str, str] | None


def gather_rows(values: T, samples: Tensor | None, world: World) -> T:
    """Gather values per sample from all ranks; see `Engine.gather`."""
    leaves, structure = pytree.tree_flatten(values)
    tensors = leaves if samples is None else [*leaves, samples]
    offer = _offer(tensors, structure, has_samples=samples is not None)
    offers = world.ranks.gather(offer)
    for rank, other in enumerate(offers):
        if other.problem is not None:
            setting, value, problem = other.problem
            raise ConfigError(setting, value, f"{problem} (rank {rank})")
    if any(other.described != offer.described for other in offers):
        raise_difference(world.group, offer.described)
    gathered = _all_gather(tensors, [other.rows for other in offers], world)
    if samples is not None:
        chosen = _once_in_order(gathered.pop())
        gathered = [tensor[chosen.to(tensor.device)] for tensor in gathered]
    return pytree.tree_unflatten(gathered, structure)


def _offer(tensors: list[Any], structure: pytree.TreeSpec, *, has_samples: bool) -> _Offer:
    problem = _problem(tensors, has_samples=has_samples)
    if problem is not None:
        return _Offer(0, {}, problem)
    described = {"structure of values": str(structure)}
    for index, tensor in enumerate(tensors):
        described[f"tensor {index} of values"] = (
            f"rows of shape {tuple(tensor.shape[1:])} and {dtype_name(tensor.dtype)}"
        )
    return _Offer(_rows(tensors[0]), described, None)


def _problem(tensors: list[Any], *, has_samples: bool) -> tuple[str, str, str] | None:
    """Return why these values cannot be gathered, as the arguments of a `ConfigError`."""
    if not tensors:
        return "values", "{}", "has no tensor to gather"
    for index, tensor in enumerate(tensors):
        name = "samples" if has_samples and index == len(tensors) - 1 else "values"
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            return name, kind, "is not a tensor; gather tensors with a row for each sample"
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return name, str(tensor.layout), "is not a dense tensor; use to_dense() or dequantize()"
    if has_samples and (tensors[-1].dim() != 1 or not _is_integer(tensors[-1])):
        text = f"{tuple(tensors[-1].shape)} and {dtype_name(tensors[-1].dtype)}"
        return "samples", text, "must be integers of shape (rows,), the indices of the samples"
    counts = sorted({_rows(tensor) for tensor in tensors})
    if len(counts) > 1:
        problem = "must be the same in all tensors, which have a row for each sample"
        return "number of rows", " and ".join(map(str, counts)), problem
    return None


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _all_gather(tensors: list[Tensor], rows: list[int], world: World) -> list[Tensor]:
    """Return the rows of all ranks, in rank order, with one collective for all tensors.

    The tensors are exchanged as bytes, which gather any dtype: gloo and NCCL lack some.

    Args:
        tensors: The tensors of this rank.
        rows: Number of rows of each rank.
        world: The ranks.
    """
    parts = [_as_bytes(tensor.detach().to(world.device)) for tensor in tensors]
    row_bytes = [math.prod(tensor.shape[1:]) * tensor.itemsize for tensor in tensors]
    own = torch.cat(parts)
    if world.group is None:
        received = [own]
    else:
        longest = max(rows) * sum(row_bytes)
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        received = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(received, padded, group=world.group)
    by_rank = [
        buffer[: count * sum(row_bytes)].split([count * size for size in row_bytes])
        for buffer, count in zip(received, rows, strict=True)
    ]
    # `cat` copies, so that the bytes are aligned for any dtype.
    return [
        torch.cat(pieces).view(tensor.dtype).view(sum(rows), *tensor.shape[1:]).to(tensor.device)
        for tensor, pieces in zip(tensors, zip(*by_rank, strict=True), strict=True)
    ]


def _as_bytes(tensor: Tensor) -> Tensor:
    # A column of a matrix cannot be viewed as bytes, nor can a conjugate. `contiguous` would keep
    # the stride of a column with one row.
    values = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return values.reshape(-1).view(torch.uint8)


def _once_in_order(samples: Tensor) -> Tensor:
    """Return the indices of the rows to keep: the first of each sample, sorted by sample."""
    numbers, order = samples.sort(stable=True)
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[1:] = numbers[1:] != numbers[:-1]
    return order[is_first & (numbers >= 0)]
