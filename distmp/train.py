"""Command `torchrun -m distmp.train --config FILE`: trains as one rank of a job."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distmp.config import Config, RunConfig, load
from distmp.distributed.orphans import end_with_launcher
from distmp.distributed.rank_environment import RankEnvironment, adopt_ranks, is_under_torchrun
from distmp.distributed.stopping import INTERRUPTED_EXIT_CODE
from distmp.errors import DistmpError
from distmp.masking import mask_record, print_message
from distmp.process import run_process
from distmp.telemetry.rank_log import RankLog

if TYPE_CHECKING:
    from distmp.training.callbacks import Callback


def main(argv: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> int:
    """Train, and return the exit code of this rank.

    Args:
        argv: Command line without the program's name; None takes that of this process.
        callbacks: Called after those of the setting `callbacks`, see `distmp.training.callbacks`.

    Returns:
        0 after the last step; 75 after an orderly stop before it, or 130 if that was Ctrl-C; 2 for
        an invalid configuration; 3 if another rank was lost; 4 if ranks hang; 1 for any
        other failure.

    Example:
        >>> from distmp.train import main
        >>> options = "--run-dir runs/one-step --steps 1 --strategy single --log.console off"
        >>> options += " --data.path distmp --data.sequence-length 16"
        >>> options += " --batch.global-batch-size 2 --batch.microbatch-size 2"
        >>> options += " --validation.final-samples 2"
        >>> main(options.split())
        0
    """
    # An error is reported while the signals are still handled: the launcher stops this rank as soon
    # as it sees another one fail, and a SIGTERM must not end it before its message.
    with RankLog() as log, contextlib.ExitStack() as until_reported:

        def work(config: RunConfig, environment: RankEnvironment) -> int:
            from distmp.training.train_as_rank import train_as_rank

            return train_as_rank(log, callbacks, until_reported, config, environment)

        return run_as_rank(sys.argv[1:] if argv is None else argv, load, work)


def run_as_rank(
    argv: Sequence[str],
    load: Callable[[Sequence[str]], Config],
    work: Callable[[Config, RankEnvironment], int],
) -> int:
    """Load a configuration and do `work`; report an error once for all ranks.

    Args:
        argv: Command line without the program's name.
        load: Returns the configuration.
        work: Joins the other ranks and returns the exit code of this one.

    Returns:
        The exit code of this rank.
    """
    logging.getLogger("distmp").addFilter(mask_record)
    environment = RankEnvironment()
    try:
        adopt_ranks()
        environment = RankEnvironment.from_variables()
        with _quiet_except_first(environment.local_rank):
            config = load(argv)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # `distmp train --help | head`, which the command handles
        raise
    except Exception as error:  # noqa: BLE001  # reported as the cause of the run's end
        return _refuse(environment, error)
    return _run(config, environment, work)


def _refuse(environment: RankEnvironment, error: Exception) -> int:
    """Report an error in the settings, and return the exit code of this rank."""
    if environment.world_size == 1 and isinstance(error, DistmpError) and not is_under_torchrun():
        print_message(str(error))
        return error.exit_code
    from distmp.training import failures

    return failures.report(environment, error)


def _run(
    config: Config, environment: RankEnvironment, work: Callable[[Config, RankEnvironment], int]
) -> int:
    # Imported late: the help and errors in settings do not wait for torch, which takes seconds.
    from distmp.distributed.world import leave_after_error
    from distmp.training import failures

    try:
        with end_with_launcher(), _own_warnings_without_code():
            return work(config, environment)
    except KeyboardInterrupt:
        failures.report_interrupt(environment)
        return INTERRUPTED_EXIT_CODE
    except SystemExit as stop:
        # Without its peers, gloo would abort the process.
        error = RuntimeError(f"a function of this run called sys.exit({stop.code!r})")
        error.__cause__ = stop
        return failures.report(environment, error, config)
    except Exception as error:  # noqa: BLE001  # reported as the cause of the run's end
        exit_code = failures.report(environment, error, config)
        if isinstance(error, DistmpError):
            leave_after_error()
        return exit_code
    finally:
        failures.stop_watching()


@contextlib.contextmanager
def _quiet_except_first(local_rank: int) -> Iterator[None]:
    """Let only the first rank of each machine print the help and warn about settings."""
    if local_rank == 0:
        yield
        return
    logger = logging.getLogger("distmp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")):  # closed when the process ends
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _own_warnings_without_code() -> Iterator[None]:
    """Show warnings of distmp without a line of its code, and others as before."""
    usual, own = warnings.formatwarning, os.path.join(os.path.dirname(__file__), "")

    def text(message: Any, category: Any, file: str, *more: Any) -> str:
        return f"{message}\n" if file.startswith(own) else usual(message, category, file, *more)

    warnings.formatwarning = text  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = usual


if __name__ == "__main__":
    run_process(main)
