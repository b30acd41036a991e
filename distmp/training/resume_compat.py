"""Compares a run with the one that wrote its checkpoint, and decides whether it may resume.

Each setting declares the effect of a change, see `distmp.utils.resume_rules`. `RUN_PROPERTIES`
lists the other properties of a run that are compared.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distmp.config import RunConfig
from distmp.errors import ConfigError
from distmp.utils.resume_rules import ResumeRule, resume_rules

_OTHER_SAMPLES = "the position in the data refers to other samples"


# Properties of a run that are compared and are not settings, by their name in messages: the section
# of the run's fingerprint that holds each, its name there, and the effect of a change.
RUN_PROPERTIES = {
    "samples in the data": ("data", "samples", ResumeRule("dangerous", _OTHER_SAMPLES)),
    "vocabulary of the data": (
        "data",
        "vocabulary",
        ResumeRule("dangerous", "token ids have another meaning"),
    ),
    "digest of the data": ("data", "digest", ResumeRule("dangerous", _OTHER_SAMPLES)),
    "number of ranks": ("ranks", "number", ResumeRule("harmless")),
    "device": ("ranks", "device", ResumeRule("harmless")),
    "resolved precision": (
        "ranks",
        "precision",
        ResumeRule("consequential", "forward, backward and reductions round differently"),
    ),
    "version of distmp": ("versions", "distmp", ResumeRule("harmless")),
    "version of torch": ("versions", "torch", ResumeRule("harmless")),
    "version of Python": ("versions", "python", ResumeRule("harmless")),
}

_MISSING = object()
# A setting that exists in one of two versions of distmp only.
_OTHER_VERSION = ResumeRule("harmless")

logger = logging.getLogger("distmp")


@functools.cache
def all_rules() -> Mapping[str, ResumeRule]:
    """Return the rules of all settings and properties, by name."""
    return resume_rules(RunConfig) | {name: rule for name, (_, _, rule) in RUN_PROPERTIES.items()}


@dataclass(frozen=True)
class Changes:
    """What changed since a checkpoint was written. Each entry is a name and a line about it.

    Attributes:
        harmless: Changes without an effect except for rounding.
        consequential: Changes that are allowed, with their effect.
        dangerous: Changes that make it another run, with their effect.
    """

    harmless: dict[str, str] = field(default_factory=dict)
    consequential: dict[str, str] = field(default_factory=dict)
    dangerous: dict[str, str] = field(default_factory=dict)

    def report(self, log: Callable[[str], object]) -> None:
        """Pass harmless changes to `log`, and log the others as warnings."""
        for line in self.harmless.values():
            log(f"changed: {line}")
        for line in (*self.consequential.values(), *self.dangerous.values()):
            logger.warning("changed: %s", line)

    def refuse(self, checkpoint: str) -> None:
        """Raise if there is a dangerous change.

        Args:
            checkpoint: Path of the checkpoint, for the message.

        Raises:
            ConfigError: One message with all dangerous changes.
        """
        if self.dangerous:
            listed = "".join(f"\n  {line}" for line in self.dangerous.values())
            raise ConfigError(
                "resume",
                checkpoint,
                f"belongs to another run:{listed}\n"
                "Restore these values, or set resume_force to true to resume anyway. A new run can "
                "start from its weights: distmp export, then model.weights.",
            )


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare the settings and properties of two runs, name by name.

    Args:
        before: Values when the checkpoint was written, by dotted name.
        now: Values of the run that resumes.
    """
    rules, changes = all_rules(), Changes()
    for name in (*now, *(name for name in before if name not in now)):
        old, new = before.get(name, _MISSING), now.get(name, _MISSING)
        rule = rules.get(name, _OTHER_VERSION)
        if old == new or rule.kind == "ignored":
            continue
        line = f"{name}: {_as_configured(old)} -> {_as_configured(new)}"
        effect = f" ({rule.effect})" if rule.effect else ""
        getattr(changes, rule.kind)[name] = f"{line}{effect}"
    return changes


def _as_configured(value: Any) -> str:
    """Return a value as it is written in a configuration."""
    if value is _MISSING:
        return "(unknown)"
    return value if isinstance(value, str) else json.dumps(value, default=str)
