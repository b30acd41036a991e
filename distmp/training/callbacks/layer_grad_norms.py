"""Measures the norm of the gradient of each layer, every `log.grad_norms_every` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.engine import Engine
from distmp.engine.average import local
from distmp.training.callbacks.callback import Callback, StepResult
from distmp.utils.host_copy import HostCopy

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


# Note [Norms without the loss scale]
# When the optimizer begins its step, gradients are accumulated and reduced, but some optimizers
# still have to divide by the loss scale and to clip in their kernel. All gradients are multiplied
# by the same number then. The step decision knows the norm of all of them before clipping, so the
# norm of a layer is that norm times the root of the layer's share of the sum of squares. Ranks that
# hold copies of the gradients count them several times, but all of them equally often.
class LayerGradNorms(Callback):
    """Adds the norm per layer, before clipping, to the result of a step.

    A layer is a module that has parameters of its own. On CPUs, a skipped step whose optimizer was
    not called has no norms. The host does not wait for the norms.

    Args:
        every: Steps between two measurements, 1 or more.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step = 0
        self._measured: dict[int, tuple[list[str], HostCopy]] = {}

    def on_train_begin(self, trainer: Trainer) -> None:
        """Measure when the optimizer begins its step."""
        trainer.engine.optimizer.register_step_pre_hook(lambda *_: self._measure(trainer))

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Note the step."""
        self._step = step

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Add the norms to the result."""
        if result.step not in self._measured:
            return
        names, copy = self._measured.pop(result.step)
        squares = copy.read()
        total = sum(squares)
        result.layer_grad_norms = {
            name: result.numbers.grad_norm * (square / total) ** 0.5 if total else 0.0
            for name, square in zip(names, squares, strict=True)
        }

    def _measure(self, trainer: Trainer) -> None:
        """Sum the squares of each layer's gradients over ranks, FP64; the host does not wait."""
        if self._step % self._every:
            return
        engine = trainer.engine
        squares: dict[str, Tensor] = {}
        for name, gradient in engine.gradients().items():
            layer = name.rpartition(".")[0] or name
            squares[layer] = squares.get(layer, 0.0) + _square(gradient, engine)
        sums = torch.stack([*squares.values()])
        if engine.world.group is not None:
            dist.all_reduce(sums, group=engine.world.group)
        self._measured = {self._step: ([*squares], HostCopy(sums))}


def _square(gradient: Tensor | None, engine: Engine) -> Tensor:
    """Return the sum of squares of the part that this rank contributes, FP64 0-dim."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64, device=engine.device)
    norm = torch.linalg.vector_norm(local(gradient), dtype=torch.float64)
    return norm.to(engine.device).square()
