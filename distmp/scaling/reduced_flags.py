"""The flags of an iteration of the grad scaler, reduced over ranks in one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.distributed.compare_ranks import Fingerprint
from distmp.scaling.local_gradients import LocalGradient, local_gradients, parameters
from distmp.scaling.rank_group import RankGroup
from distmp.utils.host_copy import HostCopy

# Tolerated relative variance of the scale over ranks: above rounding, below any real difference.
SCALE_TOLERANCE = 1e-11


class ReducedFlags(NamedTuple):
    """The result of one reduction, the same on all ranks; 0-dim tensors on the scale's device.

    Attributes:
        found_inf: FP32, 1 if the optimizers have to skip (overflow, or scales or calls differ),
            else 0.
        overflow: bool, whether any rank has a non-finite gradient.
        scales_differ: bool, whether the loss scale differs between ranks.
        calls_differ: bool, whether ranks call the scaler differently.
        scale_never_called: bool, whether there are gradients, but no rank has ever called `scale`.
        empty: bool, whether no rank has a gradient.
        square_sum: FP64, squared norm of the scaled gradients that are clipped.
    """

    found_inf: Tensor
    overflow: Tensor
    scales_differ: Tensor
    calls_differ: Tensor
    scale_never_called: Tensor
    empty: Tensor
    square_sum: Tensor

    def overflowing(self, where: Tensor) -> ReducedFlags:
        """Return the flags with an overflow if `where`, 0-dim bool, is true."""
        found_inf = self.found_inf.maximum(where.to(torch.float32))
        return self._replace(found_inf=found_inf, overflow=self.overflow | where)

    def ignoring_call_differences(self) -> ReducedFlags:
        """Return the flags without `calls_differ`, for calls that differ in a permitted way."""
        found_inf = (self.overflow | self.scales_differ).to(torch.float32)
        return self._replace(found_inf=found_inf, calls_differ=torch.zeros_like(self.calls_differ))


class CheckedOptimizer:
    """An optimizer whose local gradients were checked in this iteration.

    Args:
        optimizer: The optimizer.
        local_found_inf: 0-dim FP32, 1 if a local gradient is not finite, else 0.
        gradients: The checked gradients if they will be unscaled later; they must not change until
            then. None if they are unscaled already.

    Attributes:
        found_inf: 0-dim FP32, the reduced flag; None before the reduction.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        local_found_inf: Tensor,
        gradients: Sequence[LocalGradient] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.local_found_inf = local_found_inf
        self.gradients = None if gradients is None else _versions(gradients)
        self.found_inf: Tensor | None = None

    def global_found_inf(self) -> Tensor:
        """Return the reduced flag, 0-dim FP32; only after the reduction."""
        assert self.found_inf is not None
        return self.found_inf

    def found_inf_per_device(self) -> dict[torch.device, Tensor]:
        """Return the reduced flag in the form that torch's scaler stores."""
        return {self.global_found_inf().device: self.global_found_inf()}

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """Multiply the gradients, which will be unscaled later."""
        gradients = local_gradients(self.optimizer)
        for gradient in gradients:
            gradient.tensor.mul_(factor)
        self.gradients = _versions(gradients)

    def check_unchanged(self) -> None:
        """Refuse gradients that changed after the check.

        Raises:
            RuntimeError: If a gradient was replaced or written to.
        """
        if self.gradients not in (None, _versions(local_gradients(self.optimizer))):
            raise RuntimeError(
                "gradients changed after the ranks had decided on them: call backward() for all "
                "registered optimizers before the first step(), or do not register them"
            )


class IterationFlags:
    """The numbers of an iteration that the host reads, copied without waiting for the device.

    Args:
        partial: 0-dim bool, whether one optimizer stepped and another one skipped.
        exhausted: 0-dim bool, whether gradients overflowed at the lowest loss scale.
        scales_differ: 0-dim bool, see `ReducedFlags`.
        scale_never_called: 0-dim bool, see `ReducedFlags`.
        consecutive_skips: 0-dim int64, number of skipped iterations in a row.

    Attributes:
        on_device: Whether the numbers were on a CUDA device.
    """

    def __init__(
        self,
        *,
        partial: Tensor,
        exhausted: Tensor,
        scales_differ: Tensor,
        scale_never_called: Tensor,
        consecutive_skips: Tensor,
    ) -> None:
        flags = (partial, exhausted, scales_differ, scale_never_called)
        self._copy = HostCopy(torch.stack([*flags, consecutive_skips]))
        self.on_device = self._copy.on_device

    def read(self) -> tuple[bool, bool, bool, bool, int]:
        """Wait for the iteration and return its numbers, in the order of the arguments."""
        *flags, consecutive_skips = self._copy.read()
        partial, exhausted, scales_differ, scale_never_called = map(bool, flags)
        return partial, exhausted, scales_differ, scale_never_called, consecutive_skips


def reduce_flags(
    members: Sequence[CheckedOptimizer],
    square: Tensor,
    scale: Tensor,
    ranks: RankGroup,
    fingerprint: Fingerprint,
    *,
    has_scaled: bool,
) -> ReducedFlags:
    """Reduce flags, squared norm, scale and fingerprint of this rank in one all-reduce.

    Args:
        members: The optimizers to decide on.
        square: 0-dim FP64, contribution of this rank to the squared norm.
        scale: 0-dim FP32, the loss scale of this rank.
        ranks: The ranks that decide together.
        fingerprint: Checksum of the calls of the scaler on this rank.
        has_scaled: Whether `scale` was ever called on this rank.
    """
    wide_scale = scale.to(torch.float64)
    flags = torch.stack([torch.zeros_like(scale), *(m.local_found_inf for m in members)])
    has_gradients = any(_has_gradients(member.optimizer) for member in members)
    values = [
        flags.amax().to(torch.float64),
        torch.full_like(wide_scale, has_gradients),
        torch.full_like(wide_scale, has_scaled),
        square,
        wide_scale,
        wide_scale.square(),
    ]
    sums, calls_differ = fingerprint.sum_over_ranks(torch.stack(values), ranks.all_reduce)
    overflows, with_gradients, scaled, squares, scales, squared_scales = sums.unbind()
    variance = squared_scales * ranks.world_size - scales.square()
    scales_differ = variance > SCALE_TOLERANCE * scales.square()
    overflow = overflows > 0
    return ReducedFlags(
        found_inf=(overflow | scales_differ | calls_differ).to(torch.float32),
        overflow=overflow,
        scales_differ=scales_differ,
        calls_differ=calls_differ,
        scale_never_called=(with_gradients > 0) & (scaled == 0),
        empty=with_gradients == 0,
        square_sum=squares,
    )


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in parameters(optimizer))


def _versions(gradients: Iterable[LocalGradient]) -> list[tuple[int, int]]:
    return [(g.tensor.data_ptr(), g.tensor._version) for g in gradients]
