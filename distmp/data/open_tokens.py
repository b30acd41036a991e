"""Opens token files with the metadata that belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distmp.data.file_formats import refuse_other_formats
from distmp.data.settings import DataConfig
from distmp.data.token_metadata import NAME as METADATA
from distmp.data.token_metadata import UNFINISHED_SUFFIX, TokenMetadata, metadata_of
from distmp.data.tokens import TokenFiles
from distmp.errors import ConfigError


def open_tokens(
    config: DataConfig, path: Path, setting: str
) -> tuple[TokenFiles, TokenMetadata | None]:
    """Open a file of token ids, or a folder that `distmp data tokenize` wrote.

    Args:
        config: The settings of the data.
        path: The file or folder.
        setting: Name of the setting that holds the path, for error messages.

    Returns:
        The dataset, and its metadata; None without any.

    Raises:
        ConfigError: If the files cannot be read, or contradict their metadata or the settings.
    """
    metadata = metadata_of(path, setting)
    length = config.sequence_length
    if metadata is None:
        _refuse_unknown_folder(setting, path)
        refuse_other_formats(path, config.known_token_dtype, setting)
        size = config.token_vocabulary_size
        return TokenFiles([path], config.known_token_dtype, size, length, setting), None
    _compare_settings(config, path, metadata)
    files = [path / name for name in metadata.files] if path.is_dir() else [path]
    size = config.vocabulary_size or metadata.vocabulary_size
    tokens = TokenFiles(files, metadata.dtype, size, length, setting)
    tokens.end_of_text = metadata.end_of_text
    for file, count in zip(files, np.diff(tokens.starts).tolist(), strict=True):
        if count != metadata.files[file.name]:
            problem = (
                f"{file.name} has {count:,} tokens, not the {metadata.files[file.name]:,} of"
                f" {METADATA}; copy the folder again, or tokenize the data again"
            )
            raise ConfigError(setting, str(path), problem)
    return tokens, metadata


def _refuse_unknown_folder(setting: str, path: Path) -> None:
    if path.with_name(path.name + UNFINISHED_SUFFIX).is_dir() and not path.exists():
        problem = "is not finished; remove it and run `distmp data tokenize` again"
        raise ConfigError(setting, str(path), problem)
    if path.is_dir():
        problem = (
            f"is a folder without {METADATA}; name a file of token ids, or a folder that"
            " `distmp data tokenize` wrote"
        )
        raise ConfigError(setting, str(path), problem)


def _compare_settings(config: DataConfig, path: Path, metadata: TokenMetadata) -> None:
    """Refuse settings that contradict the metadata of the files."""
    if config.token_dtype not in (None, metadata.dtype):
        problem = f"{METADATA} of {path} says {metadata.dtype}; remove this setting"
        raise ConfigError("data.token_dtype", config.token_dtype, problem)
    if config.end_of_text not in (None, metadata.end_of_text):
        problem = f"{METADATA} of {path} says {metadata.end_of_text}; remove this setting"
        raise ConfigError("data.end_of_text", config.end_of_text, problem)
    if (config.vocabulary_size or metadata.vocabulary_size) < metadata.vocabulary_size:
        problem = (
            f"the tokenizer of {path} has {metadata.vocabulary_size:,} ids; set at least that, or"
            " remove this setting"
        )
        raise ConfigError("data.vocabulary_size", config.vocabulary_size, problem)


def check_validation(
    config: DataConfig,
    train: TokenMetadata | None,
    validation: TokenMetadata | None,
    validation_path: Path,
) -> None:
    """Refuse data for validation that was tokenized in another way, as far as it is known.

    Args:
        config: The settings of the data.
        train: Metadata of the training data.
        validation: Metadata of the data for validation.
        validation_path: Its file or folder.

    Raises:
        ConfigError: If types of ids, tokenizers or ends of documents differ.
    """
    if train is None:
        return
    if validation is None:
        if config.token_dtype is not None or train.dtype == config.known_token_dtype:
            return
        problem = (
            f"has no {METADATA}, so it would be read as {config.known_token_dtype}, and data.path"
            f" has {train.dtype}; tokenize both with the same tokenizer, or set data.token_dtype"
            f" and data.vocabulary_size if its ids are {train.dtype}"
        )
    elif train.tokenizer_sha256 != validation.tokenizer_sha256:
        problem = (
            f"was made with the tokenizer {validation.tokenizer!r}, data.path with another one,"
            f" {train.tokenizer!r}; tokenize both with the same one"
        )
    elif train.end_of_text != validation.end_of_text:
        problem = (
            f"has documents that end with token {validation.end_of_text}, and those of data.path"
            f" end with {train.end_of_text}; tokenize both with the same tokenizer"
        )
    else:
        return
    raise ConfigError("data.validation_path", str(validation_path), problem)
