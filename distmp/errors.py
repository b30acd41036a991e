"""Errors that a user can act on: one message with the setting, its value and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from distmp.masking import masked, masked_text

Key = TypeVar("Key")
Value = TypeVar("Value")

# Number of names in a message.
LISTED = 5
# Number of characters of a value in a message.
_SHOWN = 500
# Exit code of a rank that ends because another rank did; the other's exit code shows the cause.
LOST_PEER_EXIT_CODE = 3
# Exit code of the rank that reports hanging ranks.
HANG_EXIT_CODE = 4

# Exit code of a run that stopped before its last step and wrote a checkpoint to continue from:
# EX_TEMPFAIL of sysexits.h, "try again later". Schedulers requeue such a job.
STOPPED_EXIT_CODE = 75


class DistmpError(Exception):
    """Base class of the errors that distmp raises.

    The command line prints their message without a traceback. Other exceptions are bugs, in distmp
    or in the user's code, and keep their traceback.

    Attributes:
        exit_code: Exit code of a process that ends with this error.

    Example:
        >>> import distmp
        >>> try:
        ...     distmp.policy("fp6")
        ... except distmp.DistmpError as error:
        ...     print(error.exit_code)
        2
    """

    exit_code = 1


class ConfigError(DistmpError, ValueError):
    """An invalid setting: wrong name, type, value or combination.

    Args:
        setting: Dotted name as in the YAML file and on the command line (`optim.lr`).
        value: The value that was received.
        problem: What is wrong with the value, and what to do.

    Example:
        >>> import distmp
        >>> distmp.LossScaleConfig(growth_interval=0)
        Traceback (most recent call last):
        distmp.errors.ConfigError: precision.loss_scale.growth_interval = 0: use 1 or more steps
    """

    exit_code = 2

    def __init__(self, setting: str, value: object, problem: str) -> None:
        self.setting, self.value, self.problem = setting, value, problem
        shown = _shown(masked(value, setting))
        if len(shown) > _SHOWN:
            shown = f"{shown[: _SHOWN // 2]}...{shown[-_SHOWN // 2 :]}"
        super().__init__(f"{setting} = {shown}: {masked_text(problem)}")


def require(valid: bool, setting: str, value: object, problem: str) -> None:
    """Refuse a value that is not valid.

    Args:
        valid: Whether the value can be used.
        setting: Dotted name of the setting.
        value: The value that was received.
        problem: What is wrong with it, and what to do.

    Raises:
        ConfigError: If it is not valid.
    """
    if not valid:
        raise ConfigError(setting, value, problem)


@contextmanager
def argument_names() -> Iterator[None]:
    """Name arguments in errors that name configuration keys: `policy` for `precision.policy`."""
    try:
        yield
    except ConfigError as error:
        name = error.setting.removeprefix("precision.")
        raise ConfigError(name, error.value, error.problem) from None


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python's limit of the digits of an integer
        return "a number of thousands of digits"


class SetupError(DistmpError):
    """An error of some ranks at startup, raised on every rank.

    Args:
        messages: The message of each rank that failed, by rank.
        exit_code: Exit code of the process.

    Example:
        >>> from distmp.errors import SetupError
        >>> str(SetupError({1: "no file data.bin", 3: "no file data.bin"}, exit_code=2))
        'no file data.bin'
    """

    def __init__(self, messages: dict[int, str], exit_code: int) -> None:
        self.exit_code = exit_code
        by_message = keys_by_value(messages)
        named = [f"{rank_names(ranks)}: {text}" for text, ranks in by_message.items()]
        super().__init__("; ".join(named if len(named) > 1 else by_message))


class CheckpointError(DistmpError, RuntimeError):
    """A checkpoint that cannot be written or read; raised on every rank.

    Example:
        >>> from pathlib import Path
        >>> from distmp.checkpoint.loading import StoredCheckpoint
        >>> try:
        ...     StoredCheckpoint(Path("nowhere")).load({})
        ... except CheckpointError as error:
        ...     print(error)
        nowhere cannot be used: nowhere/state.json is missing
    """


class TrainingError(DistmpError, RuntimeError):
    """Training cannot continue; raised on every rank in the same step.

    Example:
        >>> import torch, distmp
        >>> parameter = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([parameter], lr=1.0)
        >>> scaler = distmp.DistributedGradScaler("cpu", init_scale=1.0, optimizers=[optimizer])
        >>> scaler.scale(parameter * torch.inf).backward()
        >>> _ = scaler.step(optimizer)
        >>> try:
        ...     scaler.update()
        ... except TrainingError:
        ...     print("overflow at the minimum loss scale")
        overflow at the minimum loss scale
    """


class LostPeerError(TrainingError):
    """Another rank has ended, so this rank cannot continue; the other rank reports the cause.

    Example:
        >>> from distmp.errors import LostPeerError, TrainingError
        >>> issubclass(LostPeerError, TrainingError)
        True
    """

    exit_code = LOST_PEER_EXIT_CODE


def listed(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, and the number of remaining ones."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def keys_by_value(values: Mapping[Key, Value]) -> dict[Value, list[Key]]:
    """Group keys, such as ranks, by their value; both keep the order of `values`."""
    keys: dict[Value, list[Key]] = {}
    for key, value in values.items():
        keys.setdefault(value, []).append(key)
    return keys


def rank_names(ranks: Collection[int]) -> str:
    """Return ascending ranks as text: "rank 5" or "ranks 0-3, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def brief(value: object) -> object:
    """Return a number or text as it is, and the type of anything else, such as a dataset."""
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def closest(name: object, choices: Iterable[str]) -> str | None:
    """Return the choice closest to `name`, whatever its case, or None if none is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(str(name).lower(), [each.lower() for each in choices], n=1)
    differ_in_case = [each for each in choices if [each.lower()] == close]
    return next(iter(difflib.get_close_matches(str(name), differ_in_case, n=1, cutoff=0)), None)


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the choice closest to `name`, or "" if none is close."""
    best = closest(name, choices)
    return f"did you mean {best!r}?" if best else ""


def nearest(name: object, choices: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the choice closest to `name`, or the list of choices."""
    choices = sorted(choices)
    return did_you_mean(name, choices) or f"choose one of {', '.join(choices)}"


class DataError(DistmpError, RuntimeError):
    """A sample cannot be read: its file is missing, has changed or holds impossible values.

    Args:
        message: The only argument, so that the error can be pickled in a worker of the loader. The
            loader adds a traceback before it, which is removed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())
