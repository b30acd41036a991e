"""Settings of callbacks: those that users name, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from distmp.errors import nearest, require
from distmp.models.settings import EMA_PREFIX
from distmp.utils.imports import Entry, check_arguments, load_callable, parse_entries

_NOTATION = "write 'module:callable', or {name: module:callable, options: {NAME: VALUE}}"
# Metrics whose best value is the smallest one.
_MINIMIZED = ("loss", "perplexity")


def find_callback(entry: Entry) -> Any:
    """Import and return the class or function of an entry of the setting `callbacks`.

    Raises:
        ConfigError: If it does not exist, or does not take the options.
    """
    found = load_callable("callbacks", entry.name)
    check_arguments(
        "callbacks",
        entry.name,
        found,
        entry.options,
        f"cannot be called with the options {entry.options} ({{reason}}); {_NOTATION}",
    )
    return found


def parse_callbacks(entries: Sequence[str | dict[str, Any]]) -> list[Entry]:
    """Return the entries of the setting `callbacks`.

    Raises:
        ConfigError: If one has other keys than `name` and `options`, or values of other types.
    """
    return parse_entries("callbacks", entries, _NOTATION)


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """When a run ends because a metric on held-out data no longer improves.

    The checkpoint of the best validation is kept until the end.
    """

    patience: int = 0
    """End the run after this many validations in a row without improvement; 0: never, and the
    checkpoint of the best validation is not kept."""

    metric: str = "loss"
    """loss, or a name in validation.metrics; with the prefix ema_ computed with the average of the
    weights."""

    min_delta: float = 0.0
    """Smallest difference to the best value that counts as an improvement."""

    mode: Literal["auto", "min", "max"] = "auto"
    """Whether a smaller or a larger value is better. auto: min for loss and perplexity, max for the
    metric `accuracy`; others need min or max."""

    def __post_init__(self) -> None:
        valid = self.patience >= 0
        require(valid, "early_stopping.patience", self.patience, "use 0 or more validations")
        valid = 0 <= self.min_delta < math.inf
        require(valid, "early_stopping.min_delta", self.min_delta, "use a number of 0 or more")
        valid = self.mode in ("auto", "min", "max")
        require(valid, "early_stopping.mode", self.mode, "use auto, min or max")

    @property
    def maximizes(self) -> bool:
        """Whether a larger value of the metric is better.

        Raises:
            ConfigError: If `mode` is auto and the metric is not known.
        """
        name = self.metric.removeprefix(EMA_PREFIX)
        require(
            self.mode != "auto" or name in (*_MINIMIZED, "accuracy"),
            "early_stopping.mode",
            "auto",
            f"does not know the metric {self.metric!r}; set min or max",
        )
        return self.mode == "max" or (self.mode == "auto" and name == "accuracy")

    def check(self, metrics: Sequence[str], *, every: int, ema: bool) -> None:
        """Refuse settings under which a run would never stop early.

        Args:
            metrics: Names in `validation.metrics`.
            every: Setting `validation.every`.
            ema: Whether the run has an average of its weights.

        Raises:
            ConfigError: If there is no such metric, or no validation during training.
        """
        if self.patience == 0:
            for field in fields(self):
                require(
                    getattr(self, field.name) == field.default,
                    f"early_stopping.{field.name}",
                    getattr(self, field.name),
                    "has no effect without early_stopping.patience; set it, the number of "
                    "validations without an improvement after which a run ends",
                )
            return
        require(
            every > 0,
            "early_stopping.patience",
            self.patience,
            "needs validations during training; set validation.every",
        )
        known = ["loss", *metrics]
        of_average = [f"{EMA_PREFIX}{name}" for name in known]
        require(
            ema or self.metric not in of_average,
            "early_stopping.metric",
            self.metric,
            "needs an average of the weights; set ema.decay",
        )
        known += of_average if ema else []
        hint = nearest(self.metric, known)
        require(self.metric in known, "early_stopping.metric", self.metric, hint)
        _ = self.maximizes
