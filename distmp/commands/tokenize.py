"""`distmp data tokenize INPUT... --to DIRECTORY --tokenizer DIRECTORY`: turn text into token files.

Hugging Face `datasets` reads the documents and encodes them in several processes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from distmp.commands.arguments import Parser
from distmp.data.token_metadata import (
    END_OF_FILE,
    UNFINISHED_SUFFIX,
    VOCABULARY_SIZE,
    TokenMetadata,
)
from distmp.errors import ConfigError
from distmp.models import tokenizer_files
from distmp.models.tokenizers import DEFINITION, load_tokenizer
from distmp.utils.cgroups import granted_cores
from distmp.utils.visible_files import visible_files

BYTES = "bytes"
FORMATS = ("auto", "text", "json", "parquet")
_BY_SUFFIX = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
_TOKENS = "tokens.bin"


def main(argv: list[str]) -> int:
    """Tokenize data, and return the exit code.

    Raises:
        ConfigError: If an argument is invalid, or a document cannot be read.
    """
    arguments = _parse(argv)
    encoder = load_encoder(arguments.tokenizer, arguments.end_of_text)
    directory = Path(arguments.to).expanduser()
    with _unfinished(directory) as unfinished:
        documents = _documents(arguments, unfinished / "cache")
        encoded = _encoded(documents, encoder, arguments, unfinished / "cache" / "ids.arrow")
        metadata = _write(encoded, encoder, unfinished)
        metadata.write(unfinished)
    sys.stdout.write(
        f"{directory}: {metadata.documents:,} documents, {metadata.tokens:,} tokens of"
        f" {metadata.dtype}; vocabulary of {metadata.vocabulary_size:,}, end of text"
        f" {metadata.end_of_text}\n"
    )
    return 0


@dataclass(frozen=True)
class Encoder:
    """Turns documents into token ids.

    Attributes:
        name: Name of the tokenizer.
        definition: Content of `tokenizer.json`, as transformers uses it; None for bytes.
        vocabulary_size: Number of ids.
        end_of_text: Id that is appended to each document.
        directory: Directory of the tokenizer; None for bytes.
    """

    name: str
    definition: str | None
    vocabulary_size: int
    end_of_text: int
    directory: Path | None = None

    @property
    def sha256(self) -> str | None:
        """Hash of the definition, hexadecimal."""
        if self.definition is None:
            return None
        return hashlib.sha256(self.definition.encode()).hexdigest()

    @property
    def dtype(self) -> str:
        """Smallest type of the ids in a file."""
        return "uint16" if self.vocabulary_size <= 2**16 else "uint32"

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text. Names of special tokens in a text are encoded as text."""
        if self.definition is None:
            return [list(text.encode()) for text in texts]
        tokenizer = _backend(self.definition)
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def documents(self, texts: list[Any]) -> dict[str, list[list[int]]]:
        """Return the ids of each text that has any, followed by that of the end of the text.

        Raises:
            ValueError: If a document is no text, or contains the end of the text.
        """
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a document is of type {type(text).__name__}; use strings")
        encoded = [ids for ids in self.encode(texts) if ids]
        if any(self.end_of_text in ids for ids in encoded):
            raise ValueError(
                f"a document contains the end-of-text token {self.end_of_text} of the tokenizer; "
                "choose another one with --end-of-text"
            )
        return {"ids": [[*ids, self.end_of_text] for ids in encoded]}


@functools.cache
def _backend(definition: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_encoder(tokenizer: str, end_of_text: str | None) -> Encoder:
    """Return the encoder of a tokenizer.

    Args:
        tokenizer: "bytes", or a directory with `tokenizer.json`.
        end_of_text: Token after each document; None for the end-of-sequence token of the tokenizer.

    Raises:
        ConfigError: If the directory holds no tokenizer, or it has no such token.
    """
    if tokenizer == BYTES:
        if end_of_text is not None:
            problem = f"with --tokenizer {BYTES} a document ends with {END_OF_FILE}; remove it"
            raise ConfigError("--end-of-text", end_of_text, problem)
        return Encoder(BYTES, None, VOCABULARY_SIZE, END_OF_FILE)
    directory = Path(tokenizer).expanduser()
    if not (directory / DEFINITION).is_file():
        problem = f"has no {DEFINITION}; name a directory that has one, or {BYTES!r}"
        raise ConfigError("--tokenizer", tokenizer, problem)
    loaded = load_tokenizer("--tokenizer", directory)
    name = end_of_text if end_of_text is not None else loaded.eos_token
    if name is None:
        problem = "the tokenizer has no end-of-sequence token; name the token that ends a document"
        raise ConfigError("--end-of-text", None, problem)
    vocabulary = loaded.get_vocab()
    if name not in vocabulary:
        problem = f"is not a token of {directory}; name a token of this tokenizer"
        raise ConfigError("--end-of-text", name, problem)
    size = max(vocabulary.values()) + 1
    definition = loaded.backend_tokenizer.to_str()
    return Encoder(directory.resolve().name, definition, size, vocabulary[name], directory)


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(prog="distmp data", description="Prepare data for training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="tokenize")
    command = commands.add_parser(
        "tokenize",
        help="turn text into token files",
        description="Turn text into token files for data.source=tokens. Needs `datasets`.",
    )
    command.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="text files (one document each), JSONL or parquet files (one per line or row), "
        "directories of them, or a directory that `datasets` saved with save_to_disk",
    )
    command.add_argument("--to", metavar="DIRECTORY", required=True, help="new directory")
    command.add_argument(
        "--tokenizer",
        metavar="DIRECTORY",
        required=True,
        help="a directory with tokenizer.json (extra `hf`), or 'bytes'",
    )
    command.add_argument(
        "--format",
        default="auto",
        choices=FORMATS,
        help="format of all files (default: auto, by the suffixes .jsonl and .parquet; others are "
        "text)",
    )
    command.add_argument("--key", default="text", help="key or column of the text (default: text)")
    command.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="token after each document (default: the end-of-sequence token of the tokenizer)",
    )
    command.add_argument(
        "--workers",
        type=int,
        default=granted_cores(),
        metavar="N",
        help="number of processes (default: the available cores); the output does not depend on it",
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.workers <= 1024:
        raise ConfigError("--workers", arguments.workers, "must be from 1 to 1024")
    return arguments


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """Yield a new directory, which gets the name `directory` if the block succeeds."""
    if directory.exists():
        problem = "exists; name a new directory, or remove this one"
        raise ConfigError("--to", str(directory), problem)
    unfinished = directory.with_name(directory.name + UNFINISHED_SUFFIX)
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError:
        problem = f"another command writes to {unfinished}, or was killed; then remove it"
        raise ConfigError("--to", str(directory), problem) from None
    except OSError as error:
        raise ConfigError("--to", str(directory), f"cannot be created: {error}") from error
    try:
        yield unfinished
        shutil.rmtree(unfinished / "cache")
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _documents(arguments: Namespace, cache: Path) -> Any:
    """Return the documents of all inputs as a dataset of one column, in order."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        problem = "needs the package datasets; install it with `pip install datasets`"
        raise ConfigError("INPUT", arguments.inputs[0], problem) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it raises is printed
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    columns = []
    for name in arguments.inputs:
        path = Path(name).expanduser()
        with _explained(name):
            if (path / "dataset_dict.json").is_file():
                splits = ", ".join(str(file.parent) for file in path.glob("*/state.json"))
                raise ConfigError("INPUT", name, f"has several splits; name one of {splits}")
            if (path / "state.json").is_file():
                columns.append(_column(datasets.load_from_disk(str(path)), name, arguments.key))
                continue
            by_format = groupby(_files(name, path), lambda file: _format(file, arguments.format))
            for format_, files in by_format:
                is_text = format_ == "text"
                loaded = datasets.load_dataset(
                    format_,
                    data_files=[str(file) for file in files],
                    split="train",
                    cache_dir=str(cache),
                    **({"sample_by": "document"} if is_text else {}),
                )
                columns.append(_column(loaded, name, "text" if is_text else arguments.key))
    return datasets.concatenate_datasets(columns)


def _column(loaded: Any, name: str, key: str) -> Any:
    if key not in loaded.column_names:
        problem = f"has no column {key!r}; set --key to one of {', '.join(loaded.column_names)}"
        raise ConfigError("INPUT", name, problem)
    return loaded.select_columns([key]).rename_column(key, "document")


def _files(name: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError("INPUT", name, "there is no such file or directory")
    files = [path / relative for relative in sorted(visible_files(path, "INPUT"))]
    if not files:
        raise ConfigError("INPUT", name, "there is no file in this directory")
    return files


def _format(file: Path, format_: str) -> str:
    if format_ == "auto" and file.suffix == ".json":
        problem = "may be one document or one per line; set --format to text or json"
        raise ConfigError("INPUT", str(file), problem)
    return _BY_SUFFIX.get(file.suffix, "text") if format_ == "auto" else format_


def _encoded(documents: Any, encoder: Encoder, arguments: Namespace, cache: Path) -> Any:
    from datasets import Features, List, Value

    with (
        _explained(", ".join(arguments.inputs)),
        # With several processes, datasets replaces os.environ by a copy of it.
        mock.patch.object(os, "environ", os.environ),
        # The processes use all cores already.
        mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"),
    ):
        return documents.map(
            encoder.documents,
            input_columns=["document"],
            batched=True,
            remove_columns=["document"],
            features=Features({"ids": List(Value("uint32"))}),
            num_proc=arguments.workers if arguments.workers > 1 else None,
            cache_file_name=str(cache),
            load_from_cache_file=False,
        )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        # Libraries of formats raise any type; `datasets` hides the cause behind its own.
        hidden = type(error).__name__ == "DatasetGenerationError"
        cause = (error.__cause__ if hidden else None) or error
        raise ConfigError("INPUT", name, f"cannot be read: {cause}") from error


def _write(encoded: Any, encoder: Encoder, directory: Path) -> TokenMetadata:
    dtype = np.dtype(encoder.dtype).newbyteorder("<")
    tokens = 0
    with open(directory / _TOKENS, "wb") as file:
        for batch in encoded.with_format("numpy").iter(1000):
            ids = np.concatenate(batch["ids"]).astype(dtype)
            tokens += len(ids)
            file.write(ids.tobytes())
    if not tokens:
        raise ConfigError("INPUT", None, "no document has a token; name files with text")
    if encoder.directory is not None:
        # Runs copy it to the models that they export.
        (directory / tokenizer_files.SUBFOLDER).mkdir()
        tokenizer_files.copy(encoder.directory, directory / tokenizer_files.SUBFOLDER)
    return TokenMetadata(
        dtype=encoder.dtype,
        vocabulary_size=encoder.vocabulary_size,
        end_of_text=encoder.end_of_text,
        tokenizer=encoder.name,
        tokenizer_sha256=encoder.sha256,
        documents=len(encoded),
        tokens=tokens,
        files={_TOKENS: tokens},
    )
