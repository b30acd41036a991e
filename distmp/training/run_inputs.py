"""The inputs that determine the result of a run, as text that ranks compare."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from distmp.config import RunConfig
from distmp.data.datasets import text_directory
from distmp.data.settings import DataConfig
from distmp.errors import ConfigError
from distmp.masking import masked
from distmp.models.huggingface_files import locate
from distmp.utils.environment_info import relevant, versions
from distmp.utils.files import expanded, sampled_digests
from distmp.utils.settings import flat

# Kinds of inputs.
VERSIONS, SETTINGS, ENVIRONMENT = "versions", "settings", "environment"
CODE, DATA = "code", "data"
# Variables that may differ between ranks.
_PER_RANK_VARIABLES = re.compile(
    "RANK|LOCAL_(RANK|WORLD_SIZE)|(GLOO|NCCL)_SOCKET_IFNAME|CUDA_VISIBLE_DEVICES|PET_|MASTER_|"
    "TORCHELASTIC_|TORCHINDUCTOR_CACHE_DIR"
)
# Suffixes of files that Python runs.
_CODE_SUFFIXES = (".py", ".so")
# A directory of images may have millions of files.
_MOST_FILES = 10_000
# The text "a.b as c, d" of "import a.b as c, d", and "a.b import c" of "from a.b import c".
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w[\w., \t]*)", re.MULTILINE)
_IMPORT_PATH = re.compile(r'"([A-Za-z_]\w*)[\w.]*:[A-Za-z_][\w.]*"')


def inputs(config: RunConfig, *, with_files: bool) -> dict[str, dict[str, Any]]:
    """Return versions, settings and variables by name, and samples of the files of code and data.

    Args:
        config: The configuration of the run.
        with_files: Whether to read files; one rank of each machine is enough.
    """
    values = flat(masked(asdict(config)))
    found: dict[str, dict[str, Any]] = {
        VERSIONS: {f"version of {name}": version for name, version in versions().items()},
        SETTINGS: values,
        ENVIRONMENT: {
            name: value
            for name, value in relevant(os.environ).items()
            if not _PER_RANK_VARIABLES.match(name)
        },
    }
    if with_files:
        found[CODE] = sampled_digests(dict(_code(values)))
        found[DATA] = sampled_digests(dict(_data(config)))
    return found


def _code(values: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the files of distmp, the script, and what settings name, and of what those import.

    Installed packages count only if settings name them.
    """
    named = {"distmp", *_IMPORT_PATH.findall(json.dumps(values, default=str))}
    names = sorted(named)
    if (main := sys.modules["__main__"]).__spec__ is None:  # a script, not `python -m`
        names.append(Path(getattr(main, "__file__", "")).stem)
    for name in names:  # which become more
        # As in `load_object`, which also searches the working directory.
        spec = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
        places = [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]
        for place in map(Path, places):
            installed = not {"site-packages", "dist-packages"}.isdisjoint(place.parts)
            files = () if installed and name not in named else _files(place.name, place)
            for file, path in files:
                if path.suffix in _CODE_SUFFIXES:
                    yield file, path
                if path.suffix == ".py" and not installed and os.access(path, os.R_OK):
                    names += sorted(_imported(path).difference(names))


def _imported(path: Path) -> set[str]:
    """Return the packages and modules that a file imports, without the standard library's."""
    lines = _IMPORT.findall(path.read_text(errors="replace"))
    modules = ",".join(line.partition(" import ")[0] for line in lines)
    return {*re.findall(r"(?:^|,)\s*(\w+)", modules)} - sys.stdlib_module_names


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
        # Any text, which methods of Path would refuse if it is long or has an unknown user.
        yield from _files(location, expanded(location))


def _text(data: DataConfig, location: str | None) -> Iterator[tuple[str, Path]]:
    try:
        text = text_directory(data, location)
    except ConfigError:
        return  # reported when the data is loaded; where it works, its files are missing here
    for name, _ in text.files:
        yield f"{location or 'standard library'}/{name}", text.directory / name


def _files(location: str, path: Path) -> Iterator[tuple[str, Path]]:
    if os.path.isfile(path):
        yield location, path
    elif os.path.isdir(path):
        # In the same order on every machine, up to a limit.
        for file in itertools.islice(_walk(path), _MOST_FILES):
            yield f"{location}/{file.relative_to(path)}", file


def _walk(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        yield from (Path(parent, name) for name in sorted(names))
