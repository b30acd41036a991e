"""The `distmp launch` command."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from dataclasses import replace

from distmp.errors import ConfigError, require
from distmp.launcher.job import ENVIRONMENTS
from distmp.launcher.local import launch
from distmp.launcher.network import Network
from distmp.utils.settings.command_line import Parser

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_HELP = """\
usage: distmp launch [OPTIONS] [OPTIONS OF torchrun] [-- OPTIONS OF distmp train]

Check the run's configuration, find out on which machines this job runs, and train on all
CUDA devices of each (on two CPU ranks where there is none).

  distmp launch -- --config preset:quickstart --optim.lr 3e-4
  distmp launch --nproc-per-node 4 -- --config FILE
  distmp launch -- --config FILE --preflight only   (only compare and measure the ranks)
  distmp launch --hosts node1,node2 -- --config FILE

{options}
`torchrun --help` and `distmp train --help` list the options of each side.
"""


def main(argv: list[str]) -> int:
    """Launch a run: torchrun's options come before `--`, the run's options after it.

    Returns:
        The exit code; see `distmp.launcher.local.launch`.

    Raises:
        ConfigError: If an option or the configuration is wrong.
        AddressError: If the first of several machines has no address.
    """
    before, train_arguments = split(argv)
    if before[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_HELP.format(options=_parser().format_help().partition("\n\n")[2]))
        return 0
    own, torchrun_arguments = _parser().parse_known_args(before)
    _check(train_arguments)
    if own.follow_stdin:
        from distmp.launcher.hosts import follow_stdin

        follow_stdin()
    if own.hosts is not None:
        return _launch_on_hosts(own, torchrun_arguments, train_arguments)
    return launch(
        torchrun_arguments,
        "distmp.train",
        train_arguments,
        dry_run=own.dry_run,
        environment=own.environment,
        port=own.port,
    )


def _import_torch_quietly() -> None:
    """Silence the warnings of torch's sockets, which include C++ stacks, in this process.

    torch reads the variable when it is imported. Ranks inherit its original value.
    """
    if _LOG_LEVEL in os.environ:
        return
    os.environ[_LOG_LEVEL] = "ERROR"
    try:
        importlib.import_module("torch")
    finally:
        del os.environ[_LOG_LEVEL]


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first `--`.

    Raises:
        ConfigError: If there is no `--` although some arguments belong to the run.
    """
    if "--" in argv:
        index = argv.index("--")
        return argv[:index], argv[index + 1 :]
    names_config = any(word.partition("=")[0] == "--config" for word in argv)
    hint = "write '--' before the options of the run: distmp launch -- --config FILE"
    require(not names_config, "distmp launch", " ".join(argv), hint)
    return argv, []


def _parser() -> argparse.ArgumentParser:
    parser = Parser("distmp launch", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print this machine's command and environment, with a reason for each value",
    )
    parser.add_argument(
        "--environment",
        choices=ENVIRONMENTS,
        help="where the machines of the run are read from (default: detected)",
    )
    parser.add_argument(
        "--hosts",
        metavar="FILE|HOST,HOST,...",
        help="start the run on these machines over ssh; they need the same paths",
    )
    parser.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="ssh command, such as 'ssh -p 2222'"
    )
    parser.add_argument(
        "--port",
        type=_port,
        help="rendezvous port of the first machine (default: derived from the job's name)",
    )
    # Set by --hosts for its agents.
    parser.add_argument("--follow-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _ssh(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError("--ssh", text, f"is not a command ({error})") from None
    require(len(words) > 0, "--ssh", text, "name a command, such as 'ssh -p 2222'")
    return words


def _check(train_arguments: list[str]) -> None:
    """Refuse an invalid configuration before any process starts, if possible without torch."""
    from distmp.config import RunConfig

    config = RunConfig.read(train_arguments)
    _import_torch_quietly()
    config.check_names()


def _launch_on_hosts(
    own: argparse.Namespace, torchrun_arguments: list[str], train_arguments: list[str]
) -> int:
    from distmp.launcher.hosts import plan_hosts, read_hosts, run_on_hosts
    from distmp.launcher.torchrun import read

    problem = "has no effect with --hosts, which names the machines; leave it out"
    require(own.environment is None, "--environment", own.environment, problem)
    plan = plan_hosts(
        read_hosts(own.hosts),
        _ssh(own.ssh),
        replace(read(torchrun_arguments), port=own.port),
        train_arguments,
        Network.of_this_machine(),
        os.environ,
    )
    if own.dry_run:
        sys.stdout.write(plan.describe())
        return 0
    return run_on_hosts(plan)
