"""`distmp data tokenize INPUT... --to DIRECTORY --tokenizer DIRECTORY`: turn text into token files.

Hugging Face `datasets` reads the documents and encodes them in several processes.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np

from distmp.data import token_metadata
from distmp.data.token_metadata import BYTES, TokenMetadata
from distmp.errors import ConfigError, require
from distmp.models import huggingface_files
from distmp.utils.files import expanded, visible_files
from distmp.utils.imports import require_package
from distmp.utils.processes import granted_cores
from distmp.utils.settings.command_line import Parser

_BY_SUFFIX = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")  # `datasets` decompresses them
_TOKENS = "tokens.bin"


def main(argv: list[str]) -> int:
    """Tokenize data, and return the exit code.

    Raises:
        ConfigError: If an argument is invalid, or a document cannot be read.
    """
    arguments = _parse(argv)
    require(arguments.workers >= 1, "--workers", arguments.workers, "use 1 or more processes")
    encoder = load_encoder(arguments.tokenizer)
    directory = expanded(arguments.to)
    with _unfinished(directory) as unfinished:
        documents = _documents(arguments, unfinished / "cache")
        encoded = _encoded(documents, encoder, arguments, unfinished / "cache" / "ids.arrow")
        metadata = _write(encoded, encoder, unfinished)
        problem = "no document has a token; name files with text"
        require(metadata.tokens > 0, "INPUT", ", ".join(arguments.inputs), problem)
        metadata.write(unfinished)
    written = f"{metadata.documents:,} documents, {metadata.tokens:,} tokens of {metadata.dtype}"
    sys.stdout.write(f"{directory}: {written}\n")
    return 0


@dataclass(frozen=True)
class Encoder:
    """Turns documents into token ids.

    Attributes:
        metadata: The tokenizer and its ids, without files. `end_of_text` is appended to each
            document.
        tokenizer: The tokenizer of transformers; None for bytes.
        directory: Directory of the tokenizer; None for bytes.
    """

    metadata: TokenMetadata
    tokenizer: Any = None
    directory: Path | None = None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text. Names of special tokens in a text are encoded as text."""
        if self.tokenizer is None:
            return [list(text.encode()) for text in texts]
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        return cast("list[list[int]]", encoded["input_ids"])

    def documents(self, texts: list[str]) -> dict[str, Any]:
        """Return the ids of each text that has any, followed by that of the end of the text.

        Raises:
            ValueError: If a document contains the end of the text.
        """
        end = self.metadata.end_of_text
        encoded = [ids for ids in self.encode(texts) if ids]
        if any(end in ids for ids in encoded):
            raise ValueError(
                f"a document contains the end-of-text token {end} of the tokenizer; use a special "
                "token as its eos_token"
            )
        return {"ids": [[*ids, end] for ids in encoded]}


def load_encoder(tokenizer: str) -> Encoder:
    """Return the encoder of a tokenizer.

    Args:
        tokenizer: "bytes", or a directory with `tokenizer.json`.

    Raises:
        ConfigError: If the directory holds no tokenizer, or it has no end-of-sequence token.
    """
    if tokenizer == BYTES:
        return Encoder(
            tokenizer_metadata(BYTES, token_metadata.VOCABULARY_SIZE, token_metadata.END_OF_FILE)
        )
    directory = expanded(tokenizer)
    problem = f"has no tokenizer.json; name a directory that has one, or {BYTES!r}"
    require(os.path.isfile(directory / "tokenizer.json"), "--tokenizer", tokenizer, problem)
    require_package("--tokenizer", tokenizer, "transformers", "hf")
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), **options)
    except Exception as error:  # libraries of tokenizers raise any type
        problem = f"transformers cannot load it: {error}"
        raise ConfigError("--tokenizer", tokenizer, problem) from error
    problem = "has no end-of-sequence token; set eos_token in its tokenizer_config.json"
    require(loaded.eos_token_id is not None, "--tokenizer", tokenizer, problem)
    size = max(loaded.get_vocab().values()) + 1
    digest = hashlib.sha256(loaded.backend_tokenizer.to_str().encode()).hexdigest()
    loaded.split_special_tokens = True
    metadata = tokenizer_metadata(directory.resolve().name, size, loaded.eos_token_id, digest)
    return Encoder(metadata, loaded, directory)


def tokenizer_metadata(name: str, size: int, end: int, sha256: str | None = None) -> TokenMetadata:
    """Return the metadata of a tokenizer, without files; ids have the smallest type."""
    return TokenMetadata("uint16" if size <= 2**16 else "uint32", size, {}, end, name, sha256)


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="distmp data",
        description="Turn text into token files for data.source=tokens. Needs the extra `data`.",
    )
    parser.add_argument("command", choices=("tokenize",))
    help_text = "text files, .jsonl or .parquet files, or directories of them"
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help=help_text)
    parser.add_argument("--to", metavar="DIRECTORY", required=True, help="new directory")
    help_text = "a directory with tokenizer.json (extra `hf`), or 'bytes'"
    parser.add_argument("--tokenizer", metavar="DIRECTORY", required=True, help=help_text)
    parser.add_argument("--key", default="text", help="key or column of the text (default: text)")
    help_text = "number of processes (default: the available cores)"
    parser.add_argument("--workers", type=int, default=granted_cores(), metavar="N", help=help_text)
    return parser.parse_args(argv)


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """Yield a new directory, which gets the name `directory` if the block succeeds."""
    problem = "exists; name a new directory, or remove this one"
    require(not os.path.lexists(directory), "--to", str(directory), problem)
    unfinished = directory.with_name(directory.name + token_metadata.UNFINISHED_SUFFIX)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        problem = f"cannot create {unfinished} ({error.strerror}); remove what a killed one left"
        raise ConfigError("--to", str(directory), problem) from error
    try:
        yield unfinished
        shutil.rmtree(unfinished / "cache")
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _documents(arguments: Namespace, cache: Path) -> Any:
    """Return the documents of all inputs as a dataset of one column, in order."""
    require_package("INPUT", arguments.inputs[0], "datasets", "data")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it raises is printed
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    files = [file for name in arguments.inputs for file in _files(name)]
    columns = []
    # Each table is loaded on its own, because all files of a call need the same columns.
    for table, group in groupby(files, lambda file: file if _suffix(file) in _BY_SUFFIX else None):
        names = [str(file) for file in group]
        with _explained(", ".join(names)):
            is_empty = table is not None and table.stat().st_size == 0
            require(not is_empty, "INPUT", names[0], "is empty; leave it out")
            loaded = datasets.load_dataset(
                "text" if table is None else _BY_SUFFIX[_suffix(table)],
                data_files=[glob.escape(name) for name in names],  # they are patterns
                split="train",
                cache_dir=str(cache),
                **({"sample_by": "document"} if table is None else {}),
            )
            columns.append(_column(loaded, names[0], "text" if table is None else arguments.key))
    return datasets.concatenate_datasets(columns)


def _column(loaded: Any, name: str, key: str) -> Any:
    """Return the column of the texts, which every row of a table has to have."""
    problem = f"has no column {key!r}; set --key to one of {', '.join(loaded.column_names)}"
    require(key in loaded.column_names, "INPUT", name, problem)
    texts = loaded.data.column(key)
    if texts.null_count:
        row = texts.is_null().index(True).as_py() + 1
        problem = f"row {row} has no {key!r}; set --key to a key of all rows, or correct the row"
        raise ConfigError("INPUT", name, problem)
    problem = f"holds {texts.type} under {key!r}; set --key to a key of texts"
    require(str(texts.type) in ("string", "large_string"), "INPUT", name, problem)
    return loaded.select_columns([key]).rename_columns({key: "document"})


def _suffix(file: Path) -> str:
    """Return the suffix that names the format of a file, which may be compressed."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix


def _files(name: str) -> list[Path]:
    path = expanded(name)
    if os.path.isfile(path):
        return [path]
    files = [path / relative for relative in sorted(visible_files(path, "INPUT"))]
    require(len(files) > 0, "INPUT", name, "there is no file in this directory")
    return files


def _encoded(documents: Any, encoder: Encoder, arguments: Namespace, cache: Path) -> Any:
    from datasets import Features, List, Value

    with (
        _explained(", ".join(arguments.inputs)),
        # datasets sets this variable too, and replaces os.environ by a copy of it.
        mock.patch.object(os, "environ", os.environ),
        mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"),
    ):
        return documents.map(
            encoder.documents,
            input_columns=["document"],
            batched=True,
            remove_columns=["document"],
            features=Features({"ids": List(Value("uint32"))}),
            num_proc=arguments.workers,
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
        text = " ".join(str((error.__cause__ if hidden else None) or error).split())
        raise ConfigError("INPUT", name, f"cannot be read: {text}") from error


def _write(encoded: Any, encoder: Encoder, directory: Path) -> TokenMetadata:
    dtype = np.dtype(encoder.metadata.dtype).newbyteorder("<")
    tokens = 0
    with open(directory / _TOKENS, "wb") as file:
        for batch in encoded.with_format("numpy").iter(1000):
            ids = np.concatenate(batch["ids"]).astype(dtype)
            tokens += len(ids)
            file.write(ids.tobytes())
    if encoder.directory is not None:
        # Runs copy it to the models that they export.
        (directory / huggingface_files.SUBDIRECTORY).mkdir()
        huggingface_files.copy(encoder.directory, directory / huggingface_files.SUBDIRECTORY)
    return replace(encoder.metadata, documents=len(encoded), tokens=tokens, files={_TOKENS: tokens})
