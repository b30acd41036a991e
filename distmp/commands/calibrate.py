"""`distmp calibrate --config FILE`: compare gradients of a few steps with the range of float16.

Under torchrun (`torchrun -m distmp.commands.calibrate`) the counts are summed over all ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distmp.config import RunConfig, load_as
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError
from distmp.training.train import end_process, run_as_rank


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run that stops after a few steps, and the output."""

    calibrate_steps: int = 20
    """Number of training steps."""

    json: bool = False
    """Print JSON instead of tables."""

    picture: str | None = "calibration.png"
    """PNG file for the histograms; null writes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate_steps < 1:
            raise ConfigError("calibrate_steps", self.calibrate_steps, "use 1 or more steps")
        if self.picture is not None and not Path(self.picture).absolute().parent.is_dir():
            raise ConfigError("picture", self.picture, "name a file in a folder that exists")


load = functools.partial(
    load_as,
    CalibrationConfig,
    prog="distmp calibrate",
    description="Train a few steps and compare gradients with the range of float16.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit code of this rank."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _calibrate)


def _calibrate(config: CalibrationConfig, environment: RankEnvironment) -> int:
    # Imported late: the help and errors in settings do not wait for torch.
    from distmp.commands.gradient_range import measure
    from distmp.distributed.world import join, leave
    from distmp.telemetry.calibration import as_json, report
    from distmp.telemetry.gradient_ranges import draw_gradient_ranges

    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    calibration = measure(config, world, config.calibrate_steps)
    if world.rank == 0:
        lines = report(calibration, config.precision.loss_scale)
        text = as_json(calibration) if config.json else "\n".join(lines)
        sys.stdout.write(text + "\n")
        if config.picture is not None:
            scale = calibration.total.recommended_scale()
            draw_gradient_ranges(calibration.histograms, scale, config.picture)
    leave()
    return 0


if __name__ == "__main__":
    end_process(main())
