"""Prepares the model that a user passes to an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.materialize import InitialValues, initial_values, not_a_number
from distmp.parallel.strategy import check_model
from distmp.utils.deferred import NotDeferrableError, build_deferred


def build_model(
    model: nn.Module | Callable[[], nn.Module], world: World, *, initialize: bool
) -> tuple[nn.Module, InitialValues, int]:
    """Return the model, initial values of its parameters on the meta device, and a seed.

    The seed is a random number that is the same on all ranks.

    Args:
        model: A module, or a function that returns it; see `distmp.Engine`.
        world: The ranks, all of which have to call this.
        initialize: Whether to compute initial values; with False they are NaN.

    Raises:
        ConfigError: If it is no model, or a function whose parameters cannot be deferred.
    """
    is_function = callable(model) and not isinstance(model, nn.Module | type)
    # Every rank draws, so that the generators of all ranks advance; rank 0's seed counts.
    seed = world.ranks.gather(int(torch.randint(2**62, ())))[0]
    try:
        module = build_deferred(model, seed, world.device) if is_function else model
    except NotDeferrableError as error:
        name = getattr(model, "__qualname__", type(model).__name__)
        problem = f"{error}; pass the model itself, which every rank then builds whole"
        raise ConfigError("model", name, f"the constructor {problem}") from error
    check_model(module)
    assert isinstance(module, nn.Module)
    if not initialize:
        return module, not_a_number(module), seed
    return module, initial_values(module, seed, world.device), seed


def return_logits(model: nn.Module) -> None:
    """Make models return logits: the policy would round a loss that they compute themselves."""
    for part in model.modules():
        if getattr(part, "takes_targets", False):
            part.takes_targets = False  # type: ignore[assignment]
