"""The result of a comparison of policies: a table with a recommendation, and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distmp.utils.units import bytes_text

# Policies within this factor of the fastest count as equally fast, because of noise.
SAME_SPEED = 1.05
# A result agrees with that of the reference if the mean of their differences over seeds is at most
# this number of standard deviations of the reference over seeds: another seed changes it as much.
DEVIATIONS = 2.0
LOSS = "loss"


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
        metrics: Metrics on the same samples, by name.
        seed: Seed of the run.
    """

    reason: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    memory_bytes: int
    skipped: int
    held_out: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seed: int = 1

    @property
    def final(self) -> dict[str, float]:
        """`final_loss` as LOSS, and the metrics."""
        return {LOSS: self.final_loss, **self.metrics}

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
        seeds: The results of each policy that ran with other seeds, by its name.
    """

    steps: int
    world_size: int
    tolerance: float
    results: dict[str, PolicyResult | PolicyRefused]
    seeds: Mapping[str, Sequence[PolicyResult]] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, PolicyResult]:
        """The policies that ran."""
        return {name: one for name, one in self.results.items() if isinstance(one, PolicyResult)}

    def difference(self, name: str) -> float:
        """Return the relative difference of a policy's last loss from the reference."""
        first = next(iter(self.measured.values())).last_loss
        apart = abs(self.measured[name].last_loss - first)
        return apart / abs(first) if first else math.inf if apart else 0.0

    def finals(self, name: str, result: str) -> list[float]:
        """Return LOSS or a metric of a policy after the last step, by seed."""
        return [one.final[result] for one in (self.measured[name], *self.seeds.get(name, ()))]

    def noise(self, result: str) -> float:
        """Return the standard deviation of LOSS or a metric of the reference over seeds."""
        values = self.finals(next(iter(self.measured)), result)
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan

    def excess(self, name: str, result: str) -> float:
        """Return how much larger LOSS or a metric is than that of the reference: a mean over seeds.

        Both have the same initial weights and batches in each seed.
        """
        reference = self.finals(next(iter(self.measured)), result)
        return statistics.fmean(map(float.__sub__, self.finals(name, result), reference))

    def agrees(self, name: str, result: str) -> bool:
        """Return whether LOSS or a metric differs by at most `DEVIATIONS` times the noise."""
        return abs(self.excess(name, result)) <= DEVIATIONS * self.noise(result)

    def diverged(self, name: str) -> str:
        """Return in which runs of a policy LOSS or a metric is not finite; empty if in none."""
        runs = (self.measured[name], *self.seeds.get(name, ()))
        seeds = [str(run.seed) for run in runs if not all(map(math.isfinite, run.final.values()))]
        return f"{name} diverged with seed {' and '.join(seeds)}" if seeds else ""

    def is_accurate(self, name: str) -> bool:
        """Return whether a policy can be recommended.

        Its last loss is within the tolerance, and with other seeds, its loss and metrics agree.
        """
        if not self.difference(name) <= self.tolerance:
            return False
        return not self.seeds or all(self.agrees(name, what) for what in self.measured[name].final)

    def recommendation(self) -> tuple[str | None, str]:
        """Return the recommended policy and the reason; None if no policy is accurate enough.

        It is the fastest of the accurate policies; of equally fast ones, the one with least memory.
        """
        accurate = {name: one for name, one in self.measured.items() if self.is_accurate(name)}
        diverged = [*filter(None, map(self.diverged, self.measured))]
        if not accurate:
            advice = f"{', '.join(diverged)}; lower optim.lr, or use another seed"
            return None, advice if diverged else "no policy ran"
        fastest = min(one.step_seconds for one in accurate.values())
        fast = {n: m for n, m in accurate.items() if m.step_seconds <= SAME_SPEED * fastest}
        best = min(fast, key=lambda name: (fast[name].memory_bytes, fast[name].step_seconds))
        others = [n for n in self.measured if n not in accurate and not self.diverged(n)]
        what = "loss or metric" if self.measured[best].metrics else "loss"
        apart = f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} a different {what}"
        note = "".join(f"; {text}" for text in (*diverged, *([apart] if others else ())))
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
            "noise": {
                what: {"standard_deviation": _finite(self.noise(what)), "accepted": DEVIATIONS}
                for what in self._compared
            },
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
                    "over_seeds": {
                        what: {
                            "values": [*map(_finite, self.finals(name, what))],
                            "difference": _finite(self.excess(name, what)),
                            "agrees": self.agrees(name, what),
                        }
                        for what in self._compared
                    },
                }
                for name, one in self.results.items()
            },
        }

    @property
    def _compared(self) -> list[str]:
        """What is compared over seeds."""
        return [*next(iter(self.measured.values())).final] if self.seeds else []


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
    """Yield whether loss and metrics of each policy are those of the reference, up to the noise."""
    if not compared.seeds:
        return
    reference, *others = compared.measured
    first = compared.measured[reference]
    for what in first.final:
        kind = f"held-out {what}" if first.held_out is not None else "loss of the last quarter"
        values, noise = compared.finals(reference, what), compared.noise(what)
        if math.isnan(noise):
            yield f"{kind}: no noise to compare with, because {compared.diverged(reference)}"
            continue
        yield (
            f"{kind}: under {reference}, a mean of {statistics.fmean(values):.4f} and a standard "
            f"deviation of {noise:.4f} over {len(values)} seeds; a policy agrees if the mean of "
            f"its differences is at most {DEVIATIONS:g} standard deviations"
        )
        for name in others:
            excess = compared.excess(name, what)
            ratio = abs(excess) / noise if noise else math.inf if excess else 0.0
            verdict = "agrees" if compared.agrees(name, what) else "DIFFERS"
            found = compared.diverged(name) or f"{excess:+.4f}, {ratio:.1f} standard deviations"
            yield f"  {name} {verdict}: {found}"
