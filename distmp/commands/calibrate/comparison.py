"""The result of a comparison of policies: a table with a recommendation, and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distmp.commands.calibrate.seeds import SeedComparison
from distmp.commands.tables import counted, text_table
from distmp.utils.units import bytes_text

# Policies within this factor of the fastest count as equally fast, because of noise.
SAME_SPEED = 1.05


@dataclass(frozen=True)
class PolicyResult:
    """The measurements of a policy.

    Attributes:
        reason: How the device runs the policy (emulated or native).
        losses: Loss of every step, as the mean over the global batch.
        seconds: Duration of every step after the warm-up.
        memory_bytes: Maximum over the ranks of the additional peak memory.
        skipped: Number of skipped steps.
        held_out: "loss" and metrics on held-out samples after the last step; empty without seeds.
    """

    reason: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    memory_bytes: int
    skipped: int
    held_out: Mapping[str, float] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Mean loss of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    @property
    def step_seconds(self) -> float:
        """Median duration of a step."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """The results of all policies; the first policy that ran is the reference.

    Attributes:
        steps: Number of steps under each policy.
        world_size: Number of ranks.
        tolerance: Largest accepted relative difference of the last loss from the reference.
        results: The result of each policy by its name, or why the run cannot use it.
        seeds: The comparison over seeds; None if the policies ran with one seed.
    """

    steps: int
    world_size: int
    tolerance: float
    results: dict[str, PolicyResult | str]
    seeds: SeedComparison | None = None

    @property
    def measured(self) -> dict[str, PolicyResult]:
        """The policies that ran."""
        return {name: one for name, one in self.results.items() if isinstance(one, PolicyResult)}

    def difference(self, name: str) -> float:
        """Return the relative difference of a policy's last loss from the reference."""
        first = next(iter(self.measured.values())).last_loss
        apart = abs(self.measured[name].last_loss - first)
        return apart / abs(first) if first else math.inf if apart else 0.0

    def is_accurate(self, name: str) -> bool:
        """Return whether the last loss is within the tolerance, and agrees over seeds."""
        within = self.difference(name) <= self.tolerance
        return within and (self.seeds is None or self.seeds.agrees(name))

    def recommendation(self) -> tuple[str | None, str]:
        """Return the recommended policy and the reason; None if no policy is accurate enough.

        It is the fastest of the accurate policies; of equally fast ones, the one with least memory.
        """
        measured = self.measured
        accurate = {name: one for name, one in measured.items() if self.is_accurate(name)}
        if not accurate:
            diverged = [n for n, m in measured.items() if not math.isfinite(m.last_loss)]
            advice = f"{', '.join(diverged)} diverged; lower optim.lr, or use another seed"
            return None, advice if measured else "no policy ran"
        fastest = min(one.step_seconds for one in accurate.values())
        fast = {n: m for n, m in accurate.items() if m.step_seconds <= SAME_SPEED * fastest}
        best = min(fast, key=lambda name: (fast[name].memory_bytes, fast[name].step_seconds))
        others = [name for name in measured if name not in accurate]
        verb = "has" if len(others) == 1 else "have"
        note = f"; {', '.join(others)} {verb} a different loss" if others else ""
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
            "policies": {
                name: {"refused": one}
                if isinstance(one, str)
                else {
                    "reason": one.reason,
                    "memory_bytes": one.memory_bytes,
                    "skipped": one.skipped,
                    # JSON has no infinities and no NaN.
                    "losses": [loss if math.isfinite(loss) else None for loss in one.losses],
                    "step_seconds": one.step_seconds,
                }
                for name, one in self.results.items()
            },
            "seeds": self.seeds.as_json() if self.seeds else {},
        }


def report(compared: Comparison) -> Iterator[str]:
    """Yield the lines of the table and the recommendation."""
    yield f"{compared.steps} steps on {counted(compared.world_size, 'rank')}"
    rows: list[tuple[str, ...]] = [
        ("policy", "ms a step", "memory", "last loss", "difference", "skipped", "")
    ]
    for name, one in compared.results.items():
        if isinstance(one, str):
            rows.append((name, "", "", "", "", "", f"refused: {one}"))
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
    yield from text_table(rows, right=range(1, 6))
    if compared.seeds is not None:
        yield from compared.seeds.report()
    recommended, reason = compared.recommendation()
    yield f"use {recommended}: {reason}" if recommended else f"nothing to recommend: {reason}"
