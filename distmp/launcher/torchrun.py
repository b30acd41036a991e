"""Parse torchrun's options: which of them the user has set, and whether torchrun accepts them."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from argparse import Namespace

from distmp.errors import ConfigError, require
from distmp.launcher.plan import UserOptions

# Options with which a user configures a rendezvous that the launcher does not manage.
_OWN_RENDEZVOUS = ("standalone", "master_addr", "master_port")
_KEPT = ("local_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
_READ = (*_OWN_RENDEZVOUS, *_KEPT, "nnodes", "nproc_per_node", "node_rank", "rdzv_conf")
# Characters of a message of torchrun that are shown: some list all options.
_SHOWN = 200


def read(arguments: list[str]) -> UserOptions:
    """Return the options that the user set on the command line or with PET_ variables.

    Args:
        arguments: torchrun's options.

    Raises:
        ConfigError: If torchrun would not accept them.
    """
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    # argparse applies defaults only to attributes that the namespace lacks, so absent options stay
    # None.
    options = parse([*arguments, "-m", "module"], arguments, Namespace(**dict.fromkeys(_READ)))
    for name in _READ:
        # A pod of Kubeflow Trainer has PET_MASTER_ADDR; `job` reads it as the first machine.
        if getattr(options, name) is None and not name.startswith("master_"):
            setattr(options, name, os.environ.get(f"PET_{name.upper()}"))
    try:
        ranks = options.nproc_per_node and determine_local_world_size(options.nproc_per_node)
        nnodes = options.nnodes and parse_min_max_nnodes(options.nnodes)
        node_rank = None if options.node_rank is None else int(options.node_rank)
    except (RuntimeError, ValueError) as error:
        raise _not_torchruns(arguments, str(error)) from None
    require(ranks is None or ranks >= 1, "--nproc-per-node", ranks, "must be at least 1")
    problem = "must be 0 for the first machine, 1 for the second and so on"
    require(node_rank is None or node_rank >= 0, "--node-rank", node_rank, problem)
    if nnodes and not 1 <= nnodes[0] <= nnodes[1]:
        raise ConfigError("--nnodes", options.nnodes, "must be N or MIN:MAX with 1 <= MIN <= MAX")
    own = [name for name in _OWN_RENDEZVOUS if getattr(options, name) is not None]
    if options.rdzv_backend not in (None, "c10d"):
        own.append("rdzv_backend")
    return UserOptions(
        arguments=tuple(arguments),
        nnodes=nnodes or None,
        ranks=ranks,
        node_rank=node_rank,
        **{name: getattr(options, name) for name in _KEPT},
        rdzv_conf=_read_conf(options.rdzv_conf),
        own_rendezvous=own[0] if own else None,
    )


def parse(
    arguments: list[str], torchrun_arguments: list[str], namespace: Namespace | None = None
) -> Namespace:
    """Parse a command line of torchrun as torchrun does.

    Args:
        arguments: Options, and the module to run.
        torchrun_arguments: The options to show in an error message.
        namespace: Values for absent options.

    Raises:
        ConfigError: If torchrun would not accept it.
        SystemExit: With code 0 if the options ask for help.
    """
    from torch.distributed.run import get_args_parser

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            options = get_args_parser().parse_args(arguments, namespace)
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        problem = messages.getvalue().strip().rpartition("error: ")[2]
        raise _not_torchruns(torchrun_arguments, problem) from None
    if not options.module:
        raise _not_torchruns(torchrun_arguments, f"{options.training_script!r} is not an option")
    return options


def check(options: Namespace, torchrun_arguments: list[str]) -> None:
    """Refuse values that torchrun would refuse with a traceback, and create its log directory.

    Args:
        options: Parsed options.
        torchrun_arguments: The options to show in an error message.

    Raises:
        ConfigError: If torchrun would not accept a value.
    """
    from torch.distributed.run import config_from_args

    try:
        config_from_args(Namespace(**vars(options)))
        os.makedirs(options.log_dir or ".", exist_ok=True)
    except (AssertionError, ValueError, OSError) as error:
        raise _not_torchruns(torchrun_arguments, str(error)) from None


def _read_conf(text: str | None) -> dict[str, str] | None:
    if not text:
        return None
    pairs = [pair.strip().partition("=") for pair in text.split(",")]
    if not all(key and separator for key, separator, _ in pairs):
        raise ConfigError("--rdzv-conf", text, "must be KEY=VALUE,KEY=VALUE,...")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _not_torchruns(torchrun_arguments: list[str], problem: str) -> ConfigError:
    variables = [f"{key}={value}" for key, value in os.environ.items() if key.startswith("PET_")]
    return ConfigError(
        "distmp launch",
        shlex.join([*variables, *torchrun_arguments]),
        f"torchrun does not accept this: {problem[:_SHOWN]}. Write torchrun's options before '--' "
        "and the run's after it: distmp launch --nproc-per-node 2 -- --config FILE",
    )
