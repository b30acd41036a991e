"""An optimizer that steps this rank's shares of flattened parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim.build import OptimizerFactory
from distmp.optim.stepped import build_on

# Optimizers whose update of an element depends on nothing but that element's history.
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
# Words in the names of others that look at whole matrices or at norms of whole parameters.
NOT_ELEMENTWISE = ("adafactor", "lamb", "lars", "muon", "shampoo", "soap")

logger = logging.getLogger("distmp")


def build_on_shares(
    factory: OptimizerFactory,
    shares: Sequence[tuple[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    sharded_by: tuple[str, object] = ("shard_optimizer", True),
) -> torch.optim.Optimizer:
    """Build an optimizer whose parameters are shares, in groups chosen by whole parameters.

    The factory sees tensors in the shapes of the whole parameters, so that a rule such as "vectors
    do not decay" finds what it expects; they have no memory of their own. Then the shares take
    their places.

    Args:
        factory: Builds the optimizer on `[(name, tensor), ...]`.
        shares: This rank's part of each flattened parameter, 1-dim, possibly empty.
        shapes: Shape of each whole parameter.
        sharded_by: The setting that shards them, and its value, for messages.

    Raises:
        ConfigError: For an optimizer that looks at more than one element at a time.
    """
    stand_ins = [
        (name, share.new_zeros(()).expand(shapes[name]).requires_grad_()) for name, share in shares
    ]
    optimizer = build_on(factory, stand_ins)
    _check_elementwise(type(optimizer), *sharded_by)
    of_stand_in = {
        id(stand_in): share for (_, stand_in), (_, share) in zip(stand_ins, shares, strict=True)
    }
    groups: list[dict[str, Any]] = [
        {**group, "params": [of_stand_in[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    if optimizer.state:  # some, such as Adagrad, make their state at once, in the wrong shape
        for group in groups:
            group.pop("param_names", None)
        return type(optimizer)(groups, **optimizer.defaults)
    for group, replaced in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = replaced["params"]
    return optimizer


def _check_elementwise(kind: type[torch.optim.Optimizer], setting: str, value: object) -> None:
    if issubclass(kind, ELEMENTWISE):
        return
    name = kind.__name__
    known = any(word in name.lower() for word in NOT_ELEMENTWISE)
    if known or kind.__module__.startswith("torch.optim"):
        raise ConfigError(
            setting,
            value,
            f"{name} looks at whole parameters, of which a rank has only a share; use strategy "
            "ddp without shard_optimizer, or an element-wise optimizer such as AdamW",
        )
    logger.warning(
        "%s = %r gives %s flat shares of parameters: right only if it treats every element by "
        "itself",
        setting,
        value,
        name,
    )
