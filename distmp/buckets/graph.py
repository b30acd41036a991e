"""Finds the weights that a backward uses once."""

# Note [16-bit gradients and several uses of a weight]
#
# With `grad_dtype` FP32, autograd converts the gradient of every use of a 16-bit weight to FP32 and
# sums the uses. The conversion reads 2 and writes 4 bytes per element. The addition to the bucket
# then reads 4 + 4 and writes 4 bytes. The sum of several uses needs the conversion: without it,
# autograd sums them in 16 bits. A single use does not: with `grad_dtype` None, autograd adds its
# 16-bit gradient to the bucket in one operation, which reads 2 + 4 and writes 4 bytes.
#
# How often a backward uses a weight is known only from its graph, which can differ between
# microbatches. So every graph is searched. A function whose backward runs another backward, such as
# reentrant checkpointing, hides a part of the graph; then no weight counts as used once. It has to
# enable gradients for that.
#
# Under autocast, weights are FP32, and the backward of the cast converts their gradient. A hook on
# every cast could add the 16-bit gradient, but would cost more host time than the conversion.

from __future__ import annotations

import functools
import inspect

from torch import Tensor

_GRADIENT_SWITCHES = {"enable_grad", "set_grad_enabled"}


def weights_used_once(loss: Tensor) -> set[int]:
    """Return the weights whose gradient is not a sum over several uses.

    Args:
        loss: The tensor from which backward starts.

    Returns:
        The `id` of each leaf of the graph that only one operation uses, and only once.
    """
    if loss.grad_fn is None:
        return set()
    leaves: set[int] = set()
    used_repeatedly: set[int] = set()
    nodes = [loss.grad_fn]
    visited = set(nodes)
    for node in nodes:  # the loop appends to it
        if _runs_backward(type(node)):
            return set()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if type(following).__name__ == "AccumulateGrad":
                weight = id(following.variable)  # type: ignore[attr-defined]
                (used_repeatedly if weight in leaves else leaves).add(weight)
            elif following not in visited:
                visited.add(following)
                nodes.append(following)
    return leaves - used_repeatedly


@functools.cache
def _runs_backward(node_type: type) -> bool:
    """Return whether a node is of a Python function whose backward may run another backward."""
    function = getattr(node_type, "_forward_cls", None)
    if function is None:
        return False
    codes = [
        getattr(inspect.unwrap(method), "__code__", None)
        for method in (function.backward, function.vjp)
    ]
    return any(code is None or not _GRADIENT_SWITCHES.isdisjoint(code.co_names) for code in codes)
