"""What ranks tell each other about the gradients of an iteration, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.scaling.local_gradients import LocalGradient, local_gradients, parameters
from distmp.scaling.rank_group import RankGroup

# Relative variance of the scale over ranks; rounding stays far below, any real difference above.
SCALE_TOLERANCE = 1e-11


class Total(NamedTuple):
    """What the ranks concluded from one reduction; 0-dim tensors on the scale's device."""

    found_inf: Tensor  # FP32, 0 or 1
    disagree: Tensor  # bool, whether the scale is not the same everywhere
    empty: Tensor  # bool, whether no rank had a gradient
    square_sum: Tensor  # FP64, of the scaled gradients that were measured


class Inspected:
    """An optimizer whose local gradients were checked in this iteration.

    Args:
        optimizer: It.
        found_inf_here: 0-dim FP32, whether a local gradient is not finite.
        gradients: What was checked, if it is to be unscaled later; until then it must not change.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        found_inf_here: Tensor,
        gradients: Sequence[LocalGradient] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.found_inf_here = found_inf_here
        self.gradients = None if gradients is None else _versions(gradients)
        self.found_inf: Tensor | None = None  # what all ranks agreed on

    def agreed(self) -> Tensor:
        """Return the flag of all ranks."""
        assert self.found_inf is not None
        return self.found_inf

    def found_inf_per_device(self) -> dict[torch.device, Tensor]:
        """Return the flag of all ranks as torch's scaler keeps it."""
        return {self.agreed().device: self.agreed()}

    def check_unchanged(self) -> None:
        """Refuse gradients that nobody has checked."""
        if self.gradients not in (None, _versions(local_gradients(self.optimizer))):
            raise RuntimeError(
                "gradients changed after the ranks had decided on them: call backward() for all "
                "registered optimizers before the first step(), or do not register them"
            )


class Report:
    """What the host wants to know of an iteration, copied without waiting for the device."""

    def __init__(
        self, *, partial: Tensor, exhausted: Tensor, disagree: Tensor, consecutive_skips: Tensor
    ) -> None:
        packed = torch.stack([partial, exhausted, disagree, consecutive_skips])
        self.on_device = packed.is_cuda
        self._packed = packed.to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event() if packed.is_cuda else None
        if self._ready is not None:
            self._ready.record(torch.cuda.current_stream(packed.device))

    def read(self) -> tuple[bool, bool, bool, int]:
        """Wait for the iteration and return its numbers, in the order of the arguments."""
        if self._ready is not None:
            self._ready.synchronize()
        partial, exhausted, disagree, consecutive_skips = self._packed.tolist()
        return bool(partial), bool(exhausted), bool(disagree), consecutive_skips


def sum_over_ranks(
    members: Sequence[Inspected], square: Tensor, scale: Tensor, ranks: RankGroup
) -> Total:
    """Reduce flags, squared norm and scale in one vector; draw the same conclusion everywhere."""
    wide = scale.to(torch.float64)
    flags = torch.stack([torch.zeros_like(scale), *(m.found_inf_here for m in members)])
    some = torch.full_like(wide, any(_has_gradients(member.optimizer) for member in members))
    count, gradients, squares, scales, scales_squared = ranks.sum_(
        torch.stack([flags.amax().to(torch.float64), some, square, wide, wide.square()])
    ).unbind()
    spread = scales_squared * ranks.world_size - scales.square()
    disagree = spread > SCALE_TOLERANCE * scales.square()
    return Total(
        found_inf=((count > 0) | disagree).to(torch.float32),
        disagree=disagree,
        empty=gradients == 0,
        square_sum=squares,
    )


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in parameters(optimizer))


def _versions(gradients: Iterable[LocalGradient]) -> list[tuple[int, int]]:
    return [(g.tensor.data_ptr(), g.tensor._version) for g in gradients]
