"""Converts a LightningModule to the 16-bit parameters of a policy, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from distmp.precision import PrecisionPolicy
from distmp.precision.builders import cast_inputs_and_outputs
from distmp.precision.keep import modules_in_fp32

# A module, the name of its table of hooks, and the key of a hook.
_Hook = tuple[nn.Module, str, int]


class Conversion:
    """The 16-bit form of a module, while the Trainer runs it; `undo` restores the FP32 form.

    The Trainer calls `training_step`, not `forward`. So floating-point inputs and outputs are cast
    at the modules that `training_step` calls, the children of the LightningModule.

    Args:
        module: The LightningModule with its parameters in FP32; changed in place.
        policy: A policy with 16-bit parameters.
        kept: Parameters whose FP32 values are kept here. The others need an entry in `values`
            before the first use.
        apply: Applies the policy to the module.

    Attributes:
        values: The FP32 value of each parameter, the same memory as long as the module is
            converted.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        kept: Iterable[nn.Parameter],
        apply: Callable[[], None],
    ) -> None:
        self._module = module
        self.values: dict[nn.Parameter, Tensor] = {value: value.data for value in kept}
        hooks, forwards = _hooks(module), _forwards(module)
        apply()
        for child in _called_children(module, modules_in_fp32(module, policy).values()):
            cast_inputs_and_outputs(child, policy)
        self._hooks = _hooks(module) - hooks
        self._forwards = [
            (part, forwards[part])
            for part, forward in _forwards(module).items()
            if forward is not forwards[part]
        ]

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Point the parameters to their FP32 values, so that writes to them are kept."""
        converted = {parameter: parameter.data for parameter in self.values}
        for parameter, value in self.values.items():
            parameter.data = value.detach()
        try:
            yield
        finally:
            for parameter, data in converted.items():
                data.copy_(self.values[parameter].detach())
                parameter.data = data

    @torch.no_grad()
    def undo(self) -> None:
        """Give the module FP32 parameters, and remove what the policy has attached to it."""
        for parameter, value in self.values.items():
            parameter.grad = None
            parameter.data = value.detach().clone()  # not a view of a flat buffer
        for part, table, key in self._hooks:
            getattr(part, table).pop(key, None)
            part._forward_pre_hooks_with_kwargs.pop(key, None)
        for part, forward in self._forwards:
            if forward is None:
                del part.forward
            else:
                part.forward = forward


def _hooks(module: nn.Module) -> set[_Hook]:
    tables = ("_forward_pre_hooks", "_forward_hooks")
    return {
        (part, table, key)
        for part in module.modules()
        for table in tables
        for key in getattr(part, table)
    }


def _forwards(module: nn.Module) -> dict[nn.Module, Callable[..., object] | None]:
    """Return the forward methods that were replaced for single objects."""
    return {part: vars(part).get("forward") for part in module.modules()}


def _called_children(module: nn.Module, in_fp32: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost modules with parameters in 16 bits, without containers such as lists."""
    excluded = {id(part) for part in in_fp32}
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called_children(child, in_fp32)
        elif id(child) not in excluded and any(True for _ in child.parameters()):
            yield child
