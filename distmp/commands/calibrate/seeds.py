"""Compares policies over seeds: held-out loss and metrics, and the spread of the reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# A policy agrees with the reference if the mean of its differences over seeds is at most this
# number of standard deviations of the reference over seeds: another seed changes it as much.
DEVIATIONS = 2.0
# Fewer values have no meaningful standard deviation.
LEAST_SEEDS = 3


@dataclass(frozen=True)
class SeedComparison:
    """The results of policies with several seeds. All policies use the same seeds.

    Attributes:
        values: "loss" and metrics on held-out samples after the last step, one value for each seed,
            by policy and name. The first policy is the reference.
    """

    values: Mapping[str, Mapping[str, list[float]]]

    @property
    def reference(self) -> Mapping[str, list[float]]:
        """The values of the first policy."""
        return next(iter(self.values.values()))

    def noise(self, what: str) -> float:
        """Return the standard deviation of the reference over seeds; NaN if a seed diverged."""
        values = self.reference[what]
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan

    def excess(self, policy: str, what: str) -> float:
        """Return the mean over seeds of the differences from the reference with the same seed."""
        pairs = zip(self.values[policy][what], self.reference[what], strict=True)
        return statistics.fmean(value - other for value, other in pairs)

    def agrees(self, policy: str) -> bool:
        """Return whether loss and metrics of a policy are those of the reference, up to noise."""
        return all(
            abs(self.excess(policy, what)) <= DEVIATIONS * self.noise(what)
            for what in self.reference
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values of each policy, and whether it agrees, as JSON values."""
        return {
            policy: {
                "values": {
                    what: [value if math.isfinite(value) else None for value in values]
                    for what, values in found.items()
                },
                "agrees": self.agrees(policy),
            }
            for policy, found in self.values.items()
        }

    def report(self) -> Iterator[str]:
        """Yield a line for the reference and one for each other policy, by loss and metric."""
        first, *others = self.values
        for what, values in self.reference.items():
            noise = self.noise(what)
            yield (
                f"held-out {what}: under {first}, a mean of {statistics.fmean(values):.4f} and a "
                f"standard deviation of {noise:.4f} over {len(values)} seeds; a policy agrees if "
                f"the mean of its differences is at most {DEVIATIONS:g} standard deviations"
            )
            for policy in others:
                excess = self.excess(policy, what)
                verdict = "agrees" if abs(excess) <= DEVIATIONS * noise else "DIFFERS"
                yield f"  {policy} {verdict}: {excess:+.4f}"
