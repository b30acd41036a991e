"""Identifies the optimizers of a rank, so that ranks can compare them.

An optimizer has no name. Its replicas on other ranks have the same class, options, shapes of
parameters and, if a rank holds full parameters, their values.
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.distributed.compare_ranks import hyperparameters
from distmp.scaling.local_gradients import parameters

# Number of parameters whose values are compared, and number of values of each.
SAMPLED_PARAMETERS = 32
SAMPLED_VALUES = 4


class OptimizerIdentity(NamedTuple):
    """Properties that are the same on all replicas of an optimizer.

    Attributes:
        digest: CRC-32 of class, options, shapes and sampled values.
        text: Class, number of parameters and first shape, for a message.
    """

    digest: int
    text: str


def identify(optimizer: torch.optim.Optimizer) -> OptimizerIdentity:
    """Return the current identity of an optimizer; waits for the device."""
    shapes = [tuple(parameter.shape) for parameter in parameters(optimizer)]
    everything = repr((hyperparameters(optimizer), shapes, _sampled_values(optimizer)))
    count = f"{len(shapes)} parameter{'s' if len(shapes) != 1 else ''}"
    first = f", the first of shape {shapes[0]}" if shapes else ""
    text = f"{type(optimizer).__name__} with {count}{first}"
    return OptimizerIdentity(zlib.crc32(everything.encode()), text)


def all_identities() -> list[int]:
    """Return the digests of all optimizers that exist in this process.

    It searches all objects, which is slow, so call it only if ranks seem to differ.
    """
    optimizers = [
        candidate
        for candidate in gc.get_objects()
        # Not isinstance, which reads `__class__`: proxies may compute it.
        if issubclass(type(candidate), torch.optim.Optimizer) and hasattr(candidate, "param_groups")
    ]
    return [identify(optimizer).digest for optimizer in optimizers]


@torch.no_grad()
def _sampled_values(optimizer: torch.optim.Optimizer) -> list[float]:
    sampled = itertools.islice(_replicated(parameters(optimizer)), SAMPLED_PARAMETERS)
    samples = [_start_of(parameter).cpu().double() for parameter in sampled]
    return torch.cat(samples).tolist() if samples else []


def _replicated(candidates: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters that should have the same values on every rank."""
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
