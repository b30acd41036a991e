"""The picture of docs/testing.md: `python -m tests.testing.figure`.

It shows gradients of wrong training steps on two ranks over those of a right one, as they were
when `check_gradient` named them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from distmp.testing import GradientError, check_gradient
from tests.ranks import run_ranks
from tests.testing import scripts

PICTURE = Path(__file__).parents[2] / "docs" / "testing.svg"
PARAMETER, POINTS = "head.weight", 24


class Panel(NamedTuple):
    """A wrong training step.

    Attributes:
        title: Class and size of its error.
        right: Some elements of the gradient wanted.
        measured: The same of the gradient that the step computes.
    """

    title: str
    right: Tensor
    measured: Tensor


def panels() -> list[Panel]:
    """Check the wrong training steps on this rank and another one."""
    torch.set_num_threads(1)
    right, _ = _checked(scripts.token_mean)
    found = {}
    for kind, train_step in scripts.distributed_wrong():
        measured, mismatch = _checked(train_step)
        found.setdefault(kind, Panel(mismatch, right, measured))
    return [*found.values()]


def _checked(train_step: scripts.TrainStep) -> tuple[Tensor, str]:
    """Return elements of the gradient with two microbatches, and class and size of the error."""
    seen: list[Tensor] = []

    def recorded(model: nn.Module, microbatches: scripts.Microbatches) -> None:
        train_step(model, microbatches)
        parameter = model.get_parameter(PARAMETER)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        seen.append(gradient.flatten()[:POINTS].clone())

    title = ""
    try:
        check_gradient(recorded, scripts.make_model(), scripts.samples())
    except GradientError as error:
        mismatch = error.mismatches[0]
        title = mismatch.kind + f": {mismatch.size:.2g} off" * (mismatch.size > 0)
    return seen[1], title


def draw(found: list[Panel]) -> None:
    """Write the picture."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "distmp", "font.size": 7}):
        figure = Figure((8, 6), layout="constrained")
        for axes, panel in zip(figure.subplots(3, 4).flat, found, strict=True):
            limit = 1.1 * float(panel.right.abs().max())
            axes.plot([-limit, limit], [-limit, limit], color="0.8", linewidth=1)
            axes.plot(panel.right, panel.measured, ".", markersize=3)
            axes.set(title=panel.title, aspect="equal", xticks=[], yticks=[])
            axes.set(xlim=(-limit, limit), ylim=(-limit, limit))
        figure.supxlabel("gradient wanted")
        figure.supylabel("gradient measured")
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw(run_ranks(panels, 2)[1])
