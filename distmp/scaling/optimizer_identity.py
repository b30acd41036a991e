"""Tells the optimizers of a rank apart in a way that other ranks can compare.

An optimizer has no name. What replicas have in common is its class, its options, the shapes of its
parameters and, where a rank holds them in full, their values.
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.scaling.local_gradients import parameters

# Values that are compared: of so many parameters, so many each.
SAMPLED_PARAMETERS = 32
SAMPLED_VALUES = 4


class OptimizerIdentity(NamedTuple):
    """What replicas of one optimizer have in common.

    Attributes:
        digest: Of class, options, shapes and sampled values.
        text: Class, number of parameters and first shape, for a message.
    """

    digest: int
    text: str


def identify(optimizer: torch.optim.Optimizer) -> OptimizerIdentity:
    """Return the identity of an optimizer as it is now; waits for the device."""
    shapes = [tuple(parameter.shape) for parameter in parameters(optimizer)]
    options = [
        {name: value for name, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]
    name = type(optimizer).__name__
    everything = repr((name, options, shapes, _sampled_values(optimizer)))
    count = f"{len(shapes)} parameter{'s' if len(shapes) != 1 else ''}"
    first = f", the first of shape {shapes[0]}" if shapes else ""
    return OptimizerIdentity(zlib.crc32(everything.encode()), f"{name} with {count}{first}")


def all_identities() -> list[int]:
    """Return the digests of all optimizers that exist in this process.

    It searches the heap, which takes a moment: for the case that ranks already seem to differ.
    """
    found = [
        candidate
        for candidate in gc.get_objects()
        # Not isinstance: it asks proxies for their class, and some compute it.
        if issubclass(type(candidate), torch.optim.Optimizer) and hasattr(candidate, "param_groups")
    ]
    return [identify(optimizer).digest for optimizer in found]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


@torch.no_grad()
def _sampled_values(optimizer: torch.optim.Optimizer) -> list[float]:
    sampled = itertools.islice(_whole(parameters(optimizer)), SAMPLED_PARAMETERS)
    samples = [_start_of(parameter).cpu().double() for parameter in sampled]
    return torch.cat(samples).tolist() if samples else []


def _whole(candidates: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters of which every rank should hold the same values."""
    for parameter in candidates:
        has_values = (
            parameter.is_floating_point() and parameter.numel() > 0 and not parameter.is_meta
        )
        if has_values and not is_traceable_wrapper_subclass(parameter):
            yield parameter.detach()


def _start_of(parameter: Tensor) -> Tensor:
    """Return the first values of the first row; reshaping could copy the whole parameter."""
    while parameter.dim() > 1:
        parameter = parameter[0]
    return parameter.reshape(-1)[:SAMPLED_VALUES]
