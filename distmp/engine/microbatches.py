"""What the microbatches of a step leave behind on a rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MicrobatchStats(NamedTuple):
    """Loss and weight of each microbatch of a step on this rank; one list entry for each.

    Attributes:
        losses: Loss sums, 0-dim.
        loss_sums: Loss sums, 0-dim, with 0 for a dropped microbatch.
        weights: Weights, 0-dim, with 0 for a dropped microbatch.
        dropped: Whether the microbatch was dropped, 0-dim bool; empty where none can be.
        generators: States of the random generators before the microbatch; empty without
            attribution.
    """

    losses: list[Tensor]
    loss_sums: list[Tensor]
    weights: list[Tensor]
    dropped: list[Tensor]
    generators: list[dict[torch.device, Tensor]]

    @classmethod
    def empty(cls) -> MicrobatchStats:
        """Return the statistics of no microbatch."""
        return cls([], [], [], [], [])

    def add(self, loss: Tensor, weight: Tensor, kept: Tensor | None) -> None:
        """Add a microbatch.

        Args:
            loss: Loss sum, 0-dim, detached; not written to afterwards.
            weight: 0-dim.
            kept: 0-dim bool, False drops the microbatch; None where none can be dropped.
        """
        self.losses.append(loss)
        if kept is not None:
            loss = torch.where(kept, loss, 0.0)
            weight = torch.where(kept, weight, 0)
            self.dropped.append(~kept)
        self.loss_sums.append(loss)
        self.weights.append(weight)
