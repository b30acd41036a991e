"""Configurations that are part of the package: `preset:NAME` in place of a path."""

from __future__ import annotations

from pathlib import Path

from distmp.errors import ConfigError, nearest

PREFIX = "preset:"
CONFIGURATION = ".yaml"
MODEL = ".json"


def preset_directory() -> Path:
    """Return the directory of the presets: `configs/` in a clone, `presets` in a wheel."""
    package = Path(__file__).parents[1]
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "configs"


def preset_names(suffix: str = CONFIGURATION) -> list[str]:
    """Return the names of the presets with a suffix: configurations of runs, or of models."""
    return sorted(file.stem for file in preset_directory().glob(f"*{suffix}"))


def preset_purpose(name: str) -> str:
    """Return what a configuration is for: the first line of its comment."""
    with (preset_directory() / f"{name}{CONFIGURATION}").open() as lines:
        return next(lines).removeprefix("#").strip()


def located(setting: str, path: str, suffix: str = CONFIGURATION) -> str:
    """Return the path of the file that `preset:NAME` names; other paths are returned unchanged.

    Args:
        setting: Name of the setting, for the message.
        path: Path of a file, or `preset:NAME`.
        suffix: Suffix of the file of the preset.

    Raises:
        ConfigError: If there is no such preset, or a path that does not exist has the name of one.
    """
    if not path.startswith(PREFIX):
        name = Path(path).name.removesuffix(suffix)
        if not Path(path).expanduser().exists() and name in preset_names(suffix):
            raise ConfigError(
                setting, path, f"there is no such file; did you mean '{PREFIX}{name}'?"
            )
        return path
    name, known = path.removeprefix(PREFIX), preset_names(suffix)
    if name not in known:
        raise ConfigError(setting, path, f"there is no such preset; {nearest(name, known)}")
    return str(preset_directory() / f"{name}{suffix}")
