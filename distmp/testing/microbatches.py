"""The microbatches of a step: forwards with the losses that were computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmp.errors import require
from distmp.testing.losses import PASS
from distmp.testing.recording import Forward, ForwardRecord, Loss


@dataclass(frozen=True)
class Microbatch:
    """Forwards that enter the same losses.

    Attributes:
        forwards: The forwards.
        weight: Number of losses in the first sum.
        scale: What backward has multiplied that sum by.
    """

    forwards: Sequence[Forward]
    weight: float
    scale: float


def microbatches(record: ForwardRecord) -> list[Microbatch]:
    """Return the microbatches of a step, in the order of their forwards.

    Raises:
        ConfigError: If there is a forward without loss, or a loss with several weights.
    """
    require(bool(record.forwards), "forwards", 0, "audit the module that the script calls")
    left, found = [*record.forwards], []
    while left:
        forwards, size = {left[0]}, 0
        while len(forwards) > size:
            size = len(forwards)
            losses = [each for each in record.losses if each.forwards & forwards]
            forwards = forwards.union(*(each.forwards for each in losses))
        problem = f"no loss function of torch was seen after one of them; {PASS}"
        require(bool(losses), "forwards", len(record.forwards), problem)
        found.append(_microbatch([each for each in left if each in forwards], losses))
        left = [each for each in left if each not in forwards]
    return found


def _microbatch(forwards: Sequence[Forward], losses: Sequence[Loss]) -> Microbatch:
    (weight, scale), *others = map(_weight_and_scale, losses)
    is_sum = all(each.reduction != "mean" for each in losses)
    # Parts of one sum; of several losses, the first one's number counts.
    weight += sum(count for count, each in others if is_sum and each == scale)
    return Microbatch(forwards, weight, abs(scale))  # a negative one maximizes


def _weight_and_scale(loss: Loss) -> tuple[float, float]:
    gradient, counted = loss.gradient.double(), loss.counted
    if loss.reduction == "none":
        used = gradient != 0  # by a mask of the user
        scales, counted = gradient[used], counted * used
        problem = f"have several weights; {PASS}"
        same = not len(scales) or bool(scales.max() - scales.min() <= 0.01 * scales.abs().max())
        require(same, "elements of the loss", loss.gradient.numel(), problem)
        return float(counted.sum()), float(scales[:1].sum())
    weight = float(counted.sum())
    return weight, float(gradient) / (weight or 1.0 if loss.reduction == "mean" else 1.0)
