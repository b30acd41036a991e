"""Writes a folder of token files and their metadata, atomically and resumably.

The parts are written to `FOLDER.partial`, which is renamed when all are finished. Parts that a
command finished before it was killed are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from distmp.commands.tokenize.encoder import Encoder
from distmp.commands.tokenize.parts import PartCounts, PartWriter
from distmp.commands.tokenize.processes import run_tasks
from distmp.commands.tokenize.sources import InputError, Piece
from distmp.data.token_metadata import NAME, UNFINISHED_SUFFIX, TokenMetadata
from distmp.errors import ConfigError
from distmp.models import tokenizer_files
from distmp.utils.files import replacing


def tokenize(
    parts: Sequence[Sequence[Piece]],
    folder: Path,
    encoder: Encoder,
    key: str,
    settings: Mapping[str, str],
    workers: int,
    on_part: Callable[[int, PartCounts], None],
) -> TokenMetadata:
    """Tokenize the documents of all parts.

    Args:
        parts: The documents of each token file.
        folder: A new folder, or one that the same command has begun or finished.
        encoder: The tokenizer.
        key: Key or column of the text.
        settings: Values that the output depends on. A folder with other values is refused.
        workers: Number of processes.
        on_part: Called with the number of a part when it is finished.

    Returns:
        The metadata of the folder.

    Raises:
        ConfigError: If the folder exists or was begun with other settings.
        InputError: If a document cannot be read, or no document has a token.
    """
    if folder.exists():
        return _existing(folder, settings)
    unfinished = folder.with_name(folder.name + UNFINISHED_SUFFIX)
    with _owned(unfinished):
        _begin(unfinished, settings)
        writer = PartWriter(unfinished, encoder, key)
        counts: dict[int, PartCounts] = {}
        for index, part in run_tasks(writer, list(enumerate(parts)), workers):
            counts[index] = part
            on_part(index, part)
        metadata = _metadata(writer, [counts[index] for index in range(len(parts))], settings)
        if encoder.folder is not None:
            # Runs copy it to the models that they export.
            (unfinished / tokenizer_files.SUBFOLDER).mkdir(exist_ok=True)
            tokenizer_files.copy(encoder.folder, unfinished / tokenizer_files.SUBFOLDER)
        metadata.write(unfinished)
        unfinished.rename(folder)
    return metadata


def _existing(folder: Path, settings: Mapping[str, str]) -> TokenMetadata:
    """Return the metadata of a folder that the same command has finished."""
    if (folder / NAME).is_file():
        metadata = TokenMetadata.read(folder, "--to")
        if metadata.settings == settings:
            return metadata
    raise ConfigError("--to", str(folder), "exists; name a new folder, or remove this one")


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Create a folder, and lock it against a second command."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            yield
    except OSError as error:
        problem = f"cannot write {error.filename or folder}: {error.strerror}"
        raise ConfigError("--to", str(folder), problem) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError("--to", str(folder), "another command is writing to it") from error
        yield
    finally:
        os.close(descriptor)


def _begin(folder: Path, settings: Mapping[str, str]) -> None:
    """Record the settings, or compare them with those of an earlier command.

    They are in the file that becomes the metadata. So there is no moment at which the folder has
    parts without the settings that they were made with.
    """
    # Left by a command that was killed.
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink()
    file = folder / NAME
    if file.exists():
        before: dict[str, str] = json.loads(file.read_bytes())["settings"]
        if different := [name for name in settings if before.get(name) != settings[name]]:
            problem = (
                f"was begun with other values of {', '.join(different)}; remove it to begin again"
            )
            raise ConfigError("--to", str(folder), problem)
    elif any(folder.iterdir()):
        problem = f"has files, but no {NAME} with their settings; remove it to begin again"
        raise ConfigError("--to", str(folder), problem)
    with replacing(file) as stream:
        stream.write(json.dumps({"settings": settings}, indent=2).encode() + b"\n")


def _metadata(
    writer: PartWriter, counts: Sequence[PartCounts], settings: Mapping[str, str]
) -> TokenMetadata:
    encoder = writer.encoder
    files = {writer.path(i).name: part.tokens for i, part in enumerate(counts) if part.tokens}
    if not files:
        raise InputError("INPUT: no document has a token; name files with text")
    for index, part in enumerate(counts):
        if not part.tokens:
            writer.path(index).unlink()
    return TokenMetadata(
        dtype=encoder.dtype,
        vocabulary_size=encoder.vocabulary_size,
        end_of_text=encoder.end_of_text,
        tokenizer=encoder.name,
        tokenizer_sha256=encoder.sha256,
        documents=sum(part.documents for part in counts),
        tokens=sum(files.values()),
        files=files,
        settings=dict(settings),
    )
