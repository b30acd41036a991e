"""Effects of changed settings on a run that resumes, declared in the metadata of their fields.

    lr: float = field(default=1e-3, metadata=consequential("learning rates change from here on"))

A rule on a section applies to all of its settings that declare none. Every setting has a rule;
tests/training/test_run_fingerprint.py checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

from distmp.utils.annotations import field_annotations, members_of

_KEY = "resume"


class ResumeRule(NamedTuple):
    """The effect of a change on a run that resumes.

    Attributes:
        kind: "ignored": the setting concerns how a run starts and is not compared. "harmless": no
            effect on the weights except for rounding; the change is logged. "consequential":
            allowed, with a warning. "dangerous": an error unless forced.
        effect: Description of the effect, for the message.
    """

    kind: Literal["ignored", "harmless", "consequential", "dangerous"]
    effect: str = ""


IGNORED: Mapping[str, Any] = {_KEY: ResumeRule("ignored")}
HARMLESS: Mapping[str, Any] = {_KEY: ResumeRule("harmless")}


def consequential(effect: str) -> Mapping[str, Any]:
    """Return the metadata of a setting whose change is allowed and logged as a warning."""
    return {_KEY: ResumeRule("consequential", effect)}


def dangerous(effect: str) -> Mapping[str, Any]:
    """Return the metadata of a setting whose change is refused unless forced."""
    return {_KEY: ResumeRule("dangerous", effect)}


def resume_rules(cls: type[Any]) -> dict[str, ResumeRule]:
    """Return the rules of all settings of a configuration class, by dotted name.

    Settings without a rule are absent.
    """
    return dict(_rules(cls, "", None))


def _rules(
    cls: type[Any], prefix: str, inherited: ResumeRule | None
) -> Iterator[tuple[str, ResumeRule]]:
    annotations = field_annotations(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        rule = field.metadata.get(_KEY, inherited)
        sections = [
            cast("type[Any]", member)
            for member in members_of(annotations[field.name])
            if dataclasses.is_dataclass(member)
        ]
        for section in sections:
            yield from _rules(section, f"{name}.", rule)
        if not sections and rule is not None:
            yield name, rule
