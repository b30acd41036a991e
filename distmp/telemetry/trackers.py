"""Step records for TensorBoard, W&B and the other loggers that accelerate knows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmp.errors import ConfigError, nearest
from distmp.telemetry.records import StepRecord
from distmp.utils.imports import load_object
from distmp.utils.settings.flat import flat

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_PACKAGE_OF = {"tensorboard": "distmp[trackers]", "comet_ml": "comet-ml"}


class Trackers:
    """Loggers that get the numbers of each step as scalars.

    A logger that fails is dropped with a message: training does not end for a chart.

    Args:
        trackers: Name to tracker, started; empty on all ranks but the first.
        complain: Where to say that one has failed.
    """

    def __init__(
        self, trackers: Mapping[str, GeneralTracker], complain: Callable[[str], None]
    ) -> None:
        self._trackers = dict(trackers)
        self._complain = complain

    def write(self, record: StepRecord) -> None:
        """Log what is known about a step."""
        values = scalars(record)
        self._each(lambda tracker: tracker.log(values, step=record.step))

    def close(self) -> None:
        """Let the loggers write what they hold back."""
        self._each(lambda tracker: tracker.finish())
        self._trackers.clear()

    def _each(self, action: Callable[[GeneralTracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001  # whatever a logger's network does
                del self._trackers[name]
                self._complain(
                    f"logger {name} failed ({_in_words(error)}); the run goes on without it"
                )


def start(
    names: Sequence[str],
    options: Mapping[str, Any],
    *,
    project: str,
    directory: Path,
    hyperparameters: Mapping[str, Any],
    after_step: int,
    complain: Callable[[str], None],
) -> Trackers:
    """Start loggers, on the first rank only.

    Args:
        names: As in `log.trackers`.
        options: Keyword arguments of each, by name.
        project: Under which the loggers file the run.
        directory: Folder of the run; a logger that writes files gets a folder of its name in it.
        hyperparameters: The configuration, nested.
        after_step: The step that the run continues from, or 0.
        complain: Where to say later that one has failed.

    Raises:
        ConfigError: If a logger does not start.
    """
    if not names:
        return Trackers({}, complain)
    # accelerate's trackers write to its log, which asks who and where this process is.
    from accelerate import PartialState

    PartialState()
    ours: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": after_step + 1},
        "wandb": {"dir": str(directory)},
    }
    started = {}
    for name in names:
        tracker_class = find(name)
        where = [str(directory / name)] if tracker_class.requires_logging_directory else []
        arguments = {**ours.get(name, {}), **options.get(name, {})}
        try:
            tracker = tracker_class(project, *where, **arguments)
            tracker.start()
            tracker.store_init_configuration(
                {setting: _plain(value) for setting, value in flat(hyperparameters).items()}
            )
        except Exception as error:  # a logger raises what it likes: no account, no network
            raise ConfigError(
                "log.trackers", name, f"does not start: {_in_words(error)}; mend it or leave it out"
            ) from error
        started[name] = tracker
    return Trackers(started, complain)


def find(name: str) -> type[GeneralTracker]:
    """Return the tracker of a name, or of an import path `module:Class`.

    Raises:
        ConfigError: If there is none, or its package is not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

    if ":" in name:
        found = load_object("log.trackers", name)
        if not (inspect.isclass(found) and issubclass(found, GeneralTracker)):
            raise ConfigError(
                "log.trackers", name, "name a subclass of accelerate's GeneralTracker"
            )
        return found
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError("log.trackers", name, nearest(name, LOGGER_TYPE_TO_CLASS))
    if name not in map(str, get_available_trackers()):
        package = _PACKAGE_OF.get(name, name)
        raise ConfigError("log.trackers", name, f"is not installed; run pip install '{package}'")
    return LOGGER_TYPE_TO_CLASS[name]


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a record by name; flags are 0 or 1, what is not known is left out."""
    values = dataclasses.asdict(record)
    del values["step"]
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if isinstance(value, (bool, int, float))
    }


def _plain(value: Any) -> Any:
    """Return numbers and strings as they are, and whatever else in words."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else str(value)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
