"""Finds the files that `model.name: hf:PATH` names, and copies those of tokenizers."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from distmp.errors import require
from distmp.utils.files import MODEL, expanded, located
from distmp.utils.imports import require_package

PREFIX = "hf:"
CONFIG_FILE = "config.json"


def locate(name: str) -> Path:
    """Return the directory or configuration file that `hf:PATH` or `hf:preset:NAME` names.

    Raises:
        ConfigError: If it does not exist, or transformers is not installed.
    """
    path = expanded(located("model.name", name.removeprefix(PREFIX), MODEL))
    file = path if path.suffix == ".json" else path / CONFIG_FILE
    problem = (
        f"there is no file {file}; name a directory with a {CONFIG_FILE}, or such a file. Nothing "
        "is downloaded"
    )
    require(os.path.isfile(file), "model.name", name, problem)
    require_package("model.name", name, "transformers", "hf")
    return path


SUBDIRECTORY = "tokenizer"
"""Directory in a directory of token files with the tokenizer that made them."""

# One of the first files defines a tokenizer; the others refine it.
_DEFINITIONS = re.compile(
    r"(tokenizer|vocab|tekken)\.json|vocab\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
_REFINEMENTS = re.compile(
    r"(tokenizer_config|special_tokens_map|added_tokens)\.json|merges\.txt|chat_template\.(json|jinja)"
)


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory defines a tokenizer, and can be read."""
    is_readable = os.path.isdir(directory) and os.access(directory, os.R_OK | os.X_OK)
    return is_readable and any(map(_DEFINITIONS.fullmatch, os.listdir(directory)))


def copy(source: Path | None, directory: Path) -> None:
    """Copy the files of a tokenizer, if there is one, into a directory.

    Raises:
        OSError: If they cannot be read or written.
    """
    if source is None or source.absolute() == directory.absolute():
        return
    for file in source.iterdir():
        is_known = _DEFINITIONS.fullmatch(file.name) or _REFINEMENTS.fullmatch(file.name)
        if is_known and file.is_file():
            shutil.copyfile(file, directory / file.name)
