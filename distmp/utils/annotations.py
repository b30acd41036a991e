"""Values and the annotations of dataclass fields: what fits, and what is wanted, in words."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin
from typing import get_type_hints as _type_hints

import numpy as np

from distmp.errors import ConfigError


def check_types(config: Any, section: str = "", skip: Collection[str] = ()) -> None:
    """Refuse values of a dataclass instance that are not of the annotated types.

    For objects built in Python; `distmp.utils.settings.from_mapping` checks what is read from
    files. Numbers of NumPy count as Python's. The words of a Literal are left to the class.

    Args:
        config: The instance.
        section: Dotted name of the section that it stands for, for messages.
        skip: Fields that are checked elsewhere.

    Raises:
        ConfigError: Naming the first field with a value of another type.
    """
    for name, annotation in field_annotations(type(config)).items():
        if name in skip:
            continue
        value = getattr(config, name)
        members = members_of(annotation)
        if get_origin(annotation) is not Literal and not any(
            _is_one(member, value) for member in members
        ):
            setting = f"{section}.{name}" if section else name
            words = " or ".join(map(_wanted_in_python, members))
            raise ConfigError(setting, value, f"must be {words}{hint(annotation, value)}")


def _is_one(annotation: Any, value: Any) -> bool:
    if dataclasses.is_dataclass(annotation):
        return isinstance(value, cast("type[Any]", annotation))
    if get_origin(annotation) is tuple and accepts(annotation, value):
        return all(_is_one(get_args(annotation)[0], item) for item in value)
    return accepts(annotation, value.item() if isinstance(value, np.generic) else value)


def _wanted_in_python(annotation: Any) -> str:
    if dataclasses.is_dataclass(annotation):
        return f"a {cast('type[Any]', annotation).__name__}"
    return {bool: "True or False", type(None): "None"}.get(annotation) or wanted(annotation)


def field_annotations(cls: type[Any]) -> dict[str, Any]:
    """Return field name to resolved annotation, for the fields that can be set."""
    hints = _type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def accepts(annotation: Any, value: Any) -> bool:
    """Whether a value is of an annotated type; no dataclass is."""
    origin = get_origin(annotation)
    if annotation is Any:
        return True
    if origin is Literal:
        # True == 1, so equality alone would take one for the other.
        return any(value == item and type(value) is type(item) for item in get_args(annotation))
    if origin is tuple:
        return isinstance(value, (list, tuple)) and _right_length(annotation, value)
    if origin is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if annotation is float:
        return type(value) is float or (type(value) is int and abs(value) < 2**1023)
    if annotation in (int, str, bool, type(None)):
        return type(value) is annotation
    if dataclasses.is_dataclass(annotation):
        return False
    raise TypeError(f"a setting cannot have the type {annotation!r}")


def _right_length(annotation: Any, value: Sequence[Any]) -> bool:
    items = get_args(annotation)
    return items[-1] is Ellipsis or len(items) == len(value)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def wanted(annotation: Any) -> str:
    """Say in words which values an annotation stands for."""
    members = members_of(annotation)
    if len(members) > 1:
        return " or ".join(wanted(member) for member in members)
    if get_origin(annotation) is Literal:
        choices = [repr(item) for item in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        number = "" if items[-1] is Ellipsis else f" of length {len(items)}"
        return f"a list{number}, each item {wanted(items[0])}"
    return _WORDS.get(annotation, "a section of 'name: value' lines")


def hint(annotation: Any, value: Any) -> str:
    """Say how to write what was probably meant."""
    members = members_of(annotation)
    if int in members and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if str in members and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    if isinstance(value, str) and any(member in (bool, int, float) for member in members):
        return ", not text"
    return ""
