"""Walks through the parameters and buffers of a module, and the submodules that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn


class HeldTensor(NamedTuple):
    """A parameter or buffer under one of its names.

    Attributes:
        holder: The submodule in which it is registered.
        key: Its name there.
        name: Its name in the whole module.
        tensor: The parameter or buffer.
    """

    holder: nn.Module
    key: str
    name: str
    tensor: Tensor


def held_tensors(module: nn.Module) -> Iterator[HeldTensor]:
    """Yield the parameters and buffers of a module; a tied one once for every name."""
    for prefix, part in module.named_modules():
        yield from own_tensors(part, prefix)


def own_tensors(part: nn.Module, prefix: str) -> list[HeldTensor]:
    """Return the parameters and buffers that are registered in a submodule itself.

    Args:
        part: The submodule.
        prefix: Its name in the whole module.
    """
    own = [
        *part.named_parameters(recurse=False, remove_duplicate=False),
        *part.named_buffers(recurse=False, remove_duplicate=False),
    ]
    return [HeldTensor(part, key, f"{prefix}.{key}".lstrip("."), tensor) for key, tensor in own]


def replace_tensors(
    module: nn.Module,
    is_replaced: Callable[[Tensor], bool],
    replacement: Callable[[HeldTensor], Tensor],
) -> None:
    """Replace parameters and buffers of a module; tied ones stay tied.

    Args:
        module: The module, changed in place.
        is_replaced: Selects the parameters and buffers.
        replacement: Returns the new one. It is called with one name of a tied tensor.
    """
    done: dict[int, Tensor] = {}
    for held in held_tensors(module):
        if is_replaced(held.tensor):
            key = id(held.tensor)
            if key not in done:
                done[key] = replacement(held)
            setattr(held.holder, held.key, done[key])
