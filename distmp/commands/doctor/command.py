"""`distmp doctor`: check whether this machine is ready to train, and what `auto` selects."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distmp.config import RunConfig, load_as

if TYPE_CHECKING:
    from distmp.commands.doctor.checks import CheckResult
    from distmp.commands.doctor.machine_info import MachineInfo


@dataclass(frozen=True)
class DoctorConfig(RunConfig):
    """The training run for which to check this machine."""

    json: bool = False
    """Print results and machine as JSON."""


load = functools.partial(
    load_as,
    DoctorConfig,
    prog="distmp doctor",
    description="Check whether this machine is ready to train, and what auto selects on it.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine and print the results.

    Returns:
        1 if a check failed, else 0.

    Raises:
        ConfigError: If a setting is invalid.
    """
    config = load(sys.argv[1:] if argv is None else argv)
    # Imported late: the help and errors in settings do not wait for torch.
    from distmp.commands.doctor.checks import run_checks
    from distmp.commands.doctor.machine_info import gather

    machine = gather(config)
    results = run_checks(machine)
    text = as_json(results, machine) if config.json else report(results)
    sys.stdout.write(text + "\n")
    return int(any(result.status == "FAIL" for _, result in results))


def report(results: Sequence[tuple[str, CheckResult]]) -> str:
    """Return a line for each result, and one for its remedy if any."""
    width = max(len(name) for name, _ in results)
    lines = []
    for name, result in results:
        lines.append(f"{result.status}  {name:{width}}  {result.message}")
        if result.remedy:
            lines.append(f"      {'':{width}}  -> {result.remedy}")
    return "\n".join(lines)


def as_json(results: Sequence[tuple[str, CheckResult]], machine: MachineInfo) -> str:
    """Return results and machine as JSON."""
    return json.dumps(
        {
            "results": [{"check": name, **result._asdict()} for name, result in results],
            "machine": dataclasses.asdict(machine),
        },
        indent=2,
    )
