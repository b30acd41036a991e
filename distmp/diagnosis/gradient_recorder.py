"""Counts the gradients of every backward by exponent, as backward computes them.

Not the accumulated gradient of a step has to fit float16, but all values that backward computes:
the gradients of activations, and the gradients of parameters of each microbatch before they are
accumulated in FP32. Each rank counts both during backward, so the counts are the same for every
strategy. Only a calibration uses these hooks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from distmp.diagnosis.histogram import CLASSES, EXPONENTS, ExponentHistogram, count_exponents
from distmp.utils.dtensor import is_dtensor


class GradientRecorder:
    """Counts the gradients of a module in a `with` block.

    Args:
        module: The model, prepared by any strategy.
        device: Device of the counts.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._counts = torch.zeros((EXPONENTS, CLASSES), dtype=torch.int64, device=device)
        self._handles: list[RemovableHandle] = []
        # By id; the reference makes sure that the id is not reused by another tensor.
        self._watched: dict[int, Tensor] = {}
        self._latest_output: Tensor | None = None

    def __enter__(self) -> GradientRecorder:
        for part in self._module.modules():
            self._watch_parameters(part, None)
            self._handles += [
                # FSDP replaces parameters by gathered ones before forward.
                part.register_forward_pre_hook(self._watch_parameters),
                part.register_forward_hook(self._watch_outputs),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()
        self._latest_output = None

    def histogram(self, group: dist.ProcessGroup | None) -> ExponentHistogram:
        """Return the sum of the counts of all ranks.

        Args:
            group: The ranks, all of which have to call this; None for a single process.
        """
        total = self._counts.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return ExponentHistogram(total)

    def _watch_parameters(self, part: nn.Module, inputs: Any) -> None:
        for parameter in part.parameters(recurse=False):
            # A shard has no gradient in backward, only the parameter that is gathered from it.
            is_used = parameter.requires_grad and not is_dtensor(parameter)
            if is_used and id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                self._handles.append(parameter.register_hook(self._count))

    def _watch_outputs(self, part: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            # A container returns the output of its last module.
            if tensor is self._latest_output or not isinstance(tensor, Tensor):
                continue
            if tensor.requires_grad:
                self._latest_output = tensor
                tensor.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        self._counts.add_(count_exponents(gradient))
