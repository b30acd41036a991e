"""Telemetry of a run: step records, the console, curves, time and memory.

The import is cheap: rich and matplotlib are imported at their first use.
"""

from distmp.telemetry.console import Console
from distmp.telemetry.curves import draw_curves
from distmp.telemetry.memory import peak_memory_bytes
from distmp.telemetry.rank_log import RankLog
from distmp.telemetry.records import RecordError, RecordWriter, StepRecord, read_records
from distmp.telemetry.settings import LogConfig
from distmp.telemetry.step_log import StepLog
from distmp.telemetry.stragglers import Stragglers
from distmp.telemetry.throughput import StepTimer

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
    "draw_curves",
    "peak_memory_bytes",
    "read_records",
]
