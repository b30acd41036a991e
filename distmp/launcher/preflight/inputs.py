"""The inputs that determine the result of a run: settings, code and data, as text to compare."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from distmp.config import RunConfig
from distmp.data.build import text_files
from distmp.data.settings import DataConfig
from distmp.errors import ConfigError
from distmp.masking import masked
from distmp.models.huggingface_files import locate
from distmp.utils import settings
from distmp.utils.file_samples import sampled_digests
from distmp.utils.settings.flat import flat

# Kinds of inputs.
SETTINGS, CODE, DATA = "settings", "code", "data"
# Suffixes of files that Python runs.
_CODE_SUFFIXES = (".py", ".so")
# A folder of images may have millions of files.
_MOST_FILES = 10_000
_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*)[\w.]*:[A-Za-z_][\w.]*")


def inputs(config: RunConfig, *, with_files: bool) -> dict[str, dict[str, Any]]:
    """Return the values of all settings, and the digests of the files of code and data.

    Args:
        config: The configuration of the run.
        with_files: Whether to read files; one rank of each machine is enough.
    """
    values = flat(masked(settings.to_mapping(config)))
    if not with_files:
        return {SETTINGS: values}
    return {
        SETTINGS: values,
        CODE: sampled_digests(dict(_code(values))),
        DATA: sampled_digests(dict(_data(config))),
    }


def _code(values: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the files of distmp, and of the packages and modules that settings name."""
    for name in sorted({"distmp", *_packages(list(values.values()))}):
        # As in `load_object`, which also searches the working directory.
        spec = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
        if spec is None:
            continue
        for folder in map(Path, spec.submodule_search_locations or ()):
            for path in _below(folder):
                if path.suffix in _CODE_SUFFIXES:
                    yield str(path.relative_to(folder.parent)), path
        if spec.origin is not None and not spec.submodule_search_locations:
            yield Path(spec.origin).name, Path(spec.origin)


def _packages(value: object) -> Iterator[str]:
    """Yield the top-level packages of all import paths `module:attribute` in a value."""
    if isinstance(value, str) and (match := _IMPORT_PATH.fullmatch(value)):
        yield match[1]
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _packages(item)
    elif isinstance(value, dict):
        yield from _packages([*value.values()])


def _data(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield the files of the training data, and those that a new run takes its weights from."""
    data, model = config.data, config.model
    locations = [model.weights]
    if model.is_hugging_face:
        yield from _files(model.name, locate(model.name))
    if data.source == "text":
        yield from _text(data, data.path)
        if data.validation_path is not None:
            yield from _text(data, data.validation_path)
    else:
        locations += [data.path, data.validation_path]
        locations += [value for value in data.options.values() if isinstance(value, str)]
    for location in filter(None, locations):
        yield from _files(location, Path(location).expanduser())


def _text(data: DataConfig, location: str | None) -> Iterator[tuple[str, Path]]:
    try:
        folder, files = text_files(data, location)
    except ConfigError:
        return  # reported when the data is loaded; where it works, its files are missing here
    for file in files:
        yield f"{location or 'standard library'}/{file.name}", folder / file.name


def _files(location: str, path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield location, path
    elif path.is_dir():
        for file in _below(path):
            yield f"{location}/{file.relative_to(path)}", file


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in the same order on every machine, up to a limit."""
    return itertools.islice(_walk(folder), _MOST_FILES)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(parent, name) for name in sorted(names))
