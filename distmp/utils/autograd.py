"""Reads the autograd graph of a loss, and refuses derivatives that a function does not have."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from distmp.errors import ConfigError

# The type of the nodes that add to `.grad`.
_ACCUMULATE_GRAD: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def autograd_graph(loss: Tensor) -> tuple[list[Any], list[Tensor]]:
    """Return the operations of the autograd graph of a loss, and its leaves, one for each use."""
    operations: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    visited = set(operations)
    leaves = []
    for operation in operations:  # the loop appends to it
        for following, _ in operation.next_functions:
            if type(following) is _ACCUMULATE_GRAD:
                leaves.append(following.variable)  # type: ignore[attr-defined]
            elif following is not None and following not in visited:
                visited.add(following)
                operations.append(following)
    return operations, leaves


def leaves_of(loss: Tensor) -> dict[Tensor, None]:
    """Return the leaves of the autograd graph of a loss, each one once."""
    return dict.fromkeys(autograd_graph(loss)[1])


def other_parameters(loss: Tensor, own: Container[Tensor]) -> list[nn.Parameter]:
    """Return the parameters that a loss depends on, without the own ones and those with a hook.

    In a hook, other buckets, another engine or the user handle the gradient.
    """
    return [
        leaf
        for leaf in leaves_of(loss)
        if isinstance(leaf, nn.Parameter)
        and leaf not in own
        and not leaf._post_accumulate_grad_hooks
    ]


def refuse_second_derivatives(problem: str) -> None:
    """Refuse `create_graph=True` in a backward whose own derivatives would be missing or wrong.

    Raises:
        ConfigError: With the problem, unless torch compiles.
    """
    # While torch compiles a backward, gradients are enabled in any case.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ConfigError("loss", "torch.autograd.grad(..., create_graph=True)", problem)
