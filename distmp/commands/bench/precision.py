"""`distmp bench precision`: train a few steps of a run under each precision policy in turn.

Under torchrun (`torchrun -m distmp.commands.bench.precision`) it uses all ranks.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence

from distmp.commands.bench.settings import BenchPrecisionConfig
from distmp.config import load_as
from distmp.distributed.rank_environment import RankEnvironment
from distmp.training.train import end_process, run_as_rank

load = functools.partial(
    load_as,
    BenchPrecisionConfig,
    prog="distmp bench precision",
    description="Train a few steps under each precision policy and compare.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the policies, and return the exit code of this rank."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _bench)


def _bench(config: BenchPrecisionConfig, environment: RankEnvironment) -> int:
    # Imported late: the help and errors in settings do not wait for torch.
    from distmp.commands.bench.comparison import draw, report
    from distmp.commands.bench.measure import compare
    from distmp.distributed.world import join, leave

    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    compared = compare(config, world)
    if world.rank == 0:
        text = json.dumps(compared.as_json(), indent=2) if config.json else report(compared)
        sys.stdout.write(text + "\n")
        if config.picture is not None:
            draw(compared, config.picture)
    leave()
    return 0


if __name__ == "__main__":
    end_process(main())
