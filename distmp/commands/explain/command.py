"""`distmp explain --config FILE`: print types, communication and memory of a run before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from distmp.config import RunConfig
from distmp.errors import require
from distmp.launcher.local import default_ranks

# Most machines for training have 8 GPUs.
USUAL_RANKS = 8
# Far above every real run, and within torch's type.
_MOST_RANKS = 10**6


@dataclass(frozen=True)
class ExplainConfig(RunConfig):
    """A training run to explain without running it."""

    prog = "distmp explain"
    description = "Print dtypes, communication and memory of a run before it starts."

    world_size: int | None = None
    """Number of ranks of the run; this machine may have fewer devices. null uses the number that
    `distmp launch` would start."""

    ranks_per_machine: int | None = None
    """Number of ranks on each machine of the run; it divides `world_size`. null uses 8, or the next
    smaller divisor."""

    json: bool = False
    """Print JSON instead of tables."""

    def _check(self) -> None:
        super()._check()
        for name in ("world_size", "ranks_per_machine"):
            value = getattr(self, name)
            valid = value is None or 1 <= value <= _MOST_RANKS
            self._require(valid, name, f"use 1 to {_MOST_RANKS:,} ranks")


def main(argv: Sequence[str] | None = None) -> int:
    """Explain a run, and return the exit code.

    Raises:
        ConfigError: If the configuration is invalid.
    """
    config = ExplainConfig.load(sys.argv[1:] if argv is None else argv)
    # Imported late: fake tensors take a second to import, and errors are reported without them.
    from distmp.commands.explain.explanation import explain, plain
    from distmp.commands.explain.report import report

    ranks = config.world_size
    if ranks is None:
        ranks = 1 if config.strategy == "single" else default_ranks()[0]
    explanation = explain(config, ranks, _ranks_per_machine(ranks, config.ranks_per_machine))
    if config.json:
        text = json.dumps(explanation.as_mapping(), indent=2, default=plain)
    else:
        text = "\n".join(report(explanation))
    sys.stdout.write(text + "\n")
    return 0


def _ranks_per_machine(world_size: int, requested: int | None) -> int:
    if requested is None:
        return max(number for number in range(1, USUAL_RANKS + 1) if world_size % number == 0)
    problem = (
        f"does not divide the {world_size} ranks; use a divisor, because all machines have the "
        "same number of ranks"
    )
    require(world_size % requested == 0, "ranks_per_machine", requested, problem)
    return requested
