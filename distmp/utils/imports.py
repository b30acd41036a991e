"""Objects named by import path (`package.module:attribute`) in a configuration."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from distmp.errors import ConfigError


def load_object(setting: str, path: str) -> Any:
    """Import `module:attribute`, looking in the working directory too.

    Args:
        setting: Name of the setting that holds the path, for the error message.
        path: `package.module:attribute`; the attribute may be dotted.

    Raises:
        ConfigError: If the path is malformed, or the module or attribute does not exist. An error
            raised *inside* an existing module is not caught: its traceback is what the user needs.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigError(setting, path, "write an import path as 'package.module:attribute'")
    # `python -m` and torchrun differ in whether they put the working directory on the path.
    working_directory = os.getcwd()
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ConfigError(
            setting, path, f"there is no module {error.name!r} on the Python path"
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(setting, path, f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    return found
