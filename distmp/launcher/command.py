"""The `distmp launch` command."""

from __future__ import annotations

import sys

from distmp.config import load
from distmp.errors import ConfigError
from distmp.launcher.job_files import is_asked, render
from distmp.launcher.local import launch

_HELP = """\
usage: distmp launch [OPTIONS OF torchrun] [-- OPTIONS OF distmp train]

Check the run's configuration, then train on all CUDA devices of this machine
(on two CPU ranks where there is none).

  distmp launch -- --config configs/x.yaml --optim.lr 3e-4
  distmp launch --nproc-per-node 4 -- --config configs/x.yaml

`torchrun --help` and `distmp train --help` list the options of each side.
"""


def main(argv: list[str]) -> int:
    """Launch a run: torchrun's options stand before `--`, the run's behind it.

    Returns:
        The exit code; see `distmp.launcher.local.launch`.

    Raises:
        ConfigError: If an option or the configuration is wrong.
    """
    if argv[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_HELP)
        return 0
    torchrun_arguments, train_arguments = split(argv)
    if is_asked(torchrun_arguments):
        load(train_arguments)
        sys.stdout.write(render(torchrun_arguments, train_arguments))
        return 0
    return launch(torchrun_arguments, train_arguments)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first `--`.

    Raises:
        ConfigError: If there is none although some of the arguments are the run's.
    """
    if "--" in argv:
        index = argv.index("--")
        return argv[:index], argv[index + 1 :]
    if any(word.partition("=")[0] == "--config" for word in argv):
        raise ConfigError(
            "distmp launch",
            " ".join(argv),
            "write '--' before the options of the run: distmp launch -- --config FILE",
        )
    return argv, []
