"""`distmp export CHECKPOINT --to DIRECTORY`: export the weights of a run as safetensors."""

from __future__ import annotations

import os
import sys

from distmp.utils.settings.command_line import Parser


def main(argv: list[str]) -> int:
    """Export weights, and return the exit code.

    Raises:
        ConfigError: If an argument is invalid.
        CheckpointError: If the checkpoint cannot be read or the directory cannot be written.
    """
    parser = Parser(
        prog="distmp export",
        description="Export the weights of a checkpoint of any strategy as safetensors: for plain "
        "torch, for transformers if the model comes from there, and for model.weights of another "
        "run.",
    )
    parser.add_argument(
        "checkpoint", help="a checkpoint, or the directory of a run to export its latest one"
    )
    parser.add_argument("--to", metavar="DIRECTORY", required=True, help="a new or empty directory")
    parser.add_argument(
        "--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="dtype of the weights"
    )
    parser.add_argument(
        "--ema", action="store_true", help="export the average of the weights (setting ema)"
    )
    arguments = parser.parse_args(argv)
    # Imported late, so that errors in arguments are reported without a second of imports.
    from distmp.export.export import export

    target = os.path.expanduser(arguments.to)  # shells do not expand the ~ of --to=~/weights
    checkpoint = export(arguments.checkpoint, target, arguments.dtype, ema=arguments.ema)
    sys.stdout.write(f"exported {checkpoint} in {arguments.dtype} to {target}\n")
    return 0
