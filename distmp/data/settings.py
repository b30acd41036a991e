"""Settings of the data: section `data` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from distmp.errors import ConfigError, nearest
from distmp.utils.resume_rules import HARMLESS, consequential

TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]

_SOURCES = ("text", "tokens")
_CALL_ARGUMENTS = ("split", "sequence_length")
# A wider type says nothing about the vocabulary: nobody has four billion tokens in mind.
_IMPLIED_VOCABULARY = {"uint8": 2**8, "uint16": 2**16}


@dataclass(frozen=True)
class DataConfig:
    """What to train on and how to cut it into samples. Values are checked here, files later.

    A run that resumes compares the data itself (`distmp.training.run_fingerprint`), so that the
    settings that lead to the data are harmless.
    """

    source: str = "text"
    """'text' (files below a folder, as bytes), 'tokens' (a file of token ids) or the import path
    'module:callable' of a function that returns a map-style dataset."""

    path: str | None = field(default=None, metadata=HARMLESS)
    """Folder of a text source (default: the standard library of the running Python), or the file
    of a token source."""

    validation_path: str | None = field(
        default=None,
        metadata=consequential("validation losses are not comparable with earlier ones"),
    )
    """Folder or file to validate on; then nothing is held out of `path`."""

    pattern: str = field(default="**/*.py", metadata=HARMLESS)
    """Which files of the folder are text, as a glob on the path relative to it. Hidden files and
    folders are left out, links to folders are not followed."""

    sequence_length: int = 256
    """Tokens in one sample."""

    held_out: float = field(default=0.05, metadata=HARMLESS)
    """Share of the data kept for validation: of the files, chosen by a hash of their relative path
    (where that leaves one side empty, and for token files: the last share of the tokens). 0 for
    no validation."""

    token_dtype: TokenType = "uint16"
    """Type of the ids in a token file, little-endian and without a header."""

    vocabulary_size: int | None = field(default=None, metadata=HARMLESS)
    """Number of different token ids. Text has 257; a token file of uint8 or uint16 has as many as
    the type holds unless this says otherwise; wider types need it."""

    workers: int = field(default=0, metadata=HARMLESS)
    """Processes that prepare microbatches, for each rank. 0 prepares them in the training
    process, which is enough for text and token files."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the callable of an import path."""

    def __post_init__(self) -> None:
        """Check each value, and each pair of values that exclude one another.

        Raises:
            ConfigError: Naming the setting, its value and what to do.
        """
        self._check_source()
        self._check_numbers()
        self._check_vocabulary()
        self._check_options()

    @property
    def is_import_path(self) -> bool:
        """Whether the source is a user's own callable."""
        return ":" in self.source

    @property
    def token_vocabulary_size(self) -> int:
        """Vocabulary size of a token source, given or implied by its type."""
        return self.vocabulary_size or _IMPLIED_VOCABULARY[self.token_dtype]

    def _check_source(self) -> None:
        if not self.is_import_path and self.source not in _SOURCES:
            hint = nearest(self.source, _SOURCES)
            raise ConfigError(
                "data.source", self.source, f"{hint}, or write an import path 'module:callable'"
            )
        if self.source == "tokens" and self.path is None:
            raise ConfigError("data.path", None, "name the file of token ids")
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
        if self.workers < 0:
            raise ConfigError("data.workers", self.workers, "must be 0 or more")

    def _check_vocabulary(self) -> None:
        size = self.vocabulary_size
        if size is not None and size < 1:
            raise ConfigError("data.vocabulary_size", size, "must be at least 1")
        if self.source == "text" and size is not None:
            raise ConfigError(
                "data.vocabulary_size",
                size,
                "bytes of text have a fixed vocabulary; remove this setting, and set"
                " model.vocabulary_size for a wider output",
            )
        if self.source == "tokens" and size is None and self.token_dtype not in _IMPLIED_VOCABULARY:
            raise ConfigError(
                "data.vocabulary_size",
                None,
                f"set it: the type {self.token_dtype} does not imply a vocabulary",
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
