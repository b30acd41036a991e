"""Reads settings from a file and the command line; tyro parses the overrides."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from distmp.errors import ConfigError
from distmp.utils.annotations import expected, members_of
from distmp.utils.presets import located
from distmp.utils.settings.convert import (
    annotation_of,
    did_you_mean,
    from_mapping,
    join,
    option_setting,
    section_advice,
    setting_names,
    unknown_setting,
)
from distmp.utils.settings.yaml_files import dictionary_as_line, dictionary_from_line, read_yaml

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")


def command_line(cls: type[T], argv: Sequence[str], prog: str, description: str) -> T:
    """Build a dataclass from `--config FILE` and overrides such as `--optim.lr 3e-4`.

    FILE is the path of a YAML file, or `preset:NAME`.

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
    path, overrides = _split_config(argv)
    values = {} if path is None else read_yaml(located("--config", path))
    config = from_mapping(cls, values)
    # Importing tyro takes a third of a second on every rank; without overrides it is not needed.
    return _override(cls, config, overrides, prog, description) if overrides else config


def _split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the FILE of `--config FILE` or `--config=FILE`, and the other arguments."""
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
            raise ConfigError(
                "--config", value, "give the name of a YAML file after it, or preset:NAME"
            )
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
                args=_tyro_arguments(cls, overrides),
                prog=f"{prog} [--config FILE]",
                description=f"{description}\n\n--config FILE gives the defaults below as YAML, and "
                "--config preset:NAME those of a preset (`distmp presets`).",
                return_unknown_args=True,
                registry=_dictionaries_as_yaml(),
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise _rejected(config, stop, messages.getvalue(), overrides) from None
    if unknown:
        raise _not_an_option(config, unknown[0], overrides)
    return parsed


def _tyro_arguments(cls: type[Any], overrides: list[str]) -> list[str]:
    """Translate `--x true` and `--x null`, as in YAML, to tyro's `--x` and `--x None`."""
    known = frozenset(setting_names(cls))
    words: list[str] = []
    option = ""
    for word in overrides:
        joined = word.startswith("--")
        option, equals, value = word.partition("=") if joined else (option, "", word)
        setting = _setting_of(option)
        members = members_of(annotation_of(cls, setting)) if setting in known else ()
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
    return "--" + join(section, name if on else f"no_{name}")


def _dictionaries_as_yaml() -> ConstructorRegistry:
    """Return rules by which tyro parses `--x '{a: 1}'` as a dictionary, as in YAML.

    If a setting also accepts text, names or null, a value that starts with a brace is a dictionary.
    """
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        members = members_of(info.type)
        kinds = [get_origin(member) or member for member in members]
        if dict not in kinds or not {*kinds} <= {dict, str, Literal, type(None)}:
            return None
        optional = type(None) in kinds
        texts = [
            "TEXT" if kind is str else "|".join(get_args(member))
            for kind, member in zip(kinds, members, strict=True)
            if kind in (str, Literal)
        ]

        def parsed(word: str) -> dict[str, Any] | str | None:
            if optional and word == "None":
                return None
            return word if texts and not word.startswith("{") else dictionary_from_line(word)

        def written(value: dict[str, Any] | str | None) -> str:
            return dictionary_as_line(value) if isinstance(value, dict) else str(value)

        kept = (dict, *((str,) if texts else ()), *((type(None),) if optional else ()))
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="|".join([*(["None"] if optional else []), *texts, "{NAME: VALUE, ...}"]),
            instance_from_str=lambda words: parsed(words[0]),
            is_instance=lambda value: isinstance(value, kept),
            str_from_instance=lambda value: [written(value)],
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(rule)
    return registry


def _setting_of(option: str) -> str:
    """Return `optim.warmup_steps` for `--optim.warmup-steps=3`."""
    return option.partition("=")[0].removeprefix("--").replace("-", "_")


def _rejected(config: Any, stop: SystemExit, text: str, overrides: list[str]) -> ConfigError:
    """Convert tyro's exit, and what it printed, to one error."""
    cls = type(config)
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, ConfigError):
            # Raised by a check of the settings, perhaps because an option has a wrong name. tyro
            # wraps every ValueError.
            misnamed = [word for word in overrides if _is_unknown(cls, word)]
            return _not_an_option(config, misnamed[0], overrides) if misnamed else cause
        cause = cause.__context__
    known = frozenset(setting_names(cls))
    for option in re.findall(r"--[\w.-]+", text):
        setting = _setting_of(option)
        if setting in known:
            value = " ".join(_values_of(setting, overrides))
            problem = f"must be {expected(annotation_of(cls, setting))}"
            if value.startswith("[") and "a list" in problem:
                problem += "; give the items without brackets, separated by spaces"
            return ConfigError(setting, value, problem)
    # Another message of tyro, without its box.
    plain = " ".join(re.sub(r"[^\x20-\x7e]+", " ", text).split())
    return ConfigError("command line", " ".join(overrides), plain)


def _values_of(setting: str, overrides: list[str]) -> Iterator[str]:
    """Yield the values after the last use of the option of this setting."""
    last = max(index for index, word in enumerate(overrides) if _setting_of(word) == setting)
    _, equals, value = overrides[last].partition("=")
    if equals:
        yield value
    for word in overrides[last + 1 :]:
        if word.startswith("--"):
            return
        yield word


def _is_unknown(cls: type[Any], word: str) -> bool:
    """Return whether a word is an option without a setting."""
    if not word.startswith("--"):
        return False
    section, _, name = _setting_of(word).rpartition(".")
    names = {join(section, name), join(section, name.removeprefix("no_"))}
    return names.isdisjoint(setting_names(cls))


def _not_an_option(config: Any, word: str, overrides: list[str]) -> ConfigError:
    if not word.startswith("--"):
        return ConfigError(
            "command line",
            word,
            "belongs to no option; write options as --name value, switches as --name or --no-name",
        )
    known = frozenset(setting_names(type(config)))
    setting = _setting_of(word)
    words = [*_values_of(setting, overrides)]
    value = " ".join(words)
    if setting in known:
        return ConfigError(setting, value, section_advice(type(config), setting))
    option = _as_option(config, setting, overrides)
    if option is None:
        return ConfigError(setting, value, unknown_setting(type(config), setting, known))
    holder, _, name = option.rpartition(".")
    written = words[0] if len(words) == 1 else f"[{', '.join(words)}]" if words else "VALUE"
    problem = f"{holder} is one option." if option == setting else did_you_mean(option)
    return ConfigError(setting, value, f"{problem} Write --{holder} '{{{name}: {written}}}'")


def _as_option(config: Any, setting: str, overrides: list[str]) -> str | None:
    """Return the name of an unknown setting as a member of a dictionary, if it is one."""
    section = setting.rpartition(".")[0]
    if section not in {*setting_names(type(config))}:
        return None
    annotation = annotation_of(type(config), section)
    if any(get_origin(member) is dict for member in members_of(annotation)):
        return setting
    holder = reduce(getattr, section.split("."), config)
    if not dataclasses.is_dataclass(holder):
        return None
    given = {_setting_of(word) for word in overrides if word.startswith("--")}
    values = {
        name: " ".join(_values_of(full, overrides))
        if (full := join(section, name)) in given
        else value
        for name, value in vars(holder).items()
    }
    return option_setting(type(holder), values, setting)
