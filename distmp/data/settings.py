"""Settings of the data: section `data` of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from distmp.errors import ConfigError, nearest
from distmp.utils.files import check_name
from distmp.utils.imports import check_arguments, load_callable
from distmp.utils.resume_rules import HARMLESS, IGNORED, consequential

TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]

# Processes per rank; more than a machine has cores only compete.
_MAX_WORKERS = 512
_SOURCES = ("text", "tokens")
_CALL_ARGUMENTS = ("split", "sequence_length")
# A wider type does not imply a vocabulary: no tokenizer has four billion tokens.
_IMPLIED_VOCABULARY = {"uint8": 2**8, "uint16": 2**16}


@dataclass(frozen=True)
class DataConfig:
    """Training data, and how it is divided into samples.

    Values are checked when the configuration is read, files when the data is loaded. A run that
    resumes compares the data itself (`distmp.training.run_fingerprint`), so it may change the
    settings that only locate the data.
    """

    source: str = "text"
    """'text' (files below a folder, as bytes), 'tokens' (a file of token ids, or a folder that
    `distmp data tokenize` wrote) or the import path 'module:callable' of a function that returns a
    map-style or iterable dataset."""

    path: str | None = field(default=None, metadata=HARMLESS)
    """Folder of a text source (default: the standard library of the running Python), or the file
    or folder of a token source."""

    validation_path: str | None = field(
        default=None,
        metadata=consequential("validation losses are not comparable with earlier ones"),
    )
    """Folder or file for validation; then nothing of `path` is held out."""

    pattern: str = field(default="**/*.py", metadata=HARMLESS)
    """Files of the folder to read, as a glob on the path relative to it. Hidden files and folders
    are skipped, links to folders are not followed."""

    sequence_length: int = 256
    """Tokens in one sample."""

    held_out: float = field(default=0.05, metadata=HARMLESS)
    """Share of the data used for validation, from 0 to below 1; 0 disables validation. Text files
    are chosen by a hash of their relative path. If that leaves one side empty, and for token files,
    the last tokens are used."""

    # Not compared as a setting: the digest of the data contains the type.
    token_dtype: TokenType | None = field(default=None, metadata=IGNORED)
    """Type of the ids in a token file, little-endian and without a header. The default is that of
    `tokens.json`, which `distmp data tokenize` writes, and uint16 for other files."""

    vocabulary_size: int | None = field(default=None, metadata=HARMLESS)
    """Number of different token ids. Text has 257. The default for token files is the vocabulary
    size in `tokens.json`. Without that file, it is the number of values of uint8 or uint16; wider
    types require this setting."""

    document_masking: bool = field(
        default=False, metadata=consequential("tokens attend to other documents, or no longer do")
    )
    """Tokens attend only to their own document, positions restart in each one, and no token is
    predicted from another document. Each text file is a document; `end_of_text` ends the others."""

    end_of_text: int | None = field(
        default=None, metadata=consequential("documents begin at other tokens")
    )
    """Token id that ends each document, for `document_masking` (default: the attribute
    `end_of_text` of the dataset)."""

    workers: int = field(default=0, metadata=HARMLESS)
    """Number of processes per rank that prepare microbatches. 0 prepares them in the training
    process, which is enough for text and token files. An iterable dataset takes at most 1."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the callable of an import path."""

    def __post_init__(self) -> None:
        """Check each value, and combinations of values.

        Raises:
            ConfigError: If a value is invalid; it names the setting, the value and what to do.
        """
        check_name("data.path", self.path)
        check_name("data.validation_path", self.validation_path)
        self._check_source()
        self._check_numbers()
        self._check_vocabulary()
        self._check_documents()
        self._check_options()

    @property
    def is_import_path(self) -> bool:
        """Whether the source is a callable of the user."""
        return ":" in self.source

    @property
    def token_vocabulary_size(self) -> int:
        """Vocabulary size of a token file without metadata, set or implied by its type."""
        return self.vocabulary_size or _IMPLIED_VOCABULARY[self.known_token_dtype]

    @property
    def known_token_dtype(self) -> TokenType:
        """Type of the ids in a token file without metadata."""
        return self.token_dtype or "uint16"

    def function(self) -> Callable[..., Any]:
        """Import and return the function of an import path.

        Raises:
            ConfigError: If it does not exist, is not callable, or does not take the arguments that
                it is called with.
        """
        found = load_callable("data.source", self.source)
        check_arguments(
            "data.source",
            self.source,
            found,
            {"split": "train", "sequence_length": self.sequence_length, **self.options},
            "cannot be called with split, sequence_length and data.options = "
            f"{self.options} ({{reason}}); change data.options or the function",
        )
        return found

    def _check_source(self) -> None:
        if not self.is_import_path and self.source not in _SOURCES:
            hint = nearest(self.source, _SOURCES)
            raise ConfigError(
                "data.source",
                self.source,
                f"{hint}, or write an import path 'module:callable'; `distmp data tokenize` turns"
                " JSON Lines, parquet and text into tokens",
            )
        if self.source == "tokens" and self.path is None:
            raise ConfigError("data.path", None, "name the file or folder of token ids")
        if self.source == "text" and (not self.pattern or self.pattern.startswith("/")):
            raise ConfigError(
                "data.pattern",
                self.pattern,
                "write a glob relative to data.path, such as '**/*.md'",
            )

    def _check_numbers(self) -> None:
        if self.sequence_length < 1:
            raise ConfigError("data.sequence_length", self.sequence_length, "must be at least 1")
        if not 0.0 <= self.held_out < 1.0:
            raise ConfigError(
                "data.held_out", self.held_out, "must be a share from 0 to below 1, such as 0.05"
            )
        if not 0 <= self.workers <= _MAX_WORKERS:
            raise ConfigError("data.workers", self.workers, f"must be from 0 to {_MAX_WORKERS}")

    def _check_vocabulary(self) -> None:
        size = self.vocabulary_size
        if size is not None and size < 1:
            raise ConfigError("data.vocabulary_size", size, "must be at least 1")
        if self.source == "text" and size is not None:
            raise ConfigError(
                "data.vocabulary_size",
                size,
                "bytes of text have a fixed vocabulary; remove this setting, and set"
                " model.options.vocabulary_size for a wider output",
            )
        implied = self.known_token_dtype in _IMPLIED_VOCABULARY
        if self.source == "tokens" and size is None and not implied:
            raise ConfigError(
                "data.vocabulary_size",
                None,
                f"set it: the type {self.token_dtype} does not imply a vocabulary (or leave out"
                " data.token_dtype, if the data has a tokens.json)",
            )

    def _check_documents(self) -> None:
        end = self.end_of_text
        if self.source == "text" and end is not None:
            raise ConfigError(
                "data.end_of_text", end, "files of text have a fixed one; remove this setting"
            )
        if end is not None and not 0 <= end < (self.vocabulary_size or 2**32):
            raise ConfigError(
                "data.end_of_text",
                end,
                "must be a token id: at least 0 and less than data.vocabulary_size",
            )

    def _check_options(self) -> None:
        if self.options and not self.is_import_path:
            raise ConfigError(
                "data.options",
                self.options,
                f"only an import path takes options, not {self.source!r}",
            )
        for name in _CALL_ARGUMENTS:
            if name in self.options:
                raise ConfigError(
                    "data.options", self.options, f"{name!r} is passed by distmp; remove it"
                )
