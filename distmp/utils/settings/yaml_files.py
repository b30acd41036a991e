"""Reads and writes settings as YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import yaml

from distmp.errors import ConfigError
from distmp.masking import masked
from distmp.utils.files import PRIVATE, read_regular, replacing

# The scalars of YAML 1.2. PyYAML implements YAML 1.1, in which 3e-4 is a string, `no` is false,
# 1:30 is 90 and 2024-01-01 is a date, which users do not expect.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}

# A configuration with every setting has 6 kB. PyYAML reads 100 to 300 kB per second.
_LARGEST_BYTES = 1 << 18
_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2 that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings that either version of YAML would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Plain text with one of these line separators would be read back with another one.
    style = '"' if {"\x85", "\u2028", "\u2029"} & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = loader.construct_scalar(node).replace("_", "")
    return int(digits, 0 if digits[:2] in ("0x", "0o") else 10)


def _add_scalars() -> None:
    _Loader.yaml_implicit_resolvers = {}
    for name, (pattern, first) in _SCALARS.items():
        scalar = re.compile(f"(?:{pattern})$")
        for kind in (_Loader, _Dumper):
            kind.add_implicit_resolver(f"tag:yaml.org,2002:{name}", scalar, first)
    _Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_add_scalars()
_Dumper.add_representer(str, _represent_str)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file of settings; an empty file gives an empty dictionary.

    Raises:
        ConfigError: If the file cannot be read, is not valid YAML (the message gives line and
            column), repeats a key, or is not a mapping of settings.
    """
    name = os.fspath(path)
    try:
        loaded = _load(read_regular(path, _LARGEST_BYTES))
    except OSError as error:
        raise ConfigError("--config", name, f"cannot be read ({error.strerror})") from None
    except Exception as error:  # noqa: BLE001  (a tag can request any conversion: !!int x)
        raise ConfigError("--config", name, _bad_syntax(error)) from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError("--config", name, "must hold settings as 'name: value' lines")
    return loaded


def _load(text: str | bytes) -> Any:
    return _without_aliases(yaml.load(text, _Loader), iter(range(_MOST_VALUES)))


def _without_aliases(value: Any, places: Iterator[int]) -> Any:
    """Copy a value for each alias of it; nested aliases can expand to any number of values."""
    if next(places, None) is None:
        raise ValueError(f"more than {_MOST_VALUES} values, with those of aliases")
    if isinstance(value, dict):
        return {key: _without_aliases(item, places) for key, item in value.items()}
    return [_without_aliases(item, places) for item in value] if isinstance(value, list) else value


def _bad_syntax(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"is not valid YAML: {' '.join(str(error).split())}"
    syntax = isinstance(error, (yaml.scanner.ScannerError, yaml.parser.ParserError))
    hint = "; check the indentation and punctuation up to there" if syntax else ""
    # Marks count from 0, editors from 1.
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: {getattr(error, 'problem', error)}{hint}"


def write_yaml(config: Any, path: str | os.PathLike[str]) -> None:
    """Write a configuration so that `read_yaml` and `from_mapping` return an equal object.

    Secrets are hidden, see `distmp.masking`. The file is replaced atomically, and only its owner
    can read it.
    """
    text = yaml.dump(
        masked(asdict(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    with replacing(path, mode=PRIVATE) as file:
        file.write(text.encode())


def from_line(text: str) -> Any:
    """Read a value from one line of YAML; text that is not YAML is returned as it is."""
    try:
        return _load(text)
    except Exception:  # noqa: BLE001
        return text


def as_line(value: Any) -> str:
    """Write a value as one line of YAML."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=2**31)
    return text.removesuffix("...\n").strip()
