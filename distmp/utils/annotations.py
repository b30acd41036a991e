"""Annotations and metadata of settings: checks and descriptions of values, rules for resuming."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from distmp.errors import ConfigError, require

# Cached, because every configuration checks its types, and resolving them takes the longest.
_resolved: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


class Section:
    """Base class of a section of settings: checks their types, and then calls `_check`.

    Args:
        section: Dotted name of the section, which begins the names of its settings in messages.
    """

    _section = ""

    def __init_subclass__(cls, section: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        if section:
            cls._section = f"{section}."

    def __post_init__(self) -> None:
        check_types(self)
        self._check()

    def _check(self) -> None:
        """Refuse invalid values of the right types; see `_require`."""

    def _require(self, valid: bool, name: str, problem: str) -> None:
        """Refuse the value of a setting unless it is valid; see `distmp.errors.require`."""
        require(valid, f"{self._section}{name}", getattr(self, name), problem)


def check_types(config: Any, skip: Collection[str] = ()) -> None:
    """Check that the values of a dataclass instance have the annotated types.

    It is for objects built in Python; `distmp.utils.settings.from_mapping` checks values from
    files. NumPy scalars count as Python numbers.

    Args:
        config: The dataclass instance; a message names the `Section` that it is.
        skip: Names of fields that are checked elsewhere.

    Raises:
        ConfigError: If a value has another type; the message names the first such field.
    """
    for name, annotation in field_annotations(type(config)).items():
        if name in skip:
            continue
        value = getattr(config, name)
        members = members_of(annotation)
        if not any(_has_type(member, value) for member in members):
            setting = f"{getattr(config, '_section', '')}{name}"
            allowed = " or ".join(map(_expected_in_python, members))
            raise ConfigError(setting, value, f"must be {allowed}{hint(annotation, value)}")


def _has_type(annotation: Any, value: Any) -> bool:
    if dataclasses.is_dataclass(annotation):
        return isinstance(value, cast("type[Any]", annotation))
    if get_origin(annotation) is tuple and accepts(annotation, value):
        members = members_of(get_args(annotation)[0])
        return all(any(_has_type(member, item) for member in members) for item in value)
    return accepts(annotation, value.item() if isinstance(value, np.generic) else value)


def _expected_in_python(annotation: Any) -> str:
    if dataclasses.is_dataclass(annotation):
        return f"a {cast('type[Any]', annotation).__name__}"
    if get_origin(annotation) is tuple and dataclasses.is_dataclass(get_args(annotation)[0]):
        return f"a list of {get_args(annotation)[0].__name__}"
    return {bool: "True or False", type(None): "None"}.get(annotation) or expected(annotation)


def field_annotations(cls: type[Any]) -> dict[str, Any]:
    """Return the resolved annotation of each field of the constructor, by name."""
    hints = _resolved(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; for another annotation, a tuple of only that."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def nested(annotation: Any) -> list[type[Any]]:
    """Return the dataclasses among the members of an annotation."""
    return [cast("type[Any]", m) for m in members_of(annotation) if dataclasses.is_dataclass(m)]


def accepts(annotation: Any, value: Any) -> bool:
    """Return whether a value has an annotated type; False for dataclasses.

    Raises:
        TypeError: If a setting cannot have that type.
    """
    origin = get_origin(annotation)
    if annotation is Any:
        return True
    if origin is Literal:
        # True == 1, so equality alone would confuse them.
        return any(value == item and type(value) is type(item) for item in get_args(annotation))
    if origin is tuple:
        *_, last = items = get_args(annotation)
        fits = isinstance(value, (list, tuple))
        return fits and (last is Ellipsis or len(items) == len(value))
    if origin is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if annotation is float:
        return type(value) is float or (type(value) is int and abs(value) < 2**1023)
    if annotation in (int, str, bool, type(None)):
        return type(value) is annotation
    if dataclasses.is_dataclass(annotation):
        return False
    raise TypeError(f"a setting cannot have the type {annotation!r}")


_DESCRIPTIONS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
}


def expected(annotation: Any) -> str:
    """Return a description of the values that an annotation allows."""
    members = members_of(annotation)
    if len(members) > 1:
        return " or ".join(expected(member) for member in members)
    if get_origin(annotation) is Literal:
        choices = [repr(item) for item in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        number = "" if items[-1] is Ellipsis else f" of length {len(items)}"
        return f"a list{number}, each item {expected(items[0])}"
    return _DESCRIPTIONS.get(annotation, "a section of 'name: value' lines")


def hint(annotation: Any, value: Any) -> str:
    """Return a suffix for a message that says how to write the intended value, or ""."""
    if value is None:
        return "; leave it out for its default"
    members = members_of(annotation)
    if int in members and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if str in members and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    if isinstance(value, str) and any(member in (bool, int, float) for member in members):
        return ", not text"
    return ""


# Note [Resume rules]
# Fields declare in their metadata which effect a change of the setting has on a run that resumes:
#
#     lr: float = field(default=1e-3, metadata=consequential("learning rates change from here on"))
#
# A rule on a section applies to all of its settings that declare none. Every setting has a rule;
# tests/training/test_run_fingerprint.py checks it.
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
        inner = nested(annotations[field.name])
        for section in inner:
            yield from _rules(section, f"{name}.", rule)
        if not inner and rule is not None:
            yield name, rule
