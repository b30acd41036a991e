"""Reads and writes settings as YAML."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from distmp.errors import ConfigError, nearest
from distmp.masking import masked
from distmp.utils.files import PRIVATE, read_regular, replacing
from distmp.utils.settings.convert import to_mapping

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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # An explicit tag can request an impossible conversion: !!int x.
            problem = f"cannot read this value as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings that either version of YAML would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML folds Unicode line breaks and loses them.
        style = None if set(text).isdisjoint("\x85\u2028\u2029") else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = loader.construct_scalar(node).replace("_", "")
    return int(digits, 0 if digits[:2] in ("0x", "0o") else 10)


def _add_scalars() -> None:
    _Loader.yaml_implicit_resolvers = {}
    for name, (pattern, first) in _SCALARS.items():
        for kind in (_Loader, _Dumper):
            kind.add_implicit_resolver(
                f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), first
            )
    _Dumper.add_representer(str, _Dumper.represent_text)
    _Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_add_scalars()


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
        raise ConfigError("--config", name, _unreadable(Path(path), error)) from None
    except yaml.YAMLError as error:
        raise ConfigError("--config", name, _bad_syntax(error)) from None
    except RecursionError:
        raise ConfigError("--config", name, "is nested too deeply to be read") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError("--config", name, "must hold settings as 'name: value' lines")
    return loaded


def _load(text: str | bytes) -> Any:
    """Parse YAML, unless it is much larger than it looks."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(document: yaml.Node) -> None:
    """Refuse aliases of aliases, which stand for any number of values, also for infinitely many."""
    level, size = [document], 0
    while level:
        following = (inner for node in level for inner in _parts(node))
        level = list(itertools.islice(following, _MOST_VALUES))
        size += len(level)
        if size >= _MOST_VALUES:
            problem = f"more than {_MOST_VALUES} values, with those of aliases"
            raise yaml.constructor.ConstructorError(None, None, problem, document.start_mark)


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _unreadable(path: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read ({error.strerror})"
    if not path.parent.is_dir():
        return f"there is no folder {os.fspath(path.parent)!r}"
    names = [
        entry.name
        for entry in path.parent.iterdir()
        if entry.suffix in (".yaml", ".yml") and not entry.name.startswith(".")
    ]
    if not names:
        return f"there is no such file, and no YAML file in {os.fspath(path.parent)!r}"
    return f"there is no such file; {nearest(path.name, names)}"


def _bad_syntax(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"is not valid YAML: {' '.join(str(error).split())}"
    # Marks count from 0, editors from 1.
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"


def write_yaml(config: Any, path: str | os.PathLike[str]) -> None:
    """Write a configuration so that `read_yaml` and `from_mapping` return an equal object.

    Secrets are hidden, see `distmp.masking`. The file is replaced atomically, and only its owner
    can read it.
    """
    text = yaml.dump(
        masked(to_mapping(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    with replacing(path, mode=PRIVATE) as file:
        file.write(text.encode())


def dictionary_from_line(text: str) -> dict[str, Any]:
    """Read a dictionary from one line of YAML: `{a: 1, b: text}`.

    Raises:
        ValueError: If the text is not YAML, or not a dictionary with string keys.
    """
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        raise ValueError(_bad_syntax(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None
    if not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise ValueError("not a dictionary")
    return value


def dictionary_as_line(value: dict[str, Any]) -> str:
    """Write a dictionary as one line of YAML."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf")).strip()
