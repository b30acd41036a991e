"""The flags of an iteration of the grad scaler, reduced over ranks in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.distributed.comparison import Fingerprint
from distmp.scaling.local_gradients import LocalGradient, local_gradients, parameters
from distmp.scaling.rank_group import RankGroup

# Tolerated relative variance of the scale over ranks: above rounding, below any real difference.
SCALE_TOLERANCE = 1e-11


class ReducedFlags(NamedTuple):
    """The result of one reduction, the same on all ranks; 0-dim tensors on the scale's device.

    Attributes:
        found_inf: FP32, 1 if the optimizers have to skip (overflow, or scales differ), else 0.
        scales_differ: bool, whether the loss scale differs between ranks.
        calls_differ: bool, whether ranks call the scaler differently.
        scale_never_called: bool, whether there are gradients, but no rank has ever called `scale`.
        empty: bool, whether no rank has a gradient.
        square_sum: FP64, squared norm of the scaled gradients that are clipped.
    """

    found_inf: Tensor
    scales_differ: Tensor
    calls_differ: Tensor
    scale_never_called: Tensor
    empty: Tensor
    square_sum: Tensor

    def skipping(self, where: Tensor) -> ReducedFlags:
        """Return the flags of a step that is skipped if `where`, 0-dim bool, is true."""
        return self._replace(found_inf=self.found_inf.maximum(where.to(torch.float32)))


class GradientVersions:
    """The gradients of an optimizer, and the versions of their memory.

    It holds the gradients, so that another one cannot have the same address.

    Args:
        optimizer: The optimizer.
        local: Its local gradients now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, local: Sequence[LocalGradient]) -> None:
        self._optimizer = optimizer
        self._gradients = [parameter.grad for parameter in parameters(optimizer)]
        self._local = [(gradient.tensor, gradient.tensor._version) for gradient in local]

    def are_unchanged(self) -> bool:
        """Return whether no gradient was replaced or written to since."""
        now = (parameter.grad for parameter in parameters(self._optimizer))
        return all(one is other for one, other in zip(now, self._gradients, strict=True)) and all(
            tensor._version == version for tensor, version in self._local
        )


@dataclass(eq=False)
class CheckedOptimizer:
    """An optimizer whose local gradients were checked in this iteration.

    Attributes:
        optimizer: The optimizer.
        local_found_inf: 0-dim FP32, 1 if a local gradient is not finite, else 0.
        checked: The checked gradients if they will be unscaled later; they must not change until
            then. None if they are unscaled already.
        found_inf: 0-dim FP32, the reduced flag; None before the reduction.
        has_gradients: Whether it had gradients when they were checked; `zero_grad` may follow.
    """

    optimizer: torch.optim.Optimizer
    local_found_inf: Tensor
    checked: GradientVersions | None = None
    found_inf: Tensor | None = None

    def __post_init__(self) -> None:
        self.has_gradients = any(p.grad is not None for p in parameters(self.optimizer))

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
        self.checked = GradientVersions(self.optimizer, gradients)

    def check_unchanged(self) -> None:
        """Refuse gradients that changed after the check.

        Raises:
            RuntimeError: If a gradient was replaced or written to.
        """
        if self.checked is not None and not self.checked.are_unchanged():
            raise RuntimeError(
                "gradients changed after the ranks had decided on them: call backward() for all "
                "registered optimizers before the first step(), or do not register them; after an "
                "iteration that raised an error, call scaler.update()"
            )


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
    exact_scale = scale.to(torch.float64)
    found = [member.local_found_inf for member in members]
    local = found[0] if len(found) == 1 else torch.stack([torch.zeros_like(scale), *found]).amax()
    has_gradients = any(member.has_gradients for member in members)
    values = [
        local.to(torch.float64),
        torch.full_like(exact_scale, has_gradients),
        torch.full_like(exact_scale, has_scaled),
        square,
        exact_scale,
        exact_scale.square(),
    ]
    sums, calls_differ = fingerprint.sum_over_ranks(torch.stack(values), ranks.all_reduce)
    overflows, with_gradients, scaled, squares, scales, squared_scales = sums.unbind()
    variance = squared_scales * ranks.world_size - scales.square()
    scales_differ = variance > SCALE_TOLERANCE * scales.square()
    return ReducedFlags(
        found_inf=((overflows > 0) | scales_differ).to(torch.float32),
        scales_differ=scales_differ,
        calls_differ=calls_differ,
        scale_never_called=(with_gradients > 0) & (scaled == 0),
        empty=with_gradients == 0,
        square_sum=squares,
    )
