"""`torchrun -m distmp.commands.preflight`: run only the preflight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from distmp.config import RunConfig, load
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import leave
from distmp.errors import ConfigError
from distmp.launcher.preflight import join_checked
from distmp.training import failures
from distmp.training.train import end_process, run_as_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Run only the preflight, and return the exit code of this rank."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _run_preflight)


def _run_preflight(config: RunConfig, environment: RankEnvironment) -> int:
    if environment.world_size == 1:
        raise ConfigError("WORLD_SIZE", 1, "use two or more; `distmp doctor` checks a machine")
    watch = partial(failures.watch_preflight, environment)
    _, report = join_checked(config, environment, watch)
    if environment.rank == 0:
        for line in (report.summary, *report.warnings):
            sys.stdout.write(f"preflight: {line}\n")
    leave()
    return 0


if __name__ == "__main__":
    end_process(main())
