"""`distmp calibrate --config FILE`: compare precision policies on a few steps of a run.

Under torchrun (`torchrun -m distmp.commands.calibrate.command`) it uses all ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distmp.commands.calibrate.settings import CalibrationConfig
from distmp.distributed.rank_environment import RankEnvironment
from distmp.parallel.settings import ShardingConfig
from distmp.process import run_process
from distmp.train import run_as_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit code of this rank: 2 if every policy is refused."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, CalibrationConfig.load, _calibrate)


def _calibrate(config: CalibrationConfig, environment: RankEnvironment) -> int:
    # Imported late: the help and errors in settings do not wait for torch.
    from distmp.commands.calibrate import loss_scale, policies
    from distmp.distributed.world import join, leave
    from distmp.parallel.reproducible import prepare_cublas
    from distmp.precision import resolve

    if config.reproducible:
        prepare_cublas()  # before joining the ranks, which initializes CUDA
    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    config = config.with_fixed_formats()
    if world.group is None:
        sharding = ShardingConfig(wrap=config.sharding.wrap)
        config = replace(config, strategy="single", sharding=sharding, shard_optimizer=False)
    content: dict[str, Any] = {}
    text: list[str] = []
    if any(resolve(name, world.device)[0].loss_scale is not None for name in config.policies):
        gradients = loss_scale.measure(config, world, config.calibrate_steps)
        content["gradients"] = loss_scale.as_json(gradients)
        text += [*loss_scale.report(gradients, config.precision.loss_scale), ""]
    compared = policies.compare(config, world)
    if world.rank == 0:
        content |= compared.as_json()
        text += policies.report(compared)
        sys.stdout.write((json.dumps(content, indent=2) if config.json else "\n".join(text)) + "\n")
    leave()
    return 0 if compared.measured else 2


if __name__ == "__main__":
    run_process(main)
