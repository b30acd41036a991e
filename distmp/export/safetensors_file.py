"""Writes a file of safetensors one tensor at a time; the library needs all of them in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from distmp.errors import CheckpointError

# Names of dtypes in the format, see https://github.com/huggingface/safetensors.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
        CheckpointError: If the format has no name for a dtype.
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
    start = 0
    for name, spec in specs.items():
        if spec.dtype not in _DTYPES:
            raise CheckpointError(f"safetensors cannot store {name!r} of type {spec.dtype}")
        stop = start + math.prod(spec.shape) * spec.itemsize
        header[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    return header
