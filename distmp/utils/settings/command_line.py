"""Parses command lines, and reads settings from a file and a command line."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin

from distmp.errors import ConfigError, require
from distmp.utils.annotations import accepts, expected, members_of, nested
from distmp.utils.files import located
from distmp.utils.settings import from_mapping, section_advice, setting_annotations
from distmp.utils.settings.yaml_files import as_line, from_line, read_yaml

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")


class Parser(ArgumentParser):
    """Parser of a subcommand that raises a `ConfigError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigError` with the arguments."""
        raise ConfigError(self.prog, shlex.join(sys.argv[2:]), message)


def command_line(cls: type[T], argv: Sequence[str], prog: str, description: str) -> T:
    """Build a dataclass from `--config FILE` and overrides such as `--optim.lr 3e-4`.

    FILE is the path of a YAML file, or `preset:NAME`. The values of overrides are YAML, those of
    lists are separated by spaces. `--name` and `--no-name` set a switch.

    Overrides have precedence over the file, and the file over the defaults of `cls`, in any order
    on the command line. `--help` shows the values of the file.

    Args:
        cls: Dataclass, see `from_mapping`.
        argv: Arguments without the name of the program.
        prog: Name of the program, for the help text.
        description: Description of the program, for the help text.

    Raises:
        ConfigError: If the file, an option or a value is wrong; always one message.
        SystemExit: With code 0 after `--help`.
    """
    wants_help = not {"-h", "--help"}.isdisjoint(argv)
    options = _options([word for word in argv if word not in ("-h", "--help")])
    values = _file([words for setting, words in options if setting == "config"])
    if wants_help:
        _print_help(from_mapping(cls, values), prog, description)
    known = setting_annotations(cls)
    for setting, words in options:
        if setting == "config":
            continue
        section, _, name = setting.rpartition(".")
        positive = f"{section}.{name.removeprefix('no_')}".lstrip(".")
        if setting not in known and name.startswith("no_") and not words and positive in known:
            _set(values, positive, False)
            continue
        annotation = known.get(setting, Any)
        value = _value(annotation, setting, words)
        if dataclasses.is_dataclass(annotation):  # the value would replace its other settings
            raise ConfigError(setting, value, section_advice(cls, setting))
        _set(values, setting, value)
    return from_mapping(cls, values)


def _file(given: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the settings in the file of `--config FILE`.

    Args:
        given: The words after each `--config`.
    """
    paths = [" ".join(words) for words in given]
    if not paths:
        return {}
    require(all(paths), "--config", "", "give the name of a YAML file after it, or preset:NAME")
    if len(paths) > 1:
        raise ConfigError("--config", paths[1], f"is given twice; the first is {paths[0]!r}")
    return read_yaml(located("--config", paths[0]))


def _options(overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the name of each setting, and the words of its value."""
    options: list[tuple[str, list[str]]] = []
    for word in overrides:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            setting = option.removeprefix("--").replace("-", "_")
            options.append((setting, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise _belongs_to_no_option(word)
    return options


def _belongs_to_no_option(word: str) -> ConfigError:
    hint = "belongs to no option; write options as --name value, switches as --name or --no-name"
    return ConfigError("command line", word, hint)


def _set(values: dict[str, Any], setting: str, value: Any) -> None:
    """Set a value in nested dictionaries."""
    *sections, name = setting.split(".")
    target: Any = values
    for index, section in enumerate(sections):
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            parent = ".".join(sections[: index + 1])
            raise ConfigError(setting, value, f"{parent} is not a section; set {parent}")
    target[name] = value


def _value(annotation: Any, setting: str, words: Sequence[str]) -> Any:
    """Read the words after an option as a value for `from_mapping`."""
    members = members_of(annotation)
    lists = [member for member in members if get_origin(member) is tuple]
    if len(words) == 1 and (not lists or words[0] == "null" or words[0].startswith("[")):
        return _from_word(members, words[0])
    if lists:
        items = members_of(get_args(lists[0])[0])
        return [_from_word(items, word) for word in words]
    if words and annotation is not Any:
        raise _belongs_to_no_option(words[1])
    if annotation is Any or annotation is bool:
        return [_from_word(members, word) for word in words] if words else True
    raise ConfigError(setting, "", f"must be {expected(annotation)}")


def _from_word(members: Sequence[Any], word: str) -> Any:
    """Read a word as YAML, unless only text is accepted."""
    if word in ("null", "None") and type(None) in members:
        return None
    value = from_line(word)
    if isinstance(value, str) or (value is None and word not in ("null", "~")):
        return word  # YAML reads "" and "#a" as null
    is_accepted = any(accepts(member, value) for member in members)
    return word if str in members and not is_accepted else value


def _print_help(config: Any, prog: str, description: str) -> None:
    """Print the settings with their current values, and exit."""
    import tyro

    tyro.cli(
        type(config),
        default=config,
        args=["--help"],
        prog=f"{prog} [--config FILE]",
        description=f"{description}\n\n--config FILE gives the defaults below as YAML, and "
        "--config preset:NAME those of a preset (`distmp presets`).",
        registry=_as_yaml(),
    )


def _as_yaml() -> ConstructorRegistry:
    """Return the rule by which tyro describes all values as YAML."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if nested(info.type):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=expected(info.type),
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: True,
            str_from_instance=lambda value: [as_line(value)],
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(rule)
    return registry
