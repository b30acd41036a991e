"""Warns about adapters that are not trained, after the first step of a run."""

from __future__ import annotations

from distmp.engine.state import UNUSED
from distmp.errors import listed
from distmp.models.adapters import is_adapter
from distmp.training.callbacks.callback import Callback, StepResult, TrainingLoop


class AdapterCheck(Callback):
    """Prints the adapters without a gradient: a model may read a weight without its layer."""

    def __init__(self) -> None:
        self._is_done = False

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Look for them in the first step that is applied."""
        if self._is_done or result.numbers.skipped or trainer.config.model.peft is None:
            return
        self._is_done = True
        names = [name for name in trainer.engine.state_dict() if name.startswith(UNUSED)]
        unused = [name.removeprefix(UNUSED) for name in names if is_adapter(name)]
        if unused:
            trainer.console.message(
                f"model.peft: {len(unused)} parameters of adapters have had no gradient, "
                f"{listed(unused)}; if the model reads the weight of a layer instead of calling "
                "it, leave the layer out of target_modules"
            )
