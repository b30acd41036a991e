"""The GPUs of this machine, as the driver reports them."""

from __future__ import annotations

import csv
import subprocess
from typing import NamedTuple

_QUERY = "name,driver_version,memory.total,memory.used"


class Gpu(NamedTuple):
    """A GPU; sizes are None if the driver does not report them.

    Attributes:
        name: Name of the model.
        driver: Version of the driver.
        memory_bytes: Size of its memory.
        used_bytes: Memory in use by all processes.
    """

    name: str
    driver: str
    memory_bytes: int | None = None
    used_bytes: int | None = None


def gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi reports; empty without any."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    rows = csv.reader(lines, skipinitialspace=True)
    return [Gpu(name, driver, *map(_bytes, memory)) for name, driver, *memory in rows]


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) << 20 if mebibytes.isdecimal() else None
