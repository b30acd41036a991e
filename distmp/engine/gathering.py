"""Gathers values per sample from all ranks, each sample once and in order."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distmp.distributed.compare_ranks import raise_difference
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.utils.dtypes import dtype_name

T = TypeVar("T")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(values: T, samples: Tensor | None, world: World) -> T:
    """Gather values per sample from all ranks; see `Engine.gather`."""
    leaves, structure = pytree.tree_flatten(values)
    tensors = leaves if samples is None else [*leaves, samples]
    problem = _problem(tensors, has_samples=samples is not None)
    described: dict[str, str] = {}
    own: list[Tensor] = []
    if problem is None:
        described = {"structure of values": str(structure)}
        described |= {f"tensor {i} of values": _described(t) for i, t in enumerate(tensors)}
        own = [_as_integers(tensor) for tensor in tensors]
    by_rank = world.ranks.gather((problem, described, own))
    for rank, (found, _, _) in enumerate(by_rank):
        if found is not None:
            setting, value, text = found
            raise ConfigError(setting, value, f"{text} (rank {rank})")
    if any(other != described for _, other, _ in by_rank):
        raise_difference(world.group, described)
    pieces = zip(*(rows for _, _, rows in by_rank), strict=True)
    gathered = [
        torch.cat(rows).view(tensor.dtype).to(tensor.device)
        for rows, tensor in zip(pieces, tensors, strict=True)
    ]
    if samples is not None:
        chosen = _once_in_order(gathered.pop())
        gathered = [tensor[chosen.to(tensor.device)] for tensor in gathered]
    return pytree.tree_unflatten(gathered, structure)


def _problem(tensors: list[Any], *, has_samples: bool) -> tuple[str, str, str] | None:
    """Return why these values cannot be gathered, as the arguments of a `ConfigError`."""
    if not tensors:
        return "values", "{}", "has no tensor to gather"
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            return "values", kind, "is not a tensor; gather tensors with a row for each sample"
    if has_samples and (tensors[-1].dim() != 1 or tensors[-1].is_floating_point()):
        text = f"{tuple(tensors[-1].shape)} and {dtype_name(tensors[-1].dtype)}"
        return "samples", text, "must be integers of shape (rows,), the indices of the samples"
    counts = sorted({len(torch.atleast_1d(tensor)) for tensor in tensors})
    if len(counts) > 1:
        problem = "must be the same in all tensors, which have a row for each sample"
        return "number of rows", " and ".join(map(str, counts)), problem
    return None


def _described(tensor: Tensor) -> str:
    return f"rows of shape {tuple(tensor.shape[1:])} and {dtype_name(tensor.dtype)}"


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, as integers: torch does not unpickle every dtype."""
    # A copy leaves out the rest of the memory that a view keeps alive.
    rows = torch.atleast_1d(tensor.detach().resolve_conj().resolve_neg()).cpu()
    rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(_INTEGERS.get(rows.itemsize, rows.dtype))


def _once_in_order(samples: Tensor) -> Tensor:
    """Return the indices of the rows to keep: the first of each sample, sorted by sample."""
    numbers, order = samples.sort(stable=True)
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[1:] = numbers[1:] != numbers[:-1]
    return order[is_first & (numbers >= 0)]
