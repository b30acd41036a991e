"""Finds non-finite values in one forward and backward by temporary hooks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.diagnosis.histogram import count_exponents


class GradientSummary(NamedTuple):
    """Statistics of a gradient.

    Attributes:
        inf: Number of infinite values.
        nan: Number of NaN values.
        largest_finite: Largest magnitude of the finite values; 0 if there are none.
    """

    inf: int
    nan: int
    largest_finite: float


class ForwardOverflow(NamedTuple):
    """The first module that returned a non-finite value in forward.

    Attributes:
        module: Name of the module; empty for the model itself.
        side: "input" if its input was already non-finite, because of an operation between modules;
            otherwise "output".
    """

    module: str
    side: Literal["input", "output"]


class Probe:
    """Checks values and gradients of one forward and backward in a `with` block.

    It checks gradients before they are added to those of other microbatches and reduced over ranks,
    for sharded parameters too.

    Args:
        module: The model.
        units: Names and modules that gather their parameters before forward; the model itself if
            parameters are not sharded.

    Attributes:
        forward: The first module that returned a non-finite value; None if none did.
        bad_parameters: Names of trainable parameters that hold non-finite values, when they are
            gathered or when a module returns a non-finite value for the first time.
        exponents: Counts of the exponents of all gradients, see `count_exponents`.
    """

    def __init__(self, module: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> None:
        self.module = module
        self.units = units
        self.forward: ForwardOverflow | None = None
        self.bad_parameters: list[str] = []
        self.exponents = count_exponents(torch.zeros(0))
        self._summaries: dict[str, Tensor] = {}
        self._watched: set[int] = set()
        self._hooks = ExitStack()

    def __enter__(self) -> Probe:
        for name, module in self.units:
            self._watch_parameters(name, module)
            self._keep(module.register_forward_pre_hook(self._entry_hook(name)))
        for name, module in self.module.named_modules():
            hook = self._output_hook(name)
            self._keep(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    def gradients(self) -> dict[str, GradientSummary]:
        """Return statistics of each gradient by the parameter's name, in the order of backward."""
        if not self._summaries:
            return {}
        rows = torch.stack(list(self._summaries.values())).tolist()
        return {
            name: GradientSummary(int(inf), int(nan), largest)
            for name, (inf, nan, largest) in zip(self._summaries, rows, strict=True)
        }

    def _keep(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _entry_hook(self, name: str) -> Any:
        return lambda module, args: self._watch_parameters(name, module)

    def _watch_parameters(self, unit: str, module: nn.Module) -> None:
        """Add hooks to the parameters that are gathered now and have none yet."""
        for local_name, parameter in module.named_parameters():
            sharded = is_traceable_wrapper_subclass(parameter)
            if sharded or not parameter.requires_grad or id(parameter) in self._watched:
                continue
            self._watched.add(id(parameter))
            name = _joined(unit, local_name)
            self._check_finite(name, parameter)
            self._keep(parameter.register_hook(self._gradient_hook(name)))

    def _check_finite(self, name: str, parameter: Tensor) -> None:
        if name not in self.bad_parameters and count_non_finite(parameter.detach()):
            self.bad_parameters.append(name)

    def _gradient_hook(self, name: str) -> Any:
        @torch.no_grad()
        def check(gradient: Tensor) -> None:
            if gradient.numel():
                self._summaries[name] = _summary(gradient)
                self.exponents = self.exponents.to(gradient.device) + count_exponents(gradient)

        return check

    def _output_hook(self, name: str) -> Any:
        @torch.no_grad()
        def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.forward is None and count_non_finite(output):
                bad_input = count_non_finite((args, kwargs), but_negative_inf=True)
                self.forward = ForwardOverflow(name, "input" if bad_input else "output")
                for local_name, parameter in module.named_parameters(recurse=False):
                    # The parameter may have been written to since the beginning of forward.
                    if parameter.requires_grad and not is_traceable_wrapper_subclass(parameter):
                        self._check_finite(_joined(name, local_name), parameter)

        return check


def count_non_finite(value: Any, *, but_negative_inf: bool = False) -> int:
    """Count inf and NaN in the floating-point tensors of any nesting of containers.

    Args:
        value: A tensor, or containers of tensors and other objects.
        but_negative_inf: Do not count -inf, which additive attention masks contain.
    """
    total = 0
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            bad = ~leaf.isfinite()
            total += int((bad & ~leaf.isneginf() if but_negative_inf else bad).sum())
    return total


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _summary(gradient: Tensor) -> Tensor:
    """Return number of inf, number of NaN and largest finite magnitude, FP64 of shape (3,)."""
    finite = torch.where(gradient.isfinite(), gradient.abs(), 0)
    parts = (gradient.isinf().sum(), gradient.isnan().sum(), finite.max())
    return torch.stack([part.to(torch.float64) for part in parts])
