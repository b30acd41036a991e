"""What a comparison of policies found: as a table with a recommendation, as JSON, as a picture."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass
from typing import Any

from distmp.utils.files import replacing
from distmp.utils.units import bytes_text

# A policy that is this much slower than the fastest is still as fast, on a machine with noise.
SAME_SPEED = 1.05


@dataclass(frozen=True)
class PolicyResult:
    """A policy that the run can have.

    Attributes:
        reason: What the device makes of it (emulated, native).
        losses: Of every step; the mean over the global batch.
        seconds: Of every step after the first few.
        memory_bytes: The most that a rank needed beyond what it had before.
        skipped: Steps that were skipped.
    """

    reason: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    memory_bytes: int
    skipped: int

    @property
    def last_loss(self) -> float:
        """Mean of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    @property
    def step_seconds(self) -> float:
        """Median."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class PolicyRefused:
    """A policy that the run cannot have, and why."""

    reason: str


@dataclass(frozen=True)
class Comparison:
    """What was measured, by policy; the first policy is the one that others are compared with."""

    steps: int
    world_size: int
    tolerance: float
    found: dict[str, PolicyResult | PolicyRefused]

    @property
    def measured(self) -> dict[str, PolicyResult]:
        """Policies that ran."""
        return {name: one for name, one in self.found.items() if isinstance(one, PolicyResult)}

    def apart(self, name: str) -> float:
        """Return the relative difference of a policy's last loss from that of the first."""
        first = next(iter(self.measured.values())).last_loss
        return abs(self.measured[name].last_loss - first) / abs(first) if first else math.nan

    def recommendation(self) -> tuple[str | None, str]:
        """Return the policy to take, and why; None if none learns as the first one does.

        Of those that do, the fastest; of those that are as fast, the one that needs least memory.
        """
        learning = {n: m for n, m in self.measured.items() if self.apart(n) <= self.tolerance}
        if not learning:
            return None, "no policy ran with a finite loss"
        fastest = min(one.step_seconds for one in learning.values())
        fast = {n: m for n, m in learning.items() if m.step_seconds <= SAME_SPEED * fastest}
        chosen = min(fast, key=lambda name: (fast[name].memory_bytes, fast[name].step_seconds))
        left_out = [name for name in self.measured if name not in learning]
        worse = f"; {', '.join(left_out)} learns otherwise" if left_out else ""
        return chosen, (
            f"the least memory of the fastest whose loss is within {self.tolerance:.1%}{worse}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything as values that JSON can hold."""
        chosen, reason = self.recommendation()
        return {
            "steps": self.steps,
            "world_size": self.world_size,
            "recommended": chosen,
            "reason": reason,
            "policies": {
                name: {"refused": one.reason}
                if isinstance(one, PolicyRefused)
                else {
                    "reason": one.reason,
                    "losses": [loss if math.isfinite(loss) else None for loss in one.losses],
                    "step_seconds": one.step_seconds,
                    "memory_bytes": one.memory_bytes,
                    "skipped": one.skipped,
                }
                for name, one in self.found.items()
            },
        }


def report(compared: Comparison) -> str:
    """Return the table and the recommendation, for people."""
    head = ("policy", "ms a step", "memory", "last loss", "apart", "skipped", "")
    rows = [head]
    for name, one in compared.found.items():
        if isinstance(one, PolicyRefused):
            rows.append((name, "", "", "", "", "", f"refused: {one.reason}"))
            continue
        rows.append(
            (
                name,
                f"{1000 * one.step_seconds:.1f}",
                bytes_text(one.memory_bytes),
                f"{one.last_loss:.4f}",
                f"{compared.apart(name):.2%}",
                str(one.skipped),
                one.reason,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]
        ).rstrip()
        for row in rows
    ]
    ranks = "1 rank" if compared.world_size == 1 else f"{compared.world_size} ranks"
    chosen, reason = compared.recommendation()
    advice = f"take {chosen}: {reason}" if chosen else f"nothing to recommend: {reason}"
    return "\n".join([f"{compared.steps} steps on {ranks}", *lines, advice])


def draw(compared: Comparison, path: str | os.PathLike[str]) -> None:
    """Draw losses, time and memory of all policies into a PNG, replaced whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["time", "memory"]], height_ratios=[3, 2])
    names = list(compared.measured)
    for name, one in compared.measured.items():
        panels["loss"].plot(range(1, compared.steps + 1), one.losses, label=name, linewidth=1.2)
    panels["loss"].set(title="Loss", xlabel="step")
    panels["loss"].legend(fontsize=9, frameon=False)
    times = [1000 * compared.measured[name].step_seconds for name in names]
    memory = [compared.measured[name].memory_bytes / 2**20 for name in names]
    for panel, values, title in (
        ("time", times, "Time of a step, ms"),
        ("memory", memory, "Peak memory of a rank, MiB"),
    ):
        bars = panels[panel].barh(names, values, color="#56B4E9")
        panels[panel].bar_label(bars, fmt="%.3g", padding=3)
        panels[panel].invert_yaxis()
        panels[panel].margins(x=0.15)
        panels[panel].set_title(title)
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as file:
        canvas.print_png(file)
