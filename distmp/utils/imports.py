"""Imports objects that a configuration names by import path (`package.module:attribute`)."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from distmp.errors import ConfigError, did_you_mean, require
from distmp.utils.settings import from_mapping

# Keyword arguments, or the names of positional ones.
Args = Mapping[str, Any] | Sequence[str]


def require_package(setting: str, value: Any, package: str, extra: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        setting: Name of the setting or option that needs the package.
        value: Its value.
        package: Name of the package.
        extra: The extra of distmp that installs it.

    Raises:
        ConfigError: If it is not installed; the message names the extra.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(setting, value, f"needs {package}; run pip install 'distmp[{extra}]'")


def load_object(setting: str, path: str) -> Any:
    """Import `module:attribute`; also searches the working directory.

    Args:
        setting: Name of the setting with the path, for the error message.
        path: `package.module:attribute`; the attribute may be dotted.

    Raises:
        ConfigError: If the path is malformed, or the module or attribute does not exist. Errors
            inside an existing module are not caught: the user needs their traceback.
    """
    module_name, _, attribute = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigError(setting, path, "write an import path as 'package.module:attribute'")
    # `python -m` adds the working directory to the path, torchrun does not.
    working_directory = os.getcwd()
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        loaded: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        problem = f"there is no module {error.name!r} on the Python path"
        raise ConfigError(setting, path, problem) from None
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            hint = did_you_mean(part, dir(loaded))
            problem = f"module {module_name!r} has no {attribute!r}"
            raise ConfigError(setting, path, f"{problem}; {hint}" if hint else problem)
        loaded = getattr(loaded, part)
    return loaded


def load_callable(setting: str, path: str) -> Callable[..., Any]:
    """Import `module:attribute`, which has to be callable.

    Args:
        setting: Name of the setting with the path, for the error message.
        path: See `load_object`.

    Raises:
        ConfigError: If it does not exist or is not callable.
    """
    loaded = load_object(setting, path)
    problem = f"is a {type(loaded).__name__}; name a function or a class"
    require(callable(loaded), setting, path, problem)
    return cast("Callable[..., Any]", loaded)


def load_function(setting: str, path: str, arguments: Args, problem: str) -> Callable[..., Any]:
    """Import `module:attribute`, which has to take some arguments; it is not called.

    Args:
        setting: Name of the setting with the path, for the error message.
        path: See `load_object`.
        arguments: See `check_arguments`.
        problem: See `check_arguments`.

    Raises:
        ConfigError: If it does not exist, is not callable, or does not take the arguments.
    """
    function = load_callable(setting, path)
    check_arguments(setting, path, function, arguments, problem)
    return function


def check_arguments(
    setting: str, value: object, function: Callable[..., Any], arguments: Args, problem: str
) -> None:
    """Refuse arguments that a function or class does not take, without calling it.

    Args:
        setting: Name of the setting, for the error message.
        value: Its value.
        function: The function or class.
        arguments: The keyword arguments, or the names of positional ones.
        problem: What is wrong, and what to do, for the message; "{reason}" in it is replaced.

    Raises:
        ConfigError: If an argument is unknown, or one is missing.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable in C has no signature
        return
    try:
        if isinstance(arguments, Mapping):
            signature.bind(**arguments)
        else:
            signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(setting, value, problem.replace("{reason}", str(error))) from None


@dataclass(frozen=True)
class Entry:
    """An entry, written as NAME or as {name: NAME, options: {OPTION: VALUE}}.

    Attributes:
        name: The name, or an import path.
        options: Keyword arguments.
    """

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def parse_entries(setting: str, entries: Sequence[str | dict[str, Any]]) -> list[Entry]:
    """Return the entries of a setting.

    Args:
        setting: Dotted name of the setting.
        entries: Its value.

    Raises:
        ConfigError: If an entry has other keys than `name` and `options`, or values of other types.
    """
    return [
        Entry(entry)
        if isinstance(entry, str)
        else from_mapping(Entry, entry, f"{setting}[{index}]")
        for index, entry in enumerate(entries)
    ]
