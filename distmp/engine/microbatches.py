"""The microbatches of a step: their losses, weights and random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distmp.utils.host_copy import to_device
from distmp.utils.tensor_trees import map_tensors


@dataclass(frozen=True)
class MicrobatchStats:
    """Statistics of the microbatches of a step on this rank; each list has one entry for each.

    Attributes:
        losses: Loss sum of each microbatch, FP64 0-dim.
        loss_sums: Loss sum of each microbatch, FP64 0-dim; 0 if the microbatch was dropped.
        weights: Weight of each microbatch, 0-dim on the device, or a number that the host knows; 0
            if the microbatch was dropped.
        dropped: Whether each microbatch was dropped, 0-dim bool; empty if none can be dropped.
        streams: Key of the random numbers of each microbatch, see `seed_generators`.
    """

    losses: list[Tensor] = field(default_factory=list)
    loss_sums: list[Tensor] = field(default_factory=list)
    weights: list[Tensor | float] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)

    def add(self, loss: Tensor, weight: Tensor | float, kept: Tensor | None) -> None:
        """Add a microbatch.

        Args:
            loss: Loss sum, FP64 0-dim, detached; not written to afterwards.
            weight: Weight, 0-dim, or a number.
            kept: 0-dim bool, False drops the microbatch; None if microbatches cannot be dropped.
        """
        self.losses.append(loss)
        if kept is not None:
            loss = torch.where(kept, loss, 0.0)
            if not isinstance(weight, Tensor):
                weight = torch.full_like(kept, weight, dtype=torch.float64)
            weight = torch.where(kept, weight, 0)
            self.dropped.append(~kept)
        self.loss_sums.append(loss)
        self.weights.append(weight)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; the host waits only for copies to the host.

    Args:
        batch: A tensor, or nested containers of tensors and other objects, see torch's pytrees.
        device: The device.
    """
    return map_tensors(partial(to_device, device=device), batch)
