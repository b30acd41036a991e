"""The modules of a model, whose changes are noticed without a walk through their names."""

from __future__ import annotations

import operator
from itertools import chain

from torch import nn


class ModuleTree:
    """The modules of a model at a time, with their parameters and buffers.

    A walk with `named_parameters` makes a name of each parameter, which takes milliseconds for
    hundreds of modules. This compares identities, without a loop in Python.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[dict[str, object]] = [
            slots  # type: ignore[misc]
            for module in model.modules()
            for slots in (module._modules, module._parameters, module._buffers)
        ]
        self._lengths = list(map(len, self._slots))
        self._values = self._current()

    def _current(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._slots)))

    def is_unchanged(self) -> bool:
        """Return whether each module has the same submodules, parameters and buffers."""
        return list(map(len, self._slots)) == self._lengths and all(
            map(operator.is_, self._current(), self._values)
        )
