"""`distmp export CHECKPOINT --to FOLDER`: the weights of a run as safetensors, for others."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import NoReturn

from distmp.errors import ConfigError
from distmp.precision.policy import DTYPE_WORDS


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("distmp export", " ".join(sys.argv[2:]), message)


def main(argv: list[str]) -> int:
    """Export weights, and return the exit code.

    Raises:
        ConfigError: If an argument is wrong.
        CheckpointError: If the checkpoint cannot be read or the folder not be written.
    """
    parser = _Parser(
        prog="distmp export",
        description="Write the weights in a checkpoint as safetensors, whatever strategy trained "
        "them: for plain torch, for transformers where the model is theirs, and for model.weights "
        "of another run.",
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint, or the folder of a run: its latest is taken"
    )
    parser.add_argument("--to", metavar="FOLDER", required=True, help="a new folder")
    parser.add_argument(
        "--dtype", default="fp32", choices=list(DTYPE_WORDS), help="type of the weights"
    )
    arguments = parser.parse_args(argv)
    # Imported here: a mistake is told without a second of imports.
    from distmp.export.export import export

    size = export(arguments.checkpoint, arguments.to, arguments.dtype)
    sys.stdout.write(f"{size:,} numbers in {arguments.dtype}: {arguments.to}\n")
    return 0
