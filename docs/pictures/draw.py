"""Draw the pictures of the pages from the data beside this file: `python docs/pictures/draw.py`.

`timeline.json` has the ranges of the traces of one recorded step (`--profile.steps`), `memory.json`
predictions of `distmp explain --json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
# Text stays text, so that readers can select it, and a test can read it.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "distmp", "font.size": 9}
COLORS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "all-reduce": "#f16913",
    "decision": "#cb181d",
    "update": "#41ab5d",
}
# Parts of the memory of a rank, by the names of `distmp explain`; others are summed.
PARTS = {
    "parameters": "#4292c6",
    "master weights": "#9ecae1",
    "optimizer state": "#41ab5d",
    "FP32 gradients": "#f16913",
    "activations, logits and loss": "#807dba",
    "other": "#bdbdbd",
}


def timeline() -> Figure:
    """Draw one step of two ranks: the work of each, and its all-reduces beside it."""
    figure = Figure((9, 3), layout="constrained")
    axes = figure.subplots()
    for rank, name, start, length in _read("timeline")["ranges"]:
        kind = next(kind for kind in COLORS if name.startswith(kind))
        row = 2 * rank + (kind == "all-reduce")
        axes.barh(row, length, left=start, height=0.8, color=COLORS[kind], edgecolor="white")
        if kind in ("forward", "backward"):
            microbatch = name.rpartition(" ")[2]
            axes.text(start + length / 2, row, microbatch, ha="center", va="center")
    lanes = [f"rank {rank}: {lane}" for rank in (0, 1) for lane in ("work", "communication")]
    axes.set_yticks(range(4), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of the step; the number of each microbatch")
    _legend(axes, COLORS)
    return figure


def memory() -> Figure:
    """Draw the memory of a rank at the peak of a step, by part and strategy."""
    figure = Figure((9, 2.8), layout="constrained")
    axes = figure.subplots()
    strategies = _read("memory")["strategies"]
    for row, predicted in enumerate(strategies.values()):
        left = 0.0
        for part, size in _parts(predicted["memory"]).items():
            axes.barh(row, size, left=left, height=0.7, color=PARTS[part], edgecolor="white")
            left += size
        axes.text(left + 0.2, row, f"{left:.1f} GB", va="center")
    axes.set_yticks(range(len(strategies)), strategies)
    axes.invert_yaxis()
    axes.set_xlabel("GB of one of 8 ranks, 1.3 B parameters, bf16")
    axes.margins(x=0.1)
    _legend(axes, PARTS)
    return figure


def flag() -> Figure:
    """Draw how the overflow of one rank makes all ranks skip."""
    figure = Figure((9, 3), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 12), ylim=(0, 4))
    for y, found, stats in ((3.0, "a gradient is inf", "1"), (1.0, "all gradients finite", "0")):
        rank = f"rank {0 if y > 2 else 1}"
        _box(axes, 1.3, y, f"{rank}\n{found}", COLORS["backward"])
        _box(axes, 4.2, y, f"statistics, FP64\nnon-finite: {stats}", COLORS["forward"])
        _arrow(axes, (2.5, y), (3.0, y))
        _arrow(axes, (5.4, y), (5.9, 2.3 if y > 2 else 1.7))
        _arrow(axes, (8.3, 2.3 if y > 2 else 1.7), (8.8, y))
        _box(axes, 10.2, y, f"{rank} skips the step\nscale / 2", COLORS["update"], width=2.8)
    _box(axes, 7.1, 2.0, "one all-reduce\nnon-finite: 1", COLORS["all-reduce"])
    return figure


def _box(axes: Axes, x: float, y: float, text: str, color: str, width: float = 2.4) -> None:
    corner = (x - width / 2, y - 0.5)
    box = FancyBboxPatch(corner, width, 1.0, "round,pad=0,rounding_size=0.15")
    box.set(facecolor=color, edgecolor="none", alpha=0.35)
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#525252"})


def _parts(predicted: dict[str, int]) -> dict[str, float]:
    """Return the size of each part in GB."""
    sizes = dict.fromkeys(PARTS, 0.0)
    for part, size in predicted.items():
        sizes[part if part in PARTS else "other"] += size / 1e9
    return sizes


def _legend(axes: Axes, colors: dict[str, str]) -> None:
    handles = [axes.barh(0, 0, color=color, label=name) for name, color in colors.items()]
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=3 if len(colors) > 5 else 5,
        frameon=False,
    )


def _read(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


PICTURES: dict[str, Callable[[], Figure]] = {"timeline": timeline, "memory": memory, "flag": flag}


def main(directory: Path = HERE) -> int:
    """Write all pictures."""
    with rc_context(STYLE):
        for name, picture in PICTURES.items():
            picture().savefig(directory / f"{name}.svg", metadata={"Date": None, "Creator": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
