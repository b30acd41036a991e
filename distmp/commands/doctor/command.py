"""`distmp doctor`: is this machine fit to train, and what would `auto` choose on it."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from distmp.commands.doctor.checks import Finding, judge
from distmp.commands.doctor.machine_info import Facts, gather
from distmp.config import RunConfig
from distmp.utils.settings import command_line


@dataclass(frozen=True)
class DoctorConfig(RunConfig):
    """A training run for which a machine is looked at."""

    json: bool = False
    """Print findings and facts as JSON."""


load = functools.partial(
    command_line,
    DoctorConfig,
    prog="distmp doctor",
    description="Say whether this machine is fit to train, and what auto would choose on it.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Look at this machine and print what there is to say.

    Returns:
        1 if some check has failed, else 0.

    Raises:
        ConfigError: If a setting is wrong.
    """
    config = load(sys.argv[1:] if argv is None else argv)
    facts = gather(config.run_dir, config.precision.policy, config.strategy)
    findings = judge(facts)
    text = as_json(findings, facts) if config.json else report(findings)
    sys.stdout.write(text + "\n")
    return int(any(finding.status == "FAIL" for _, finding in findings))


def report(findings: Sequence[tuple[str, Finding]]) -> str:
    """Return a line for each finding, and one for its remedy."""
    width = max(len(name) for name, _ in findings)
    lines = []
    for name, finding in findings:
        lines.append(f"{finding.status}  {name:{width}}  {finding.message}")
        if finding.remedy:
            lines.append(f"      {'':{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def as_json(findings: Sequence[tuple[str, Finding]], facts: Facts) -> str:
    """Return findings and facts as JSON."""
    return json.dumps(
        {
            "findings": [{"check": name, **finding._asdict()} for name, finding in findings],
            "facts": dataclasses.asdict(facts),
        },
        indent=2,
    )
