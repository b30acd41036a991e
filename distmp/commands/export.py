"""`distmp export CHECKPOINT --to FOLDER`: export the weights of a run as safetensors."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from typing import NoReturn

from distmp.errors import ConfigError
from distmp.precision.policy import DTYPE_WORDS

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("distmp export", " ".join(sys.argv[2:]), message)


def main(argv: list[str]) -> int:
    """Export weights, and return the exit code.

    Raises:
        ConfigError: If an argument is invalid.
        CheckpointError: If the checkpoint cannot be read or the folder cannot be written.
    """
    parser = _Parser(
        prog="distmp export",
        description="Export the weights of a checkpoint of any strategy as safetensors: for plain "
        "torch, for transformers if the model comes from there, and for model.weights of another "
        "run.",
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint, or the folder of a run to export its latest one"
    )
    parser.add_argument("--to", metavar="FOLDER", required=True, help="a new folder")
    parser.add_argument(
        "--dtype", default="fp32", choices=list(DTYPE_WORDS), help="dtype of the weights"
    )
    parser.add_argument(
        "--format",
        default="own",
        choices=("own", "transformers"),
        help="transformers: write distmp's transformer as a Llama of Hugging Face transformers "
        "(default: own, the names of the model)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="maximum size of one file, such as 500MB; larger models are several files with an "
        "index (default: 5GB)",
    )
    arguments = parser.parse_args(argv)
    # Imported late, so that errors in arguments are reported without a second of imports.
    from distmp.export.export import export

    size = export(
        arguments.checkpoint,
        arguments.to,
        arguments.dtype,
        _bytes(arguments.max_shard_size),
        arguments.format,
    )
    sys.stdout.write(f"exported {size:,} elements in {arguments.dtype} to {arguments.to}\n")
    return 0


def _bytes(text: str) -> int:
    """Return a size in bytes; units are those of transformers: decimal, an upper-case B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]B)", text)
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size == 0:
        raise ConfigError("--max-shard-size", text, "use a number and KB, MB, GB or TB: 500MB")
    return size
