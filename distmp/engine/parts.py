"""What the methods of an engine share: its parts, and the guard of calls that all ranks make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from distmp.data.dataloader import step_of
from distmp.data.streams import StreamMicrobatches
from distmp.distributed import comparison
from distmp.distributed.failing_together import explain_lost_peers
from distmp.distributed.roll_call import RollCall
from distmp.distributed.world import World
from distmp.engine.digests import describe
from distmp.engine.likely_mistakes import EvaluationMode
from distmp.engine.setup import EngineSetup
from distmp.engine.state import EngineState
from distmp.errors import TrainingError
from distmp.precision.builders import autocast_off

WRITES = "writes to weights (engine.publish_weights() on every rank accepts equal values)"

_numbers = itertools.count(1)


class EngineCalls:
    """Guards the public methods of an engine that all ranks call together.

    Args:
        world: The ranks.
        model: The model of the engine; calls of its `load_state_dict` are counted.
        optimizer: The optimizer of the engine; the same.

    Attributes:
        number: Number of the engine, from 1, among the multi-rank engines of this process; 0 for an
            engine of a single process. Ranks compare it to detect calls of different engines.
        counts: Number of calls on this rank of each method that changes the training state. Ranks
            compare these numbers in every step.
        steps_ahead: How many more steps the `DataLoader` of the latest microbatches has yielded
            than `Engine.step` was called. Ranks compare it too: a rank that leaves out a call
            makes as many calls as the others until they end, each with later microbatches.
        source: `StreamMicrobatches.source` of the latest microbatches, which ranks compare, too.
        is_last: Whether the current or latest call has begun the last microbatch of a step, in
            which gradients are reduced.
        weights: Digest of each replicated weight before the first step, by name; ranks compare
            them in that step.
    """

    def __init__(self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loads = ("engine", "model", "optimizer")
        self.counts = {"engine.step": 0, **{f"{name}.load_state_dict": 0 for name in loads}}
        self.steps_ahead = 0
        self.source = ""
        self.is_last = False
        self.weights: dict[str, str] = {}
        self.number = 0 if world.group is None else next(_numbers)
        self._of_which = f" of engine {self.number}" if self.number > 1 else ""
        self._world = world
        self._roll_call = RollCall(world)
        self._current = ""
        self._failures = 0
        self._failure: BaseException | None = None
        count = partial(_count, self.counts)
        model.register_load_state_dict_post_hook(partial(count, "model"))
        optimizer.register_load_state_dict_post_hook(partial(count, "optimizer"))

    @contextmanager
    def call(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Make a call that all ranks make together.

        Args:
            name: Name of the method.
            waits: Wait until all ranks have made the call.

        Raises:
            TrainingError: Inside another call; after a call that failed on some ranks only; or if
                another rank makes a different call.
            LostPeerError: If another rank has ended or does not answer.
        """
        if self._current:
            raise TrainingError(
                f"engine.{name}() was called inside of engine.{self._current}(), for example by "
                "the loss function; call it after that has returned"
            )
        self._current = name
        try:
            with (
                explain_lost_peers(self._world.group, f"engine.{name}()"),
                autocast_off(self._world.device),
            ):
                if self._failure is not None:
                    reached = f"{self._failures} {self.is_last}"
                    self._roll_call.check_failed_everywhere(reached, self._failure)
                    self._failure = None
                self.is_last = False
                meet = self._roll_call.wait_for_all if waits else self._roll_call.count
                meet(f"engine.{name}(){self._of_which}")
                yield
        except BaseException as error:
            self._failure = self._failure or error
            self._failures += 1
            self._roll_call.explain_timeout(error)
            raise
        finally:
            self._current = ""

    def count_step(self, microbatches: object) -> None:
        """Count a step on microbatches, which ranks that have none may have built themselves."""
        self.counts["engine.step"] += 1
        self.source = microbatches.source if isinstance(microbatches, StreamMicrobatches) else ""
        if (step := step_of(microbatches)) is not None:
            self.steps_ahead = step - self.counts["engine.step"]

    def count(self, name: str) -> None:
        """Count a call that does not wait for other ranks."""
        self._roll_call.count(f"engine.{name}(){self._of_which}")


def _count(counts: dict[str, int], loaded: str, *_: object) -> None:
    """Count a state that was loaded; the hook holds no reference to the engine."""
    counts[f"{loaded}.load_state_dict"] += 1


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that its methods share.

    Attributes:
        setup: What is built once: the model, its strategy and its optimizer.
        state: The numbers that steps change.
        calls: The calls that the ranks make together.
        modes: Which parts of the model are in evaluation mode.
        parameters: All parameters of the model, in order; each step checks that they are the same.
    """

    setup: EngineSetup
    state: EngineState
    calls: EngineCalls
    modes: EvaluationMode
    parameters: list[nn.Parameter]

    def step_settings(self) -> object:
        """Return the settings of a step, without values of the device; () on a single rank."""
        updates = self.setup.updates
        if self.setup.world.world_size == 1:
            return ()
        return (
            self.calls.number,
            self.calls.counts,
            self.calls.steps_ahead,
            self.calls.source,
            self.calls.weights if self.calls.counts["engine.step"] == 1 else (),
            self.state.max_norm,
            self.state.nominal_weight,
            comparison.hyperparameters(updates.optimizer),
            updates.learning_rates.planned(updates.max_applied),
            [parameter.requires_grad for parameter in self.parameters],
            self.modes.evaluating(),
            self.setup.buffers.shapes(),
            updates.tensors.writes(),
        )

    def weights(self) -> dict[str, str]:
        """Return digests of the replicated weights as text by name; the host waits."""
        module, device = self.setup.strategy.module, self.setup.world.device
        found = describe(module, self.state.weights(), device)
        return {f"values of {name}": text for name, text in found.items()}

    def accept_equal_writes(self) -> None:
        """Reset the number of writes to weights, whose values have to be equal on all ranks.

        Raises:
            ConfigError: On all ranks, naming the first weight that differs.
        """
        comparison.check_same(self.setup.world.group, self.setup.world.device, self.weights())
        self.setup.updates.tensors.forget_writes()

    def raise_difference(self) -> None:
        """Raise because ranks took a step with different settings; every rank has to call it.

        Raises:
            ConfigError: On all ranks, naming a setting.
        """
        with explain_lost_peers(self.setup.world.group):
            comparison.raise_difference(self.setup.world.group, self._described())

    def _described(self) -> dict[str, str]:
        """Return the settings as text by name, for a comparison between ranks."""
        updates = self.setup.updates
        calls = self.calls.counts["engine.step"]
        step = calls + self.calls.steps_ahead
        return {
            "engine": str(self.calls.number),
            "microbatches of engine.step": f"step {step} of the DataLoader in call {calls}",
            "dataset": self.calls.source,
            "max_norm": repr(self.state.max_norm),
            "nominal_weight": repr(self.state.nominal_weight),
            **comparison.describe_param_groups(updates.optimizer),
            "schedule": repr(updates.learning_rates.planned(updates.max_applied)),
            "modules in evaluation mode": ", ".join(self.modes.evaluating()),
            **comparison.describe_model(self.setup.strategy.module),
            **self.calls.weights,
            **{f"calls of {name}": str(count) for name, count in self.calls.counts.items()},
            WRITES: str(updates.tensors.writes()),
        }
