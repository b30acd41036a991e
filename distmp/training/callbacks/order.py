"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from distmp.config import find_callback
from distmp.data.streams import length_of
from distmp.errors import ConfigError, brief, nearest, require
from distmp.training.callbacks import checks
from distmp.training.callbacks.callback import Callback
from distmp.training.callbacks.checkpointing import Checkpointing
from distmp.training.callbacks.profiling import Profiling
from distmp.training.callbacks.step_logger import StepLogger
from distmp.training.callbacks.stopping import EarlyStopping, TimeLimit
from distmp.training.callbacks.stragglers import StragglerDetection
from distmp.training.callbacks.validation import Ema, Validation
from distmp.training.run import Run
from distmp.utils.imports import Entry


def in_order(run: Run, checkpointing: Checkpointing, users: Sequence[Callback]) -> list[Callback]:
    """Return all callbacks of a run in the order in which they are called.

    The order matters: a job that has lost its run directory writes nothing; a profile ends before
    anything else happens at the end; `StepLogger` needs what `StragglerDetection` adds to a result,
    and writes a record before a callback of the user can fail; a step is compared, validated and
    passed to the user's callbacks before it is saved, so that a checkpoint contains their changes;
    the average is updated before it is validated. The last step is validated after its save.
    """
    config = run.config
    ema = Ema(config.ema) if config.ema.decay > 0 else None
    patience = config.early_stopping.patience
    held_out = length_of(run.model_and_data.datasets.validation)
    return [
        checks.LeaseCheck(),
        Profiling(run),
        StragglerDetection(run),
        *([] if config.max_minutes is None else [TimeLimit(config.max_minutes)]),
        StepLogger(run),
        checks.RankConsistency(ema),
        checks.AdapterCheck(),
        *([] if ema is None else [ema]),
        Validation(run, ema, checkpointing.writer),
        *([EarlyStopping(config, checkpointing, held_out)] if patience else []),
        *users,
        checkpointing,
    ]


def load_callbacks(entries: Sequence[Entry]) -> list[Callback]:
    """Build the callbacks of the setting `callbacks`; `check_hooks` refuses other objects."""
    return [find_callback(entry)(**entry.options) for entry in entries]


def check_hooks(callbacks: Iterable[Callback]) -> None:
    """Refuse hooks that do not exist, or do not take the arguments that they are called with.

    Raises:
        ConfigError: Naming the first one, such as a hook of an earlier version.
    """
    for callback in callbacks:
        name = getattr(callback, "__name__", brief(callback))  # without an address
        problem = "is no distmp.training.callbacks.Callback; give an object of a subclass"
        require(isinstance(callback, Callback), "callbacks", name, problem)
        _check_names(callback)
        for name, function in vars(Callback).items():
            hook = getattr(callback, name)
            if name.startswith("_") or getattr(hook, "__func__", None) is function:
                continue
            parameters = [*inspect.signature(function).parameters.values()][1:]
            positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
            keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
            try:
                inspect.signature(hook).bind(*positional, **keywords)
            except TypeError:
                listed = ", ".join(parameter.name for parameter in parameters)
                problem = f"its {name} has other parameters; define {name}(self, {listed})"
                raise ConfigError("callbacks", type(callback).__name__, problem) from None


def _check_names(callback: Callback) -> None:
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks:
            raise ConfigError(
                "callbacks",
                type(callback).__name__,
                f"its {name} is not a hook, so it would never be called: {nearest(name, hooks)}; "
                "give a method of your own another name",
            )
