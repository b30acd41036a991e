"""What all ranks must have in common in a step, compared in the step's one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from distmp.distributed.compare_ranks import (
    describe_model,
    describe_param_groups,
    hyperparameters,
    raise_difference,
)
from distmp.distributed.lost_peers import explain_lost_peers
from distmp.engine.calls import EngineCalls
from distmp.engine.observers import EvaluationMode
from distmp.engine.setup import Setup
from distmp.engine.state import EngineState


@dataclass(frozen=True)
class StepSettings:
    """The settings of a step on this rank.

    Attributes:
        setup: The model, its strategy and its optimizer.
        state: The numbers of the engine.
        calls: The calls that the ranks make together.
        modes: Which parts of the model are in evaluation mode.
    """

    setup: Setup
    state: EngineState
    calls: EngineCalls
    modes: EvaluationMode

    def of_step(self) -> object:
        """Return the settings, without values of the device; () on a single rank."""
        updates = self.setup.updates
        if self.setup.world.world_size == 1:
            return ()
        return (
            self.calls.number,
            self.calls.counts,
            self.state.max_norm,
            self.state.nominal_weight,
            hyperparameters(updates.optimizer),
            updates.learning_rates.planned(updates.max_applied),
            [parameter.requires_grad for parameter in self.setup.strategy.model.parameters()],
            self.modes.evaluating(),
        )

    def raise_difference(self) -> None:
        """Raise because ranks took a step with different settings; every rank has to call it.

        Raises:
            ConfigError: On all ranks, naming a setting.
        """
        with explain_lost_peers(self.setup.world.group):
            raise_difference(self.setup.world.group, self._described())

    def _described(self) -> dict[str, str]:
        """Return the settings as text by name, for a comparison between ranks."""
        updates = self.setup.updates
        return {
            "engine": str(self.calls.number),
            "max_norm": repr(self.state.max_norm),
            "nominal_weight": repr(self.state.nominal_weight),
            **describe_param_groups(updates.optimizer),
            "schedule": repr(updates.learning_rates.planned(updates.max_applied)),
            "modules in evaluation mode": ", ".join(self.modes.evaluating()),
            **describe_model(self.setup.strategy.model),
            **{f"calls of {name}": str(count) for name, count in self.calls.counts.items()},
        }
