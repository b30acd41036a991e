"""`distmp calibrate --config FILE`: compare gradients of a few steps with the range of float16.

With `--formats`, measure matrix products with 8 and 4 bits instead.

Under torchrun (`torchrun -m distmp.commands.calibrate`) the counts are summed over all ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distmp.commands.narrow_formats.settings import MAX_ERROR, split_formats
from distmp.config import RunConfig, load_as
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError
from distmp.training.train import end_process, run_as_rank

if TYPE_CHECKING:
    from distmp.distributed.world import World


@dataclass(frozen=True)
class CalibrationConfig(RunConfig):
    """A training run that stops after a few steps, and the output."""

    calibrate_steps: int = 20
    """Number of training steps."""

    json: bool = False
    """Print JSON instead of tables."""

    picture: str | None = None
    """PNG file for the histograms or errors; null writes none."""

    formats: tuple[str, ...] = ()
    """Measure matrix products with these formats (fp8, fp8-rowwise, mxfp8, nvfp4) and choose a
    policy; empty measures gradients for float16."""

    max_error: float = MAX_ERROR
    """With `formats`: largest relative error of a product in the policy. Typical errors are 0.01 to
    0.07 with 8 bits, and 0.03 to 0.15 with nvfp4."""

    policy_file: str | None = None
    """With `formats`: the text file to which the policy is written; null writes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate_steps < 1:
            raise ConfigError("calibrate_steps", self.calibrate_steps, "use 1 or more steps")
        for name in ("picture", "policy_file"):
            path = getattr(self, name)
            if path is None:
                continue
            if not Path(path).absolute().parent.is_dir() or Path(path).is_dir():
                raise ConfigError(name, path, "name a file in a folder that exists")
        object.__setattr__(self, "formats", split_formats(self.formats))
        if not 0 < self.max_error < 1:
            raise ConfigError("max_error", self.max_error, "use a number between 0 and 1")
        for name, default in (("max_error", MAX_ERROR), ("policy_file", None)):
            if not self.formats and getattr(self, name) != default:
                raise ConfigError(
                    name, getattr(self, name), "has no effect without --formats; set it"
                )


load = functools.partial(
    load_as,
    CalibrationConfig,
    prog="distmp calibrate",
    description="Train a few steps and compare gradients with the range of float16, or measure "
    "matrix products with 8 and 4 bits.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit code of this rank."""
    return run_as_rank(sys.argv[1:] if argv is None else argv, load, _calibrate)


def _calibrate(config: CalibrationConfig, environment: RankEnvironment) -> int:
    # Imported late: the help and errors in settings do not wait for torch.
    from distmp.distributed.world import join, leave

    world = join(environment, timeout_seconds=60 * config.timeout_minutes)
    if config.formats:
        _measure_formats(config, world)
    else:
        _measure_range(config, world)
    leave()
    return 0


def _measure_range(config: CalibrationConfig, world: World) -> None:
    from distmp.commands.gradient_range import measure
    from distmp.telemetry.calibration import as_json, report
    from distmp.telemetry.gradient_ranges import draw_gradient_ranges

    calibration = measure(config, world, config.calibrate_steps)
    if world.rank == 0:
        lines = report(calibration, config.precision.loss_scale)
        text = as_json(calibration) if config.json else "\n".join(lines)
        sys.stdout.write(text + "\n")
        if config.picture is not None:
            scale = calibration.total.recommended_scale()
            with _written("picture", config.picture):
                draw_gradient_ranges(calibration.histograms, scale, config.picture)


def _measure_formats(config: CalibrationConfig, world: World) -> None:
    from distmp.commands.narrow_formats.choice import choose_policy
    from distmp.commands.narrow_formats.measure import measure_formats
    from distmp.commands.narrow_formats.plot import draw
    from distmp.commands.narrow_formats.report import as_json, report

    found = measure_formats(config, world, config.calibrate_steps, config.formats)
    if world.rank > 0:
        return
    choice = choose_policy(found, config.max_error)
    make = as_json if config.json else report
    sys.stdout.write(make(found, choice, config.max_error) + "\n")
    if config.policy_file is not None:
        with _written("policy_file", config.policy_file):
            Path(config.policy_file).write_text(choice.text + "\n")
    if config.picture is not None:
        with _written("picture", config.picture):
            draw(found, config.max_error, config.picture)


@contextmanager
def _written(setting: str, path: str) -> Iterator[None]:
    """Explain that a file cannot be written, after the numbers were printed."""
    try:
        yield
    except OSError as error:
        raise ConfigError(setting, path, f"cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    end_process(main())
