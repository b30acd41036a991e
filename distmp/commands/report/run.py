"""Read the directory of a run for the report."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmp.errors import ConfigError
from distmp.telemetry.records import StepRecord, read_records
from distmp.training import manifest
from distmp.training.run_directory import RunDirectory
from distmp.utils.settings import read_yaml
from distmp.utils.settings.convert import flat
from distmp.utils.units import bytes_text, duration, per_second, quantity, scale_text

# The summary shows the mean loss of this many last steps.
LAST_STEPS = 50


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run's directory.

    Attributes:
        name: Name of the directory.
        records: The step records; never empty.
        config: The resolved configuration by dotted name; empty if missing.
        environment: Machine and versions by dotted name; empty if missing.
        low_precision_matmuls: Lines on the low-precision matmuls; empty without any.
    """

    name: str
    records: list[StepRecord]
    config: dict[str, object]
    environment: dict[str, object]
    low_precision_matmuls: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read the directory of a run, finished or not.

        Raises:
            ConfigError: If it contains no step record.
        """
        directory = RunDirectory(path)
        records = read_records(directory.records) if os.path.isfile(directory.records) else []
        if not records:
            raise ConfigError(
                "run_dir",
                str(path),
                f"contains no step; {directory.records.name} is missing or empty",
            )
        config: dict[str, object] = {}
        if directory.config.is_file():
            config = flat(read_yaml(directory.config))
        environment: dict[str, object] = {}
        low_precision = None
        if directory.manifest.is_file():
            last = dict(manifest.read(directory.manifest)[-1])
            last.pop("configuration", None)
            low_precision = last.pop("low_precision_matmuls", None)
            environment = flat(last)
        name = path.resolve().name
        return cls(name, records, config, environment, tuple(_described(low_precision)))

    @property
    def throughput_unit(self) -> str:
        """The unit of `weight_per_second`, such as "tok/s"."""
        return per_second(self.records[-1].unit)

    def summary(self) -> dict[str, str]:
        """Return the most important numbers of the run as text, by name."""
        records, last = self.records, self.records[-1]
        losses = [record.loss for record in records[-LAST_STEPS:] if not record.skipped]
        validated = [r.validation_loss for r in records if r.validation_loss is not None]
        planned = self.config.get("steps")
        seconds = sum(record.step_seconds for record in records)
        return {
            "steps": f"{last.step:,} of {planned:,}"
            if isinstance(planned, int)
            else f"{last.step:,}",
            f"loss, last {min(LAST_STEPS, len(records))} steps": (
                f"{statistics.fmean(losses):.4f}" if losses else "none applied"
            ),
            "best validation loss": f"{min(validated):.4f}" if validated else "not measured",
            "skipped": f"{last.skipped_total:,} steps",
            "loss scale at the end": scale_text(last.loss_scale),
            "throughput, median": (
                f"{quantity(statistics.median(r.weight_per_second for r in records))} "
                f"{self.throughput_unit}"
            ),
            "time in steps": duration(seconds),
            "peak memory of a rank": bytes_text(max(record.memory_bytes for record in records)),
        }


def _described(low_precision: dict[str, Any] | None) -> Iterator[str]:
    """Yield lines from the result of `distmp.quantization.layers.formats_record`."""
    if low_precision is not None:
        layers = low_precision["low_precision"]
        total = len(layers) + len(low_precision["high_precision"])
        yield (
            f"{'; '.join(low_precision['formats'])}; {len(layers)} of {total} linear layers "
            f"have low-precision matmuls, {low_precision['backend']}"
        )
        yield from (
            f"{layer} is in high precision because of {why}"
            for layer, why in low_precision["high_precision"].items()
        )


def as_text(value: object) -> str:
    """Return a setting's value as in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
