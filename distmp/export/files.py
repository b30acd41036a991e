"""Writes weights as a directory of safetensors, one tensor at a time."""

from __future__ import annotations

import glob
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from distmp.checkpoint.storage import synchronize
from distmp.errors import CheckpointError, listed
from distmp.models import huggingface_files
from distmp.models.architecture import TRANSFORMER


def in_file_order(specs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the order of a file: large elements first, so that all are aligned."""
    return dict(sorted(specs.items(), key=lambda item: -item[1].itemsize))


def write_file(file: Path, specs: Mapping[str, Tensor], values: Iterable[Tensor]) -> None:
    """Write a file of safetensors.

    Args:
        file: The file.
        specs: Shape and dtype of each tensor by name, from `in_file_order`.
        values: The tensors on the CPU, in the same order. Each is read when it is written.

    Raises:
        CheckpointError: If the format cannot store a dtype.
        OSError: If the file cannot be written.
    """
    header = json.dumps(_header(specs)).encode()
    header += b" " * (-len(header) % 8)  # aligns the first tensor
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for value in values:
            stream.write(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            del value  # before the next one is read


def _header(specs: Mapping[str, Tensor]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    try:
        empty = save({name: torch.empty(0, dtype=spec.dtype) for name, spec in specs.items()})
    except (KeyError, SafetensorError) as error:
        raise CheckpointError(f"safetensors cannot store a weight: {error}") from error
    described = json.loads(empty[8:])  # after the length of the header
    start = 0
    for name, spec in specs.items():
        stop = start + math.prod(spec.shape) * spec.itemsize
        header[name] = {
            "dtype": described[name]["dtype"],
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    return header


# The usual limit for safetensors: larger models are several files with an index.
MAX_SHARD_SIZE = 5 * 10**9
INDEX = "model.safetensors.index.json"
# Suffixes of the files in directories of weights, those of tokenizers included.
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")


class Weights(Protocol):
    """Tensors that are read when they are needed.

    Attributes:
        is_collective: Whether all ranks read each tensor together, also after an error.
    """

    is_collective: bool

    @property
    def specs(self) -> Mapping[str, Tensor]:
        """Shape and dtype of each tensor, as tensors on the meta device. A tied weight is one."""

    def read(self, name: str) -> Any:
        """Return a tensor on the CPU; None on ranks that do not write."""


def write(
    directory: Path,
    weights: Weights,
    architecture: Mapping[str, Any] | None,
    dtype: torch.dtype,
    max_shard_size: int = MAX_SHARD_SIZE,
    *,
    tokenizer: Path | None = None,
    writes: bool = True,
) -> None:
    """Write a directory of safetensors, which gets its name when it is complete.

    An existing directory of exported weights is removed just before. Takes the memory of one
    tensor. Collective over the ranks that read `weights` together.

    Args:
        directory: The directory to write.
        weights: The weights.
        architecture: Content of config.json, see `distmp.models.architecture`; None: no such file.
        dtype: Dtype of the weights, for config.json.
        max_shard_size: Maximum size of one file, in bytes; a larger tensor gets a separate file.
        tokenizer: Directory whose tokenizer is copied; None: no tokenizer.
        writes: Whether this rank writes the files.

    Raises:
        CheckpointError: On the rank that writes, if they cannot be written, or the directory holds
            other files.
    """
    files = divided(weights.specs, max_shard_size)

    def write_rest(temporary: Path) -> None:
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in weights.specs.values())},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if architecture is not None:
            is_ours = architecture.get("model_type") == TRANSFORMER
            own = {} if is_ours else {"dtype": str(dtype).removeprefix("torch.")}
            text = json.dumps({**architecture, **own}, indent=2)
            (temporary / huggingface_files.CONFIG_FILE).write_text(f"{text}\n")
        huggingface_files.copy(tokenizer, temporary)

    write_directory(directory, weights, files, write_rest, writes=writes)


def divided(specs: Mapping[str, Tensor], max_size: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file, as `huggingface_hub` divides them.

    Args:
        specs: Shape and dtype of each tensor by name.
        max_size: Maximum size of a file, in bytes; a larger tensor gets a separate file.
    """
    files: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, spec in specs.items():
        if spec.nbytes > max_size:
            files.append([name])
            continue
        if size + spec.nbytes > max_size:
            files.append(current)
            current, size = [], 0
        current.append(name)
        size += spec.nbytes
    files += [current] if current else []
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    total = len(files)
    return {f"model-{i:05}-of-{total:05}.safetensors": names for i, names in enumerate(files, 1)}


def write_directory(
    directory: Path,
    weights: Weights,
    files: Mapping[str, Sequence[str]],
    write_rest: Callable[[Path], None],
    *,
    writes: bool,
) -> None:
    """Write files of safetensors and others into a directory, which replaces one of its name.

    Collective over the ranks that read `weights` together.

    Args:
        directory: The directory.
        weights: The weights.
        files: Names of the tensors of each file.
        write_rest: Called with the unfinished directory, to write other files.
        writes: Whether this rank writes.

    Raises:
        CheckpointError: If they cannot be written, on the rank that writes them, also
            because another process has begun to write the directory.
    """
    ordered = {
        file: in_file_order({name: weights.specs[name] for name in names})
        for file, names in files.items()
    }
    values = (weights.read(name) for specs in ordered.values() for name in specs)
    try:
        if writes:
            with _replacing(directory) as temporary:
                for file, specs in ordered.items():
                    write_file(temporary / file, specs, islice(values, len(specs)))
                write_rest(temporary)
    finally:
        for _ in values if weights.is_collective else ():  # the other ranks read them, too
            pass


def _check_replaceable(directory: Path) -> None:
    """Refuse to replace what is not a directory of exported weights.

    Raises:
        CheckpointError: If the directory holds other files, such as checkpoints, or is a file.
    """
    if directory.name in ("", "..") or directory.resolve().is_mount():
        raise CheckpointError(
            f"cannot write {directory}: exported weights replace a directory, and this one is in "
            f"use or a mount point; name a new one, such as {directory}/weights"
        )
    if not directory.exists():
        return
    names = [directory.name]
    if directory.is_dir():
        names = sorted(path.name for path in directory.iterdir())
    has_weights = any(name.endswith(".safetensors") for name in names)
    others = [name for name in names if not has_weights or Path(name).suffix not in _SUFFIXES]
    if others:
        raise CheckpointError(
            f"cannot write {directory}: it holds {listed(others)}, which exported weights would "
            "replace; name a new directory"
        )


def _unused(target: Path) -> Path:
    """Return a new name for an unfinished directory."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.writing"


def _remove_unfinished(target: Path) -> None:
    """Remove what killed processes left; one that still writes fails."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.????????.writing"):
        with suppress(OSError):
            # Renamed first, because the process that writes it could give it the final name.
            shutil.rmtree(left.rename(_unused(target)), ignore_errors=True)


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """Yield a new directory that replaces `directory` at the end, and is removed after an error."""
    target = directory.resolve()  # a symbolic link stays
    temporary = _unused(target)
    replaced = target.parent / f".{target.name}.replaced"
    try:
        _check_replaceable(directory)
        exists = target.exists()
        _remove_unfinished(target)
        temporary.mkdir(parents=True)
        yield temporary
        # Without it a power failure may leave empty files under the new name.
        for path in (*temporary.iterdir(), temporary):
            synchronize(path)
        if exists:
            # Kept until the new one has its name: a removal can fail or be interrupted.
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        temporary.rename(target)
        synchronize(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        lost = isinstance(error, FileNotFoundError) and not temporary.exists()
        problem = "another process has begun to write it; name another one" if lost else error
        raise CheckpointError(f"cannot write {directory}: {problem}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
