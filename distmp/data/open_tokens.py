"""Opens token files with the metadata that belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distmp.data.token_metadata import NAME as METADATA
from distmp.data.token_metadata import UNFINISHED_SUFFIX, TokenMetadata
from distmp.data.tokens import TokenFiles
from distmp.errors import ConfigError


def open_tokens(
    folder: Path, sequence_length: int, setting: str
) -> tuple[TokenFiles, TokenMetadata]:
    """Open a folder of token files.

    Args:
        folder: The folder, which has a `tokens.json`.
        sequence_length: Tokens in a sample.
        setting: Name of the setting that holds the path, for error messages.

    Returns:
        The dataset, and its metadata.

    Raises:
        ConfigError: If the files cannot be read, or contradict their metadata.
    """
    if folder.with_name(folder.name + UNFINISHED_SUFFIX).is_dir() and not folder.exists():
        problem = "is not finished; remove it and run `distmp data tokenize` again"
        raise ConfigError(setting, str(folder), problem)
    metadata = TokenMetadata.read(folder, setting)
    files = [folder / name for name in metadata.files]
    tokens = TokenFiles(files, metadata.dtype, metadata.vocabulary_size, sequence_length, setting)
    for file, count in zip(files, np.diff(tokens.starts).tolist(), strict=True):
        if count != metadata.files[file.name]:
            problem = (
                f"{file.name} has {count:,} tokens, not the {metadata.files[file.name]:,} of"
                f" {METADATA}; copy the folder again, or tokenize the data again"
            )
            raise ConfigError(setting, str(folder), problem)
    return tokens, metadata


def check_validation(train: TokenMetadata, validation: TokenMetadata, folder: Path) -> None:
    """Refuse data for validation that was tokenized in another way.

    Args:
        train: Metadata of the training data.
        validation: Metadata of the data for validation.
        folder: Its folder.

    Raises:
        ConfigError: If tokenizers or ends of documents differ.
    """
    ours = (train.tokenizer_sha256, train.end_of_text)
    if ours != (validation.tokenizer_sha256, validation.end_of_text):
        problem = (
            f"was made with the tokenizer {validation.tokenizer!r} and token"
            f" {validation.end_of_text} after each document, data.path with {train.tokenizer!r} and"
            f" {train.end_of_text}; tokenize both in the same way"
        )
        raise ConfigError("data.validation_path", str(folder), problem)
