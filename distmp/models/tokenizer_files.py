"""Finds and copies the files of a tokenizer of Hugging Face transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

SUBFOLDER = "tokenizer"
"""Folder in a folder of token files with the tokenizer that made them."""

_CONFIG = "tokenizer_config.json"
# One of them defines a tokenizer; the others refine it.
_DEFINITIONS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_FILES = (
    *_DEFINITIONS,
    _CONFIG,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder defines a tokenizer."""
    return any((folder / name).is_file() for name in _DEFINITIONS)


def copy(source: Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer, if there is one, into a folder.

    Raises:
        OSError: If they cannot be read or written.
    """
    if source is None or source.absolute() == folder.absolute():
        return
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
