"""Telemetry of a run: step records, the console, time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp._lazy import lazy_names

__all__ = [
    "Console",
    "LogConfig",
    "RankLog",
    "RecordError",
    "RecordWriter",
    "StepLog",
    "StepRecord",
    "StepTimer",
    "Stragglers",
    "peak_memory_bytes",
    "read_records",
]

if TYPE_CHECKING:
    from distmp.telemetry.console import Console
    from distmp.telemetry.memory import peak_memory_bytes
    from distmp.telemetry.rank_log import RankLog
    from distmp.telemetry.records import RecordError, RecordWriter, StepRecord, read_records
    from distmp.telemetry.settings import LogConfig
    from distmp.telemetry.step_log import StepLog
    from distmp.telemetry.stragglers import Stragglers
    from distmp.telemetry.throughput import StepTimer
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "distmp.telemetry.console": ("Console",),
            "distmp.telemetry.memory": ("peak_memory_bytes",),
            "distmp.telemetry.rank_log": ("RankLog",),
            "distmp.telemetry.records": (
                "RecordError",
                "RecordWriter",
                "StepRecord",
                "read_records",
            ),
            "distmp.telemetry.settings": ("LogConfig",),
            "distmp.telemetry.step_log": ("StepLog",),
            "distmp.telemetry.stragglers": ("Stragglers",),
            "distmp.telemetry.throughput": ("StepTimer",),
        },
    )
