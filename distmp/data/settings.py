"""Settings of the data: section `data` of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distmp.errors import nearest
from distmp.utils.annotations import HARMLESS, Section, consequential
from distmp.utils.imports import load_function

# Processes per rank; more than a machine has cores only compete.
_MAX_WORKERS = 512
_SOURCES = ("text", "tokens")
_CALL_ARGUMENTS = ("split", "sequence_length")


@dataclass(frozen=True)
class DataConfig(Section, section="data"):
    """Training data, and how it is divided into samples.

    Values are checked when the configuration is read, files when the data is loaded. A run that
    resumes compares the data itself (`distmp.training.run_fingerprint`), so it may change the
    settings that only locate the data.
    """

    source: str = "text"
    """'text' (files below a directory, as bytes), 'tokens' (a directory of token ids, such as
    `distmp data tokenize` writes) or the import path 'module:callable' of a function that returns a
    map-style or iterable dataset."""

    path: str | None = field(default=None, metadata=HARMLESS)
    """Directory of a text source (default: the standard library of the running Python), or of a
    token source."""

    validation_path: str | None = field(
        default=None,
        metadata=consequential("validation losses are not comparable with earlier ones"),
    )
    """Directory for validation; then nothing of `path` is held out."""

    pattern: str = field(default="**/*.py", metadata=HARMLESS)
    """Files of the directory to read, as a glob on the path relative to it. Hidden files and
    directories are skipped, links to directories are followed."""

    sequence_length: int = 256
    """Tokens in one sample."""

    held_out: float = field(default=0.05, metadata=HARMLESS)
    """Share of the data used for validation, from 0 to below 1; 0 disables validation. Text files
    are chosen by a hash of their relative path. If that leaves one side empty, and for token files,
    the last tokens are used."""

    workers: int = field(default=0, metadata=HARMLESS)
    """Number of processes per rank that prepare microbatches. 0 prepares them in the training
    process, which is enough for text and token files. An iterable dataset takes at most 1."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the callable of an import path."""

    def _check(self) -> None:
        self._check_source()
        self._check_numbers()
        self._check_options()

    @property
    def is_import_path(self) -> bool:
        """Whether the source is a callable of the user."""
        return ":" in self.source

    def function(self) -> Callable[..., Any]:
        """Import and return the function of an import path.

        Raises:
            ConfigError: If it does not exist, is not callable, or does not take the arguments that
                it is called with.
        """
        arguments = {"split": "train", "sequence_length": self.sequence_length, **self.options}
        problem = (
            "cannot be called with split, sequence_length and data.options = "
            f"{self.options} ({{reason}}); change data.options or the function"
        )
        return load_function("data.source", self.source, arguments, problem)

    def _check_source(self) -> None:
        problem = (
            f"{nearest(self.source, _SOURCES)}, or write an import path 'module:callable'; `distmp"
            " data tokenize` turns JSON Lines, parquet and text into tokens"
        )
        self._require(self.is_import_path or self.source in _SOURCES, "source", problem)
        valid = self.source != "tokens" or self.path is not None
        self._require(valid, "path", "name the directory of token ids")
        valid = self.source != "text" or (self.pattern != "" and self.pattern[0] != "/")
        hint = "write a glob relative to data.path, such as '**/*.md'"
        self._require(valid, "pattern", hint)

    def _check_numbers(self) -> None:
        self._require(self.sequence_length >= 1, "sequence_length", "must be at least 1")
        hint = f"must be from 0 to {_MAX_WORKERS}"
        self._require(0 <= self.workers <= _MAX_WORKERS, "workers", hint)
        hint = "must be a share from 0 to below 1, such as 0.05"
        self._require(0.0 <= self.held_out < 1.0, "held_out", hint)

    def _check_options(self) -> None:
        problem = f"only an import path takes options, not {self.source!r}"
        self._require(self.is_import_path or not self.options, "options", problem)
        for name in ("path", "validation_path"):
            value = getattr(self, name)
            self._require(value != "", name, "name a directory, or null")
            problem = f"is not passed to {self.source!r}; pass it in data.options, or remove it"
            self._require(value is None or not self.is_import_path, name, problem)
        for name in _CALL_ARGUMENTS:
            problem = f"{name!r} is passed by distmp; remove it"
            self._require(name not in self.options, "options", problem)
