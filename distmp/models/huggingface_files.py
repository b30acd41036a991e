"""Finds the local directories and files that `model.name: hf:PATH` names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from distmp.errors import ConfigError
from distmp.utils.presets import MODEL, located

PREFIX = "hf:"
CONFIG_FILE = "config.json"


def locate(name: str) -> Path:
    """Return the directory or configuration file that `hf:PATH` or `hf:preset:NAME` names.

    Raises:
        ConfigError: If it does not exist, or transformers is not installed.
    """
    path = Path(located("model.name", name.removeprefix(PREFIX), MODEL)).expanduser()
    file = path if path.suffix == ".json" else path / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            "model.name",
            name,
            f"there is no file {file}; name a directory with a {CONFIG_FILE}, or such a file. "
            "Nothing is downloaded",
        )
    require_transformers(name)
    return path


def require_transformers(name: str) -> None:
    """Check that transformers is installed, without importing it.

    Raises:
        ConfigError: If it is not; the message names the model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("model.name", name, "needs transformers; run pip install 'distmp[hf]'")
