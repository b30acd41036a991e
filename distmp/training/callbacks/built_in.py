"""The built-in callbacks, in the order in which they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.training.callbacks.callback import Callback
from distmp.training.callbacks.checkpointing import Checkpointing
from distmp.training.callbacks.curves import Curves
from distmp.training.callbacks.hugging_face import HuggingFaceExport
from distmp.training.callbacks.profiling import Profiling
from distmp.training.callbacks.rank_consistency import RankConsistency
from distmp.training.callbacks.sample import TextSample
from distmp.training.callbacks.step_logger import StepLogger
from distmp.training.callbacks.stragglers import StragglerDetection
from distmp.training.callbacks.time_limit import TimeLimit
from distmp.training.callbacks.validation import Validation

if TYPE_CHECKING:
    from distmp.training.build import Run


def built_in_callbacks(run: Run, checkpointing: Checkpointing) -> list[Callback]:
    """Return the callbacks of every run.

    The order matters: a profile ends before anything else happens at the end; the time of a step
    counts before a validation asks whether to stop; weights are compared and validated before they
    are saved; the log reads what `StragglerDetection` adds to a result, and is closed last.
    """
    return [
        Profiling(run),
        StragglerDetection(run),
        TimeLimit(run),
        RankConsistency(),
        Validation(),
        checkpointing,
        HuggingFaceExport(),
        TextSample(),
        Curves(),
        StepLogger(run),
    ]
