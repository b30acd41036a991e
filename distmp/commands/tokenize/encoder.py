"""Tokenizers: bytes, and those of Hugging Face in a local folder."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmp.errors import ConfigError
from distmp.models.tokenizers import DEFINITION, load_tokenizer

BYTES = "bytes"


@dataclass(frozen=True)
class Encoder:
    """Turns documents into token ids. Worker processes receive it pickled, and read no files.

    Attributes:
        name: Name of the tokenizer.
        definition: Content of `tokenizer.json`, as transformers uses it; None for bytes.
        vocabulary_size: Number of ids.
        end_of_text: Id that is appended to each document.
        folder: Folder of the tokenizer; None for bytes.
    """

    name: str
    definition: str | None
    vocabulary_size: int
    end_of_text: int
    folder: Path | None = None

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

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the ids of each text. Names of special tokens in a text are encoded as text."""
        if self.definition is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    @functools.cached_property
    def _tokenizer(self) -> Any:
        # The processes of a run use all cores already.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.definition or "")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer


def load_encoder(tokenizer: str, end_of_text: str | None) -> Encoder:
    """Return the encoder of a tokenizer.

    Args:
        tokenizer: "bytes", or a folder with `tokenizer.json`.
        end_of_text: Token after each document; None for the end-of-sequence token of the tokenizer.

    Raises:
        ConfigError: If the folder holds no tokenizer, or it has no such token.
    """
    if tokenizer == BYTES:
        return _byte_encoder(end_of_text)
    folder = Path(tokenizer).expanduser()
    if not (folder / DEFINITION).is_file():
        problem = f"has no {DEFINITION}; name a folder that has one, or {BYTES!r}"
        raise ConfigError("--tokenizer", tokenizer, problem)
    loaded = load_tokenizer("--tokenizer", folder)
    name = end_of_text if end_of_text is not None else loaded.eos_token
    if name is None:
        problem = "the tokenizer has no end-of-sequence token; name the token that ends a document"
        raise ConfigError("--end-of-text", None, problem)
    vocabulary = loaded.get_vocab()
    if name not in vocabulary:
        problem = f"is not a token of {folder}; name a token of this tokenizer"
        raise ConfigError("--end-of-text", name, problem)
    size = max(vocabulary.values()) + 1
    definition = loaded.backend_tokenizer.to_str()
    return Encoder(folder.resolve().name, definition, size, vocabulary[name], folder)


def _byte_encoder(end_of_text: str | None) -> Encoder:
    from distmp.data.text import END_OF_FILE, VOCABULARY_SIZE

    if end_of_text is not None:
        problem = f"with --tokenizer {BYTES} a document ends with {END_OF_FILE}; remove this option"
        raise ConfigError("--end-of-text", end_of_text, problem)
    return Encoder(BYTES, None, VOCABULARY_SIZE, END_OF_FILE)
