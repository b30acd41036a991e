"""Builds an optimizer on this rank's shards of flattened parameters."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim.adamw import AdamW
from distmp.optim.build import OptimizerFactory
from distmp.optim.muon import Muon
from distmp.optim.optimizer_tensors import build_on

# Optimizers whose update of an element depends only on the history of that element.
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Words in the names of optimizers that use full matrices or norms of full parameters.
NOT_ELEMENTWISE = ("adafactor", "lamb", "lars", "muon", "shampoo", "soap")

logger = logging.getLogger("distmp")


def build_on_shards(
    factory: OptimizerFactory,
    shards: Sequence[tuple[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    *,
    quiet: bool = False,
) -> torch.optim.Optimizer:
    """Build an optimizer on shards, in the groups that the factory chooses for full parameters.

    The factory receives placeholders with the shapes of the full parameters, so that rules such as
    "no weight decay for vectors" work; they take no memory. Then the shards replace them.

    Args:
        factory: Builds the optimizer on `[(name, tensor), ...]`.
        shards: This rank's shard of each flattened parameter, by name: 1-dim, possibly empty.
        shapes: Shape of each full parameter.
        quiet: Do not log, because another rank does.

    Raises:
        ConfigError: If the update of an element depends on other elements.
    """
    placeholders = [
        (name, shard.new_zeros(()).expand(shapes[name]).requires_grad_()) for name, shard in shards
    ]
    optimizer = build_on(factory, placeholders)
    _check_elementwise(type(optimizer), quiet=quiet)
    shard_of = {
        id(placeholder): shard
        for (_, placeholder), (_, shard) in zip(placeholders, shards, strict=True)
    }
    groups: list[dict[str, Any]] = [
        {**group, "params": [shard_of[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    if optimizer.state:  # some, such as Adagrad, create it immediately, with the wrong shape
        for group in groups:
            group.pop("param_names", None)
        return type(optimizer)(groups, **optimizer.defaults)
    for group, replaced in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = replaced["params"]
    return optimizer


def works_on_shards(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer is known to give the same updates on shards of parameters."""
    # Muon exchanges shards; shards consist of whole blocks of AdamW.
    known = (base for base in (*ELEMENTWISE, AdamW, Muon) if issubclass(kind, base))
    return any(inspect.unwrap(kind.step) is inspect.unwrap(base.step) for base in known)


def _check_elementwise(kind: type[torch.optim.Optimizer], *, quiet: bool) -> None:
    if works_on_shards(kind):
        return
    name = kind.__name__
    known = any(word in name.lower() for word in NOT_ELEMENTWISE)
    if known or kind.__module__.startswith("torch.optim"):
        raise ConfigError(
            "shard_optimizer",
            True,
            f"{name} needs full parameters, but a rank has only a shard of each; use strategy "
            "ddp without shard_optimizer, or AdamW or distmp.optim.Muon",
        )
    if not quiet:
        logger.warning(
            "shard_optimizer passes flat shards of parameters to %s: this is correct only if it "
            "updates every element independently",
            name,
        )
