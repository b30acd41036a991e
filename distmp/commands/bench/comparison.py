"""The result of a comparison of policies: a table with a recommendation, JSON, and a plot."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distmp.utils.files import replacing
from distmp.utils.units import bytes_text

# Policies within this factor of the fastest count as equally fast, because of noise.
SAME_SPEED = 1.05
# A final loss agrees with that of the reference if it differs by at most this number of standard
# deviations of the reference's final losses over seeds: another seed changes it as much.
DEVIATIONS = 2.0


@dataclass(frozen=True)
class PolicyResult:
    """The measurements of a policy.

    Attributes:
        reason: How the device runs the policy (emulated or native).
        losses: Loss of every step, as the mean over the global batch.
        seconds: Duration of every step after the warm-up.
        memory_bytes: Maximum over the ranks of the additional peak memory.
        skipped: Number of skipped steps.
        held_out: Loss on held-out samples after the last step; None if it was not computed.
    """

    reason: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    memory_bytes: int
    skipped: int
    held_out: float | None = None

    @property
    def final_loss(self) -> float:
        """The loss on held-out samples, if it was computed, or else `last_loss`."""
        return self.last_loss if self.held_out is None else self.held_out

    @property
    def last_loss(self) -> float:
        """Mean loss of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    @property
    def step_seconds(self) -> float:
        """Median duration of a step."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class PolicyRefused:
    """A policy that cannot be used for the run.

    Attributes:
        reason: The error message.
    """

    reason: str


@dataclass(frozen=True)
class Comparison:
    """The results of all policies; the first policy that ran is the reference.

    Attributes:
        steps: Number of steps under each policy.
        world_size: Number of ranks.
        tolerance: Largest accepted relative difference of the last loss from the reference.
        results: The result of each policy, by its name.
        seeds: The results of the reference with other seeds.
    """

    steps: int
    world_size: int
    tolerance: float
    results: dict[str, PolicyResult | PolicyRefused]
    seeds: tuple[PolicyResult, ...] = ()

    @property
    def measured(self) -> dict[str, PolicyResult]:
        """The policies that ran."""
        return {name: one for name, one in self.results.items() if isinstance(one, PolicyResult)}

    def difference(self, name: str) -> float:
        """Return the relative difference of a policy's last loss from the reference."""
        first = next(iter(self.measured.values())).last_loss
        return abs(self.measured[name].last_loss - first) / abs(first) if first else math.nan

    @property
    def noise(self) -> float:
        """Standard deviation of the final losses of the reference over seeds, its own included."""
        losses = [one.final_loss for one in (next(iter(self.measured.values())), *self.seeds)]
        return statistics.stdev(losses) if all(map(math.isfinite, losses)) else math.nan

    def excess(self, name: str) -> float:
        """Return how much larger a policy's final loss is than that of the reference."""
        return self.measured[name].final_loss - next(iter(self.measured.values())).final_loss

    def agrees(self, name: str) -> bool:
        """Return whether a policy's final loss differs by at most `DEVIATIONS` times the noise."""
        return abs(self.excess(name)) <= DEVIATIONS * self.noise

    def is_accurate(self, name: str) -> bool:
        """Return whether a policy can be recommended.

        Its last loss is within the tolerance, and with other seeds, its final loss agrees.
        """
        within = self.difference(name) <= self.tolerance
        return within and (not self.seeds or self.agrees(name))

    def recommendation(self) -> tuple[str | None, str]:
        """Return the recommended policy and the reason; None if no policy is accurate enough.

        It is the fastest of the accurate policies; of equally fast ones, the one with least memory.
        """
        accurate = {name: one for name, one in self.measured.items() if self.is_accurate(name)}
        if not accurate:
            return None, "no policy ran with a finite loss"
        fastest = min(one.step_seconds for one in accurate.values())
        fast = {n: m for n, m in accurate.items() if m.step_seconds <= SAME_SPEED * fastest}
        best = min(fast, key=lambda name: (fast[name].memory_bytes, fast[name].step_seconds))
        excluded = [name for name in self.measured if name not in accurate]
        verb = "has" if len(excluded) == 1 else "have"
        note = f"; {', '.join(excluded)} {verb} a different loss" if excluded else ""
        within = f"{self.tolerance:.1%}{' and the noise between seeds' if self.seeds else ''}"
        return best, f"least memory of the fastest policies whose loss is within {within}{note}"

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        recommended, reason = self.recommendation()
        return {
            "steps": self.steps,
            "world_size": self.world_size,
            "recommended": recommended,
            "reason": reason,
            "noise": self._noise_as_json(),
            "policies": {
                name: {"refused": one.reason}
                if isinstance(one, PolicyRefused)
                else {
                    "reason": one.reason,
                    "losses": [_finite(loss) for loss in one.losses],
                    "step_seconds": one.step_seconds,
                    "memory_bytes": one.memory_bytes,
                    "skipped": one.skipped,
                    "final_loss": _finite(one.final_loss),
                    "agrees": self.agrees(name) if self.seeds else None,
                }
                for name, one in self.results.items()
            },
        }

    def _noise_as_json(self) -> dict[str, Any] | None:
        if not self.seeds:
            return None
        return {
            "final_losses": [_finite(one.final_loss) for one in self.seeds],
            "standard_deviation": _finite(self.noise),
            "accepted_deviations": DEVIATIONS,
        }


def _finite(number: float) -> float | None:
    """JSON has no infinities and no NaN."""
    return number if math.isfinite(number) else None


def report(compared: Comparison) -> str:
    """Return the table and the recommendation as text."""
    head = ("policy", "ms a step", "memory", "last loss", "difference", "skipped", "")
    rows = [head]
    for name, one in compared.results.items():
        if isinstance(one, PolicyRefused):
            rows.append((name, "", "", "", "", "", f"refused: {one.reason}"))
            continue
        rows.append(
            (
                name,
                f"{1000 * one.step_seconds:.1f}",
                bytes_text(one.memory_bytes),
                f"{one.last_loss:.4f}",
                f"{compared.difference(name):.2%}",
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
    recommended, reason = compared.recommendation()
    advice = f"use {recommended}: {reason}" if recommended else f"nothing to recommend: {reason}"
    return "\n".join([f"{compared.steps} steps on {ranks}", *lines, *_agreement(compared), advice])


def _agreement(compared: Comparison) -> Iterator[str]:
    """Yield whether the loss of each policy is that of the reference, up to the noise."""
    if not compared.seeds:
        return
    reference, *others = compared.measured
    first = compared.measured[reference]
    kind = "loss of the last quarter" if first.held_out is None else "held-out loss"
    yield (
        f"noise: the {kind} under {reference}, {first.final_loss:.4f}, has a standard deviation of "
        f"{compared.noise:.4f} over {1 + len(compared.seeds)} seeds; a policy "
        f"agrees if its loss differs by at most {DEVIATIONS:g} of them"
    )
    for name in others:
        excess = compared.excess(name)
        ratio = abs(excess) / compared.noise if compared.noise else math.inf if excess else 0.0
        verdict = "agrees" if compared.agrees(name) else "DIFFERS"
        yield f"{name} {verdict}: {excess:+.4f}, {ratio:.1f} standard deviations"


def draw(compared: Comparison, path: str | os.PathLike[str]) -> None:
    """Draw losses, time and memory of all policies into a PNG, which is replaced atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["time", "memory"]], height_ratios=[3, 2])
    names = list(compared.measured)
    for name, one in compared.measured.items():
        panels["loss"].plot(range(1, compared.steps + 1), one.losses, label=name, linewidth=1.2)
    for one in compared.seeds:
        steps = range(1, compared.steps + 1)
        panels["loss"].plot(steps, one.losses, color="0.7", linewidth=0.8, zorder=0)
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
