"""Settings from YAML files and the command line into frozen dataclasses, and back.

Generic: nothing here knows a concrete setting. A setting's name is the dotted path of dataclass
fields (`optim.lr`), the same in the file, on the command line and in every message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as _type_hints

import yaml

from distmp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------
# YAML files
# ---------------------------------------------------------------------------------------------

# The scalars of YAML 1.2. PyYAML follows YAML 1.1, in which 3e-4 is a string, `no` is false,
# 1:30 is ninety and 2024-01-01 is a date: none of these is what somebody writing settings means.
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


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2 that refuses duplicate keys."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # An explicit tag can ask for a conversion that the value does not survive: !!int x.
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
    """Safe dumper that quotes what either version of YAML would not read back as a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML takes Unicode's line breaks for breaks that may be folded, and loses them.
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
        loaded = yaml.load(Path(path).read_bytes(), _Loader)
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


def _unreadable(path: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read ({error.strerror})"
    if not path.parent.is_dir():
        return f"there is no folder {os.fspath(path.parent)!r}"
    names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
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
    """Write a configuration so that `read_yaml` and `from_mapping` give an equal object.

    The file is replaced in one step: a reader sees the old content or the new, never a part.
    """
    text = yaml.dump(
        to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# Mappings and dataclasses
# ---------------------------------------------------------------------------------------------


def to_mapping(config: Any) -> dict[str, Any]:
    """Return a dataclass instance as nested dictionaries and lists, ready for YAML."""
    return cast("dict[str, Any]", _plain(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def from_mapping(cls: type[T], values: Mapping[Any, Any], where: str = "") -> T:
    """Build a (nested) dataclass from a mapping such as `read_yaml` returns.

    Settings that are absent keep their defaults. Conversion is strict: a whole number is taken
    for a float, a list for a tuple, an empty section for one of defaults, and nothing else.

    Args:
        cls: Dataclass whose fields are int, float, str, bool, None, Literal, tuple, dict, Any,
            dataclasses of such, or unions of these; every field has a default.
        values: Setting name to value.
        where: Dotted name of the section that `cls` stands for, for messages.

    Raises:
        ConfigError: If a name is unknown (with the nearest right one) or a value has the wrong
            type, or whatever the dataclass's own checks raise.
    """
    return cast("T", _build(cls, values, where, frozenset(_settings(cls, where))))


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _fields(cls: type[Any]) -> dict[str, Any]:
    """Return field name to resolved annotation, for the fields that can be set."""
    hints = _type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _settings(cls: type[Any], where: str = "") -> Iterator[str]:
    """Give the dotted names of all settings and sections of `cls`."""
    for name, annotation in _fields(cls).items():
        full = _join(where, name)
        yield full
        for member in _members(annotation):
            if dataclasses.is_dataclass(member):
                yield from _settings(cast("type[Any]", member), full)


def _annotation(cls: type[Any], setting: str) -> Any:
    """Return the annotation of the setting with this dotted name below `cls`."""
    name, _, rest = setting.partition(".")
    annotation = _fields(cls)[name]
    if not rest:
        return annotation
    section = next(item for item in _members(annotation) if dataclasses.is_dataclass(item))
    return _annotation(cast("type[Any]", section), rest)


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _build(cls: type[Any], values: Any, where: str, known: frozenset[str]) -> Any:
    fields = _fields(cls)
    arguments = {}
    for name, value in values.items():
        setting = _join(where, str(name))
        if name not in fields:
            raise ConfigError(setting, value, _unknown(setting, known))
        arguments[name] = _convert(fields[name], value, setting, known)
    return cls(**arguments)


def _unknown(setting: str, known: frozenset[str]) -> str:
    """Say that there is no such setting, and which one was probably meant."""
    section, _, name = setting.rpartition(".")
    if setting in known:
        return f"unknown name; write {name!r} as a line below the section {section!r}"
    same_name = [full for full in known if full.rpartition(".")[2] == name]
    if same_name:
        return (
            f"unknown setting; did you mean {min(same_name, key=lambda full: (len(full), full))!r}?"
        )
    if section in known and not any(full.startswith(f"{section}.") for full in known):
        return f"unknown setting; did you mean {section!r}?"
    siblings = [full for full in known if full.rpartition(".")[0] == section]
    for candidates in (siblings, sorted(known)):
        full_names = {full.rpartition(".")[2]: full for full in candidates}
        if close := difflib.get_close_matches(name, full_names, n=1):
            return f"unknown setting; did you mean {full_names[close[0]]!r}?"
    return f"unknown setting; {nearest(name, siblings or known)}"


def _convert(annotation: Any, value: Any, setting: str, known: frozenset[str]) -> Any:
    """Return `value` as the annotated type, or raise an error that says what is wanted."""
    for member in _members(annotation):
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping):
            return _build(cast("type[Any]", member), value, setting, known)
        if _accepts(member, value):
            return _coerce(member, value, setting, known)
    # A section whose lines are all commented out.
    if value is None and dataclasses.is_dataclass(annotation):
        return _build(cast("type[Any]", annotation), {}, setting, known)
    raise ConfigError(setting, value, f"must be {_wanted(annotation)}{_hint(annotation, value)}")


def _accepts(annotation: Any, value: Any) -> bool:
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
            key: _convert(items[1], item, _join(setting, key), known) for key, item in value.items()
        }
    return value


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def _wanted(annotation: Any) -> str:
    """Say in words which values an annotation stands for."""
    members = _members(annotation)
    if len(members) > 1:
        return " or ".join(_wanted(member) for member in members)
    if get_origin(annotation) is Literal:
        choices = [repr(item) for item in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        number = "" if items[-1] is Ellipsis else f" of length {len(items)}"
        return f"a list{number}, each item {_wanted(items[0])}"
    return _WORDS.get(annotation, "a section of 'name: value' lines")


def _hint(annotation: Any, value: Any) -> str:
    """Say how to write what was probably meant."""
    members = _members(annotation)
    if int in members and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if str in members and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    if isinstance(value, str) and any(member in (bool, int, float) for member in members):
        return ", not text"
    return ""


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------


def command_line(cls: type[T], argv: Sequence[str], prog: str, description: str) -> T:
    """Build a dataclass from `--config FILE` and overrides such as `--optim.lr 3e-4`.

    Overrides win over the file, the file over the defaults of `cls`; their order on the command
    line does not matter. `--help` shows the values that the file gives.

    Args:
        cls: Dataclass as described at `from_mapping`.
        argv: Arguments without the program's name.
        prog: Program's name, for the help text.
        description: What the program does, for the help text.

    Raises:
        ConfigError: If the file, an option or a value is wrong; always one plain message.
        SystemExit: With code 0 after `--help`.
    """
    path, overrides = _split_config(argv)
    values = {} if path is None else read_yaml(path)
    config = from_mapping(cls, values)
    # Without overrides the import of tyro, a third of a second on every rank, is saved.
    return _override(cls, config, overrides, prog, description) if overrides else config


def _split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--config FILE` or `--config=FILE` out of the arguments, wherever it stands."""
    path: str | None = None
    overrides = []
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--config":
            overrides.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or value.startswith("--"):
            raise ConfigError("--config", value, "give the name of a YAML file after it")
        if path is not None:
            raise ConfigError("--config", value, f"is given twice; the first is {path!r}")
        path = value
    return path, overrides


def _override(cls: type[T], config: T, overrides: list[str], prog: str, description: str) -> T:
    import tyro

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            parsed, unknown = tyro.cli(
                cls,
                default=config,
                args=_as_tyro_writes(cls, overrides),
                prog=f"{prog} [--config FILE]",
                description=f"{description}\n\n--config FILE gives the defaults below as YAML.",
                return_unknown_args=True,
                registry=_dictionaries_as_yaml(),
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise _rejected(cls, stop, messages.getvalue(), overrides) from None
    if unknown:
        raise _not_an_option(cls, unknown[0], overrides)
    return parsed


def _as_tyro_writes(cls: type[Any], overrides: list[str]) -> list[str]:
    """Translate `--x true` and `--x null`, as in the file, to tyro's `--x` and `--x None`."""
    known = frozenset(_settings(cls))
    words: list[str] = []
    option = ""
    for word in overrides:
        joined = word.startswith("--")
        option, equals, value = word.partition("=") if joined else (option, "", word)
        setting = _setting_of(option)
        members = _members(_annotation(cls, setting)) if setting in known else ()
        if members == (bool,) and value.lower() in ("true", "false"):
            words.append(_switch(setting, on=value.lower() == "true"))
            option = ""
        elif value == "null" and type(None) in members:
            words.append(f"{option}=None" if equals else "None")
        else:
            words.append(word)
    return words


def _switch(setting: str, on: bool) -> str:
    section, _, name = setting.rpartition(".")
    return "--" + _join(section, name if on else f"no_{name}")


def _dictionaries_as_yaml() -> ConstructorRegistry:
    """Return rules with which tyro takes `--x '{a: 1}'` for a dictionary, as in the file."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type_origin is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{NAME: VALUE, ...}",
            instance_from_str=lambda words: _yaml_dictionary(words[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [_one_line(value)],
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(rule)
    return registry


def _yaml_dictionary(text: str) -> dict[str, Any]:
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(_bad_syntax(error)) from None
    if not _accepts(dict[str, Any], value):
        raise ValueError("not a dictionary")
    return cast("dict[str, Any]", value)


def _one_line(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf")).strip()


def _setting_of(option: str) -> str:
    """Return `optim.warmup_steps` for `--optim.warmup-steps=3`."""
    return option.partition("=")[0].removeprefix("--").replace("-", "_")


def _rejected(cls: type[Any], stop: SystemExit, text: str, overrides: list[str]) -> ConfigError:
    """Turn tyro's exit, with what it printed, into one error."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, ConfigError):
            # Raised by a check of the settings' own; tyro wraps every ValueError.
            return cause
        cause = cause.__context__
    known = frozenset(_settings(cls))
    for option in re.findall(r"--[\w.-]+", text):
        setting = _setting_of(option)
        if setting in known:
            value = " ".join(_values_of(setting, overrides))
            return ConfigError(setting, value, f"must be {_wanted(_annotation(cls, setting))}")
    # Whatever else tyro says, without the box that it draws around it.
    plain = " ".join(re.sub(r"[^\x20-\x7e]+", " ", text).split())
    return ConfigError("command line", " ".join(overrides), plain)


def _values_of(setting: str, overrides: list[str]) -> Iterator[str]:
    """Give the words that stand after the last use of the option of this setting."""
    last = max(index for index, word in enumerate(overrides) if _setting_of(word) == setting)
    _, equals, value = overrides[last].partition("=")
    if equals:
        yield value
    for word in overrides[last + 1 :]:
        if word.startswith("--"):
            return
        yield word


def _not_an_option(cls: type[Any], word: str, overrides: list[str]) -> ConfigError:
    known = frozenset(_settings(cls))
    if word.startswith("--"):
        setting = _setting_of(word)
        value = " ".join(_values_of(setting, overrides))
        if setting in known:
            return ConfigError(setting, value, "is a section; override its settings one by one")
        return ConfigError(setting, value, _unknown(setting, known))
    return ConfigError(
        "command line",
        word,
        "belongs to no option; options are written --name value, switches --name or --no-name",
    )
