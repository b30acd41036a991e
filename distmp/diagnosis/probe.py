"""Watching one forward and backward for what is not finite, by hooks that are gone afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.diagnosis.histogram import count_exponents


class GradientSummary(NamedTuple):
    """What a gradient holds.

    Attributes:
        inf: Number of infinite values.
        nan: Number of NaN values.
        largest_finite: Largest magnitude among the finite values.
    """

    inf: int
    nan: int
    largest_finite: float


class ForwardOverflow(NamedTuple):
    """Where a forward pass first was not finite.

    Attributes:
        module: Name of the module; empty for the model itself.
        side: Whether its input was not finite already (what lies between modules made it so), or
            only its output.
    """

    module: str
    side: Literal["input", "output"]


class Probe:
    """Watches one forward and backward inside its `with` block.

    Gradients are seen as backward hands them to the parameters: before they are added to those of
    other microbatches and reduced over ranks, for sharded parameters too.

    Args:
        module: The model, whose modules' outputs are watched.
        units: Names and modules on whose entry parameters become whole; the model itself where
            they always are.

    Attributes:
        forward: The first module that returned something not finite; None if none did.
        bad_parameters: Names of trainable parameters that hold non-finite values, when they become
            whole or when the first module returns something not finite.
        exponents: Exponents of all gradients, as `count_exponents` returns them.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.close()

    def gradients(self) -> dict[str, GradientSummary]:
        """Return what each gradient held, by the parameter's name, in the order of arrival."""
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
        """Watch the parameters that are whole now and were not before."""
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
        def note(gradient: Tensor) -> None:
            if gradient.numel():
                self._summaries[name] = _summary(gradient)
                self.exponents = self.exponents.to(gradient.device) + count_exponents(gradient)

        return note

    def _output_hook(self, name: str) -> Any:
        @torch.no_grad()
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.forward is None and count_non_finite(output):
                spoilt = count_non_finite((args, kwargs), but_negative_inf=True)
                self.forward = ForwardOverflow(name, "input" if spoilt else "output")
                for local_name, parameter in module.named_parameters(recurse=False):
                    # Something may have written to it since this forward began.
                    if parameter.requires_grad and not is_traceable_wrapper_subclass(parameter):
                        self._check_finite(_joined(name, local_name), parameter)

        return note


def count_non_finite(value: Any, *, but_negative_inf: bool = False) -> int:
    """Count inf and NaN in the floating-point tensors of any nesting of containers.

    Args:
        value: A tensor, or containers of tensors and of anything else.
        but_negative_inf: Leave out -inf, which additive attention masks are made of.
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
