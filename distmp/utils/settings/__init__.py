"""Converts settings from YAML files and the command line to frozen dataclasses, and back.

This package does not know concrete settings. The name of a setting is the dotted path of dataclass
fields (`optim.lr`), the same in the file, on the command line and in every message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast, get_args, get_origin

from distmp.errors import ConfigError, closest, listed, nearest
from distmp.utils.annotations import accepts, expected, field_annotations, hint, members_of, nested

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[Any, Any], section: str = "") -> T:
    """Build a (nested) dataclass from a mapping such as `read_yaml` returns.

    Absent settings keep their defaults. Conversion is strict: an integer is accepted for a float, a
    list for a tuple, an empty section for the defaults, and nothing else.

    `cls` may define `advice`: what to do instead, by unknown name or by section.

    Args:
        cls: Dataclass whose fields are int, float, str, bool, None, Literal, tuple, dict, Any,
            dataclasses of these, or unions of these; every field has a default.
        values: Values by the names of settings.
        section: Dotted name of the section that they are in, for messages.

    Raises:
        ConfigError: If a name is unknown (the message suggests the nearest one) or a value has the
            wrong type, or from the checks of the dataclass.
    """
    return cast("T", _build(cls, values, section, frozenset(setting_annotations(cls, section))))


def join(section: str, name: str) -> str:
    """Return the dotted name of a setting in a section."""
    return f"{section}.{name}" if section else name


def setting_annotations(cls: type[Any], where: str = "") -> dict[str, Any]:
    """Return the annotations of all settings and sections of `cls`, by dotted name."""
    annotations = {}
    for name, annotation in field_annotations(cls).items():
        full = join(where, name)
        annotations[full] = annotation
        for section in nested(annotation):
            annotations |= setting_annotations(section, full)
    return annotations


def _build(cls: type[Any], values: Any, where: str, known: frozenset[str]) -> Any:
    fields = field_annotations(cls)
    arguments = {}
    for name, value in values.items():
        setting = join(where, str(name))
        if name not in fields:
            raise ConfigError(setting, value, unknown_setting(cls, setting, known))
        if dataclasses.is_dataclass(fields[name]) and not isinstance(value, Mapping | None):
            raise ConfigError(setting, value, section_advice(cls, setting, where))
        arguments[name] = _convert(fields[name], value, setting, known)
    return cls(**arguments)


def unknown_setting(cls: type[Any], setting: str, known: frozenset[str]) -> str:
    """Return the message for an unknown setting, with the most likely alternative.

    Args:
        cls: Dataclass that holds the setting, or one above it.
        setting: Dotted name.
        known: Names of all settings and sections.
    """
    section, _, name = setting.rpartition(".")
    if advice := getattr(cls, "advice", {}).get(setting):
        return f"unknown setting; {advice}"
    if setting in known:
        return f"unknown name; write {name!r} as a line below the section {section!r}"
    siblings = [full for full in known if full.rpartition(".")[0] == section]
    # Of names with the same ending, the last one wins: a sibling, else the shortest one.
    candidates = sorted(known, key=lambda full: (full in siblings, -len(full), full))
    full_names = {full.rpartition(".")[2]: full for full in candidates}
    if best := closest(name, full_names):
        return f"unknown setting; did you mean {full_names[best]!r}?"
    return f"unknown setting; {nearest(name, siblings or known)}"


def section_advice(cls: type[Any], section: str, where: str = "") -> str:
    """Return the message for a value in place of a section: which settings to set.

    Args:
        cls: Dataclass that holds the section, or one above it.
        section: Dotted name of the section.
        where: Dotted name of `cls`.
    """
    names = [name for name in setting_annotations(cls, where) if name.rpartition(".")[0] == section]
    advice = getattr(cls, "advice", {}).get(section)
    return f"is a section; {advice or f'set {listed(names)}'}"


def _convert(annotation: Any, value: Any, setting: str, known: frozenset[str]) -> Any:
    """Return `value` as the annotated type, or raise an error with what is expected."""
    for member in members_of(annotation):
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping):
            return _build(cast("type[Any]", member), value, setting, known)
        if accepts(member, value):
            return _coerce(member, value, setting, known)
    # All lines of the section are commented out.
    if value is None and dataclasses.is_dataclass(annotation):
        return _build(cast("type[Any]", annotation), {}, setting, known)
    raise ConfigError(setting, value, f"must be {expected(annotation)}{hint(annotation, value)}")


def _coerce(annotation: Any, value: Any, setting: str, known: frozenset[str]) -> Any:
    items = get_args(annotation)
    if annotation is float:
        return float(value)
    if get_origin(annotation) is tuple:
        kinds = items[:1] * len(value) if items[-1] is Ellipsis else items
        return tuple(
            _convert(kind, item, f"{setting}[{index}]", known)
            for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if get_origin(annotation) is dict:
        return {
            key: _convert(items[1], item, join(setting, key), known) for key, item in value.items()
        }
    return value


def flat(
    values: Mapping[str, Any], leaves: Collection[str] = (), section: str = ""
) -> dict[str, Any]:
    """Return nested settings under their dotted names.

    Args:
        values: Sections, settings and sections of sections.
        leaves: Dotted names of settings whose values are mappings.
        section: Prefix of the names.
    """
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}{key}"
        if isinstance(value, Mapping) and value and name not in leaves:
            flattened.update(flat(value, leaves, f"{name}."))
        else:
            flattened[name] = value
    return flattened


def value_text(value: object) -> str:
    """Return a setting's value as it is written in a configuration."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings; it does not depend on the machine or the order of names."""
    text = json.dumps(flat(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
