"""`distmp data tokenize INPUT... --to FOLDER --tokenizer FOLDER`: turn text into token files."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distmp.commands.arguments import Parser, byte_size
from distmp.commands.tokenize.parts import PartCounts
from distmp.commands.tokenize.sources import FORMATS, Piece, digest, find_pieces, group
from distmp.errors import ConfigError
from distmp.utils.cgroups import granted_cores


def main(argv: list[str]) -> int:
    """Tokenize data, and return the exit code.

    Raises:
        ConfigError: If an argument is invalid.
        InputError: If a document cannot be read.
    """
    arguments = _parse(argv)
    from distmp.commands.tokenize.encoder import load_encoder
    from distmp.commands.tokenize.tokenize import tokenize

    part_bytes = byte_size("--part-size", arguments.part_size)
    pieces = find_pieces(arguments.inputs, arguments.format, part_bytes)
    parts = group(pieces, part_bytes)
    encoder = load_encoder(arguments.tokenizer, arguments.end_of_text)
    folder = Path(arguments.to).expanduser()
    settings = {
        "input": digest(pieces),
        "--tokenizer": encoder.sha256 or encoder.name,
        "--end-of-text": str(encoder.end_of_text),
        "--key": arguments.key,
        "--part-size": str(part_bytes),
    }
    with _progress(parts) as on_part:
        metadata = tokenize(
            parts, folder, encoder, arguments.key, settings, arguments.workers, on_part
        )
    sys.stdout.write(
        f"{folder}: {metadata.documents:,} documents, {metadata.tokens:,} tokens of"
        f" {metadata.dtype} in {len(metadata.files):,} files; vocabulary of"
        f" {metadata.vocabulary_size:,}, end of text {metadata.end_of_text}\n"
    )
    return 0


def _parse(argv: list[str]) -> Namespace:
    parser = Parser(prog="distmp data", description="Prepare data for training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="tokenize")
    command = commands.add_parser(
        "tokenize",
        help="turn text into token files",
        description="Turn text into a folder of token files for data.source=tokens. If the command "
        "is killed, run it again: finished parts are kept.",
    )
    command.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="+",
        help="text files (one document each), JSONL or parquet files (one per line or row), "
        "folders of them, or a folder that `datasets` saved with save_to_disk",
    )
    command.add_argument("--to", metavar="FOLDER", required=True, help="new folder for the files")
    command.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        required=True,
        help="a folder with tokenizer.json (extra `hf`), or 'bytes'",
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
    command.add_argument(
        "--part-size",
        metavar="SIZE",
        default="64MB",
        help="size of the text in one token file, such as 1GB (default: 64MB); a killed command "
        "loses at most the part of each process",
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.workers <= 1024:
        raise ConfigError("--workers", arguments.workers, "must be from 1 to 1024")
    return arguments


@contextmanager
def _progress(
    parts: Sequence[Sequence[Piece]],
) -> Iterator[Callable[[int, PartCounts], None]]:
    """Show a progress bar on a terminal; yield the function to call after each part."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    sizes = [sum(piece.size for piece in part) for part in parts]
    tokens = 0
    columns = (
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    disabled = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        task = progress.add_task("", total=sum(sizes), tokens=0)

        def on_part(index: int, counts: PartCounts) -> None:
            nonlocal tokens
            tokens += counts.tokens
            progress.update(task, advance=sizes[index], tokens=tokens)

        yield on_part
