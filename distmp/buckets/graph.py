"""Finds the weights whose 16-bit gradients need no FP32 copy before they are added."""

# Note [16-bit gradients and several uses of a weight]
#
# Autograd converts the gradient of every use of a weight to `grad_dtype` (FP32), and sums the uses.
# An operation reads the 16-bit gradient and writes an FP32 copy of it (2 + 4 bytes per element),
# another one adds the copy to the bucket (it reads 4 + 4 and writes 4 bytes). The sum of several
# uses needs the copy: without it, autograd would sum them in 16 bits. The gradient of a single use
# does not, and one operation adds it to the bucket (it reads 2 + 4 and writes 4 bytes).
#
# How often a backward uses a weight is known only from its graph, which can differ between
# microbatches. So every graph is searched: less than a microsecond of the host for each node. A
# graph in which reentrant checkpointing hides a part is not searched.
#
# Under autocast, weights are FP32, and the backward of the cast writes the FP32 copy. Its input is
# the 16-bit gradient. Autocast casts a weight once, so this input is already the sum of all uses.

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from distmp.precision.policy import SIXTEEN_BIT


class NarrowGradients(NamedTuple):
    """The weights that a graph uses once and whose gradients may be 16-bit.

    Attributes:
        weights: `id` of the weights that are 16-bit.
        casts: For FP32 weights, the node whose input is the 16-bit gradient, by `id`.
    """

    weights: set[int]
    casts: dict[int, Node]


def find_narrow_gradients(loss: Tensor) -> NarrowGradients:
    """Find the weights that a backward uses once, see the note above.

    Args:
        loss: The tensor from which backward starts.
    """
    narrow = NarrowGradients(set(), {})
    for leaf, users in _uses(loss).items():
        if len(users) == 1:
            weight: Tensor = leaf.variable  # type: ignore[attr-defined]
            if weight._backward_hooks:
                continue  # they expect FP32 gradients
            if weight.dtype in SIXTEEN_BIT:
                narrow.weights.add(id(weight))
            elif type(users[0]).__name__ == "ToCopyBackward0":
                narrow.casts[id(weight)] = users[0]
    return narrow


def _uses(loss: Tensor) -> dict[Node, list[Node]]:
    """Return, for each leaf of a graph, the nodes that compute its gradient."""
    uses: dict[Node, list[Node]] = {}
    if loss.grad_fn is None:
        return uses
    pending = [loss.grad_fn]
    found = set(pending)
    for node in pending:
        if type(node).__name__ == "CheckpointFunctionBackward":  # hides the graph of its segment
            return {}
        for following, _ in node.next_functions:
            if following is None:
                continue
            if type(following).__name__ == "AccumulateGrad":
                uses.setdefault(following, []).append(node)
            elif following not in found:
                found.add(following)
                pending.append(following)
    return uses
