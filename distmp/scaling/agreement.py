"""What ranks tell each other about the gradients of an iteration, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.distributed.compare_ranks import Fingerprint
from distmp.scaling.local_gradients import LocalGradient, local_gradients, parameters
from distmp.scaling.rank_group import RankGroup
from distmp.utils.host_copy import HostCopy

# Relative variance of the scale over ranks; rounding stays far below, any real difference above.
SCALE_TOLERANCE = 1e-11


class Total(NamedTuple):
    """What the ranks concluded from one reduction; 0-dim tensors on the scale's device."""

    found_inf: Tensor  # FP32, 0 or 1; also 1 where ranks disagree or call differently
    overflow: Tensor  # bool, whether a gradient of any rank is not finite
    disagree: Tensor  # bool, whether the scale is not the same everywhere
    differ: Tensor  # bool, whether ranks call the scaler differently
    never_scaled: Tensor  # bool, whether there are gradients and no rank has ever scaled a loss
    empty: Tensor  # bool, whether no rank had a gradient
    square_sum: Tensor  # FP64, of the scaled gradients that were measured

    def in_spite_of_difference(self) -> Total:
        """Return the conclusion for calls that differ only in a way that is right."""
        found_inf = (self.overflow | self.disagree).to(torch.float32)
        return self._replace(found_inf=found_inf, differ=torch.zeros_like(self.differ))


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


class IterationFlags:
    """What the host wants to know of an iteration, copied without waiting for the device."""

    def __init__(
        self,
        *,
        partial: Tensor,
        exhausted: Tensor,
        disagree: Tensor,
        never_scaled: Tensor,
        consecutive_skips: Tensor,
    ) -> None:
        flags = (partial, exhausted, disagree, never_scaled)
        self._copy = HostCopy(torch.stack([*flags, consecutive_skips]))
        self.on_device = self._copy.on_device

    def read(self) -> tuple[bool, bool, bool, bool, int]:
        """Wait for the iteration and return its numbers, in the order of the arguments."""
        partial, exhausted, disagree, never_scaled, consecutive_skips = self._copy.read()
        flags = bool(partial), bool(exhausted), bool(disagree), bool(never_scaled)
        return *flags, consecutive_skips


def sum_over_ranks(
    members: Sequence[Inspected],
    square: Tensor,
    scale: Tensor,
    ranks: RankGroup,
    fingerprint: Fingerprint,
    *,
    has_scaled: bool,
) -> Total:
    """Reduce flags, squared norm, scale and calls in one vector; conclude the same everywhere.

    Args:
        members: What is decided on.
        square: 0-dim FP64, the share of this rank in the squared norm.
        scale: 0-dim FP32, the loss scale of this rank.
        ranks: The ranks that decide.
        fingerprint: Of the calls of the scaler on this rank.
        has_scaled: Whether this rank has ever scaled a loss.
    """
    wide = scale.to(torch.float64)
    flags = torch.stack([torch.zeros_like(scale), *(m.found_inf_here for m in members)])
    some = torch.full_like(wide, any(_has_gradients(member.optimizer) for member in members))
    scaled = torch.full_like(wide, has_scaled)
    values = [flags.amax().to(torch.float64), some, scaled, square, wide, wide.square()]
    sums, differ = fingerprint.sum_over_ranks(torch.stack(values), ranks.sum_)
    count, gradients, losses, squares, scales, scales_squared = sums.unbind()
    world_size = ranks.world_size
    spread = scales_squared * world_size - scales.square()
    disagree = spread > SCALE_TOLERANCE * scales.square()
    overflow = count > 0
    never_scaled = (gradients > 0) & (losses == 0)
    return Total(
        found_inf=(overflow | disagree | differ).to(torch.float32),
        overflow=overflow,
        disagree=disagree,
        differ=differ,
        never_scaled=never_scaled,
        empty=gradients == 0,
        square_sum=squares,
    )


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in parameters(optimizer))


def _versions(gradients: Iterable[LocalGradient]) -> list[tuple[int, int]]:
    return [(g.tensor.data_ptr(), g.tensor._version) for g in gradients]
