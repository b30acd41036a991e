"""Counts the gradients of every backward by exponent, as backward computes them.

Not the accumulated gradient of a step has to fit float16, but all values that backward computes:
the gradients of activations, and the gradients of parameters of each microbatch before they are
accumulated in FP32. Each rank counts both during backward, so the counts are the same for every
strategy. Only a calibration uses these hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from distmp.diagnosis.histogram import CLASSES, EXPONENTS, ExponentHistogram, count_exponents
from distmp.utils.dtensor import is_dtensor

PARAMETERS, ACTIVATIONS = KINDS = ("parameters", "activations")

# Histograms by kind of gradient and layer group.
Histograms = Mapping[str, Mapping[str, ExponentHistogram]]


class GradientRecorder:
    """Counts the gradients of a module in a `with` block.

    Args:
        module: The model, prepared by any strategy.
        device: Device of the counts.

    Attributes:
        groups: Names of the layer groups, in order of registration.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        names = [group_of(name) for name, _ in module.named_modules()]
        self.groups = tuple(dict.fromkeys(names))
        self._counts = torch.zeros(
            (len(KINDS), len(self.groups), EXPONENTS, CLASSES), dtype=torch.int64, device=device
        )
        self._handles: list[RemovableHandle] = []
        # By id; the reference makes sure that the id is not reused by another tensor.
        self._watched: dict[int, Tensor] = {}
        self._latest_output: Tensor | None = None

    def __enter__(self) -> GradientRecorder:
        for name, part in self._module.named_modules():
            self._watch_module(part, self.groups.index(group_of(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._latest_output = None

    def histograms(self, group: dist.ProcessGroup | None) -> Histograms:
        """Return the sum of the counts of all ranks, without groups that have none.

        Args:
            group: The ranks, all of which have to call this; None for a single process.
        """
        total = self._counts.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return {
            kind: {
                name: ExponentHistogram(counts)
                for name, counts in zip(self.groups, of_kind.cpu(), strict=True)
                if counts.any()
            }
            for kind, of_kind in zip(KINDS, total, strict=True)
        }

    def _watch_module(self, part: nn.Module, group: int) -> None:
        def before(part: nn.Module, inputs: Any) -> None:
            # FSDP replaces parameters by gathered ones before forward.
            self._watch_parameters(part, group)

        def after(part: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in pytree.tree_leaves(output):
                self._watch_output(tensor, group)

        self._watch_parameters(part, group)
        self._handles += [
            part.register_forward_pre_hook(before),
            part.register_forward_hook(after),
        ]

    def _watch_parameters(self, part: nn.Module, group: int) -> None:
        for parameter in part.parameters(recurse=False):
            # A shard has no gradient in backward, only the parameter that is gathered from it.
            is_used = parameter.requires_grad and not is_dtensor(parameter)
            if is_used and id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                self._handles.append(self._count_gradients_of(parameter, PARAMETERS, group))

    def _watch_output(self, output: Any, group: int) -> None:
        # A container returns the output of its last module.
        if output is self._latest_output or not isinstance(output, Tensor):
            return
        if output.requires_grad:
            self._latest_output = output
            self._count_gradients_of(output, ACTIVATIONS, group)

    def _count_gradients_of(self, tensor: Tensor, kind: str, group: int) -> RemovableHandle:
        counts = self._counts[KINDS.index(kind), group]

        def count(gradient: Tensor) -> None:
            counts.add_(count_exponents(gradient))

        return tensor.register_hook(count)


def group_of(module_name: str) -> str:
    """Return the layer group of a module.

    A layer group is an entry of a module list (`model.layers.3` for
    `model.layers.3.attention.query`). Outside of lists it is the first two parts of the name.
    """
    parts = module_name.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()]
    group = parts[: numbered[0] + 1] if numbered else parts[:2]
    return ".".join(group) or "(model)"
