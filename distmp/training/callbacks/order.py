"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence

from distmp.training.callbacks.adapter_check import AdapterCheck
from distmp.training.callbacks.callback import Callback
from distmp.training.callbacks.checkpointing import Checkpointing
from distmp.training.callbacks.early_stopping import EarlyStopping
from distmp.training.callbacks.ema import Ema
from distmp.training.callbacks.hugging_face import HuggingFaceExport
from distmp.training.callbacks.lease_check import LeaseCheck
from distmp.training.callbacks.profiling import Profiling
from distmp.training.callbacks.rank_consistency import RankConsistency
from distmp.training.callbacks.sample import TextSample
from distmp.training.callbacks.step_logger import StepLogger
from distmp.training.callbacks.stragglers import StragglerDetection
from distmp.training.callbacks.time_limit import TimeLimit
from distmp.training.callbacks.validation import Validation
from distmp.training.run import Run


def in_order(run: Run, checkpointing: Checkpointing, users: Sequence[Callback]) -> list[Callback]:
    """Return all callbacks of a run in the order in which they are called.

    The order matters: a job that has lost its run directory writes nothing; a profile ends before
    anything else happens at the end; `StepLogger` needs what `StragglerDetection` adds to a result,
    and writes a record before a callback of the user can fail; a step is compared, validated and
    passed to the user's callbacks before it is saved, so that a checkpoint contains their changes;
    the average is updated before it is validated; the others run after the last save.
    """
    config = run.config
    ema = Ema(config.ema) if config.ema.decay > 0 else None
    return [
        LeaseCheck(run),
        Profiling(run),
        StragglerDetection(run),
        TimeLimit(run),
        StepLogger(run),
        RankConsistency(ema),
        AdapterCheck(),
        *([] if ema is None else [ema]),
        Validation(run, ema, checkpointing.writer),
        *([EarlyStopping(config, checkpointing)] if config.early_stopping.patience else []),
        *users,
        checkpointing,
        HuggingFaceExport(run.fingerprint),
        TextSample(run),
    ]
