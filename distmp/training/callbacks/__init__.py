"""The features of a training run, as callbacks of the loop; `Callback` is the protocol.

A built-in callback is one file here; `order` lists them in the order in which they are called.
"""

from distmp.training.callbacks.callback import (
    Callback,
    PendingStep,
    Rollback,
    StepResult,
    TrainingLoop,
)

__all__ = ["Callback", "PendingStep", "Rollback", "StepResult", "TrainingLoop"]
