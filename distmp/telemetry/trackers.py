"""Log step records to TensorBoard, W&B and the other trackers that accelerate supports."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmp.errors import ConfigError, nearest, require
from distmp.masking import masked, masked_text
from distmp.telemetry.records import StepRecord
from distmp.utils.imports import load_object, require_package
from distmp.utils.settings import flat

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_PACKAGE_OF = {"tensorboard": "distmp[trackers]", "comet_ml": "comet-ml"}


class Trackers:
    """The started trackers, which log each step as scalars.

    A tracker that fails is dropped with a message; it does not end training.

    Args:
        trackers: The started trackers by name; empty on all ranks except the first.
        warn: Called with a message when a tracker fails.
    """

    def __init__(self, trackers: Mapping[str, GeneralTracker], warn: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._warn = warn

    def write(self, record: StepRecord) -> None:
        """Log the record of a step."""
        values = scalars(record)
        self._each(lambda tracker: tracker.log(values, step=record.step))

    def add_validation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Log a validation of a step that is logged already."""
        values = _of_validation({"loss": loss, **metrics})
        self._each(lambda tracker: tracker.log(values, step=step))

    def close(self) -> None:
        """Flush and finish the trackers."""
        self._each(lambda tracker: tracker.finish())
        self._trackers.clear()

    def _each(self, action: Callable[[GeneralTracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001  # trackers raise any error
                del self._trackers[name]
                problem = f"failed ({_error_text(error)}); training continues without it"
                self._warn(f"tracker {name} {problem}")


def start(
    trackers: Mapping[str, Mapping[str, Any]],
    *,
    directory: Path,
    hyperparameters: Mapping[str, Any],
    after_step: int,
    warn: Callable[[str], None],
) -> Trackers:
    """Start trackers; called on the first rank only.

    Args:
        trackers: Keyword arguments of each tracker, by the names in `log.trackers`. `project` is
            the name of the project, by default "distmp".
        directory: Directory of the run; a tracker that writes files gets a subdirectory of its
            name.
        hyperparameters: The configuration as nested mappings.
        after_step: The step from which the run continues, or 0.
        warn: Called with a message when a tracker fails later.

    Raises:
        ConfigError: If a tracker does not start.
    """
    if not trackers:
        return Trackers({}, warn)
    # accelerate's trackers use its logger, which needs the state of the process.
    from accelerate import PartialState

    PartialState()
    defaults: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": after_step + 1},
        "wandb": {"dir": str(directory)},
    }
    started = {}
    for name, options in trackers.items():
        tracker_class = find(name)
        own = [str(directory / name)] if tracker_class.requires_logging_directory else []
        arguments = {"project": "distmp", **defaults.get(name, {}), **options}
        try:
            tracker = tracker_class(arguments.pop("project"), *own, **arguments)
            tracker.start()
            settings = flat(masked(hyperparameters)).items()
            tracker.store_init_configuration({name: _plain(value) for name, value in settings})
        except Exception as error:  # trackers raise any error: no account, no network
            problem = f"does not start: {_error_text(error)}; fix or remove it"
            raise ConfigError("log.trackers", name, problem) from error
        started[name] = tracker
    return Trackers(started, warn)


def find(name: str) -> type[GeneralTracker]:
    """Return the tracker class of a name, or of an import path `module:Class`.

    Raises:
        ConfigError: If the class does not exist, or its package is not installed.
    """
    require_package("log.trackers", name, "accelerate", "trackers")
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

    if ":" in name:
        loaded = load_object("log.trackers", name)
        valid = inspect.isclass(loaded) and issubclass(loaded, GeneralTracker)
        require(valid, "log.trackers", name, "must be a subclass of accelerate's GeneralTracker")
        return loaded
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError("log.trackers", name, nearest(name, LOGGER_TYPE_TO_CLASS))
    if name not in map(str, get_available_trackers()):
        package = _PACKAGE_OF.get(name, name)
        raise ConfigError("log.trackers", name, f"is not installed; run pip install '{package}'")
    return LOGGER_TYPE_TO_CLASS[name]


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a record by name; flags are 0 or 1, missing values are omitted.

    The throughput has the name of its unit, such as `tokens_per_second`, a metric the name
    `validation_NAME`. A share of low-precision operands is `low_precision_operands/OPERAND/NAME`.
    """
    values = dataclasses.asdict(record)
    del values["step"]
    values[f"{record.unit}s_per_second"] = values.pop("weight_per_second")
    values |= _of_validation(record.validation_metrics or {})
    for operand, statistics in (record.low_precision_operands or {}).items():
        values |= {
            f"low_precision_operands/{operand}/{n}": value for n, value in statistics.items()
        }
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if isinstance(value, (bool, int, float))
    }


def _of_validation(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"validation_{name}": value for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    """Return numbers and strings unchanged, and other values as text."""
    return value if isinstance(value, str | int | float | None) else str(value)


def _error_text(error: Exception) -> str:
    return masked_text(f"{type(error).__name__}: {error}")
