"""Identifies the optimizers of a rank, so that ranks can compare them.

An optimizer has no name. Its replicas on other ranks have the same class, options, shapes of
parameters and, if a rank holds full parameters, their values.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.distributed.compare_ranks import hyperparameters
from distmp.scaling.local_gradients import parameters
from distmp.utils.checksums import checksum

# Number of parameters whose values are compared.
SAMPLED_PARAMETERS = 32


@torch.no_grad()
def identify(optimizer: torch.optim.Optimizer) -> str:
    """Return properties that are the same on all replicas of an optimizer; waits for the device.

    They are the class, the number of parameters, the first shape, and a checksum of options, shapes
    and values. Values of shards are not compared.
    """
    shapes = [tuple(parameter.shape) for parameter in parameters(optimizer)]
    # From each parameter only the start, because reshaping could copy the whole parameter.
    values: list[Any] = [
        parameter[:1]
        for parameter in parameters(optimizer)
        if parameter.dim() and not (parameter.is_meta or is_traceable_wrapper_subclass(parameter))
    ]
    digest = checksum([repr((hyperparameters(optimizer), shapes)), values[:SAMPLED_PARAMETERS]])
    count = f"{len(shapes)} parameter{'s' if len(shapes) != 1 else ''}"
    first = f", the first of shape {shapes[0]}" if shapes else ""
    return f"{type(optimizer).__name__} with {count}{first}, checksum {digest:08x}"


def all_identities() -> list[str]:
    """Return the identities of all optimizers that exist in this process.

    It searches all objects, which is slow, so call it only if ranks seem to differ.
    """
    return [
        identify(candidate)
        for candidate in gc.get_objects()
        # Not isinstance, which reads `__class__`: proxies may compute it.
        if issubclass(type(candidate), torch.optim.Optimizer) and hasattr(candidate, "param_groups")
    ]
