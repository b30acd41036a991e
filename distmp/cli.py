"""The `distmp` command and the table of its subcommands."""

from __future__ import annotations

import errno
import importlib
import platform
import signal
import sys
from importlib import metadata
from typing import NoReturn, cast

from distmp import __version__
from distmp.distributed.stopping import exit_on_stop_signals
from distmp.errors import DistmpError, nearest
from distmp.masking import masked_text
from distmp.process import run_process
from distmp.telemetry.console import discard
from distmp.utils.units import text_table

# Name: module with `main(argv) -> int`, imported when the subcommand runs; help text.
_SUBCOMMANDS = {
    "train": ("distmp.train", "train in this process; under torchrun, as one rank of many"),
    "calibrate": (
        "distmp.commands.calibrate.command",
        "compare precision policies on your run, with the loss scale of float16",
    ),
    "explain": (
        "distmp.commands.explain.command",
        "print types, communication and memory of a run before it starts",
    ),
    "data": ("distmp.commands.tokenize", "turn text into token files: data tokenize"),
    "export": ("distmp.commands.export", "export the weights of a checkpoint to other formats"),
    "report": ("distmp.commands.report", "write an HTML page about one run, or two side by side"),
    "presets": ("distmp.commands.presets", "list the configurations that come with distmp"),
    "doctor": ("distmp.commands.doctor", "check whether this machine is ready to train"),
    "launch": ("distmp.launcher.command", "start the ranks of a run, on one machine or many"),
}
# Subcommands that a scheduler starts, stops and restarts.
_JOBS = ("train", "launch")


def run() -> NoReturn:
    """Run the `distmp` command and exit."""
    if sys.argv[1:2] and sys.argv[1] in _JOBS:
        exit_on_stop_signals()
    run_process(_run_command)


def _run_command() -> int:
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # `distmp launch -- --help | head` closes the pipe. The interpreter's last flush must not
        # fail as well.
        discard(sys.stdout)
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE
        sys.stderr.write(f"distmp: the output cannot be written ({error.strerror})\n")
        return 1


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return the exit code of the process.

    Errors that the user can act on are printed as one message; all others keep their traceback.
    """
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        sys.stdout.write(_help())
        return 0 if arguments else 2
    if name == "--version":
        sys.stdout.write(_version())
        return 0
    if name not in _SUBCOMMANDS:
        sys.stderr.write(f"distmp: no subcommand {name!r}; {nearest(name, _SUBCOMMANDS)}\n")
        return 2
    return _run(name, arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(_SUBCOMMANDS[name][0])
        return cast("int", module.main(arguments))
    except DistmpError as error:
        sys.stderr.write(f"distmp {name}: {masked_text(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _help() -> str:
    rows = [(name, purpose) for name, (_, purpose) in _SUBCOMMANDS.items()]
    return (
        "usage: distmp SUBCOMMAND [OPTIONS]\n\n"
        + "".join(f"  {line}\n" for line in text_table(rows))
        + "\n`distmp SUBCOMMAND --help` lists its options; `distmp --version` prints versions.\n"
    )


def _version() -> str:
    torch = metadata.version("torch")
    return f"distmp {__version__}, torch {torch}, Python {platform.python_version()}\n"
