"""Loads tokenizers of Hugging Face from local folders. Nothing is downloaded, and no code runs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from distmp.errors import ConfigError

DEFINITION = "tokenizer.json"
"""File of a folder that defines a tokenizer."""


def load_tokenizer(setting: str, folder: Path) -> Any:
    """Return the tokenizer of a folder, as transformers loads it.

    Args:
        setting: Name of the setting or option that names the folder, for error messages.
        folder: A folder with `tokenizer.json`.

    Raises:
        ConfigError: If transformers is not installed, or cannot load it.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        problem = "needs transformers; install the extra `hf`: pip install 'distmp[hf]'"
        raise ConfigError(setting, str(folder), problem) from error
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Libraries of tokenizers raise any type.
        problem = f"transformers cannot load it: {error}"
        raise ConfigError(setting, str(folder), problem) from error


def sha256(tokenizer: Any) -> str:
    """Return the hash of a tokenizer's definition, hexadecimal, as in `tokens.json`."""
    definition: str = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(definition.encode()).hexdigest()
