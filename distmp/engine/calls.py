"""Checks that all ranks make the same calls of an engine in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from distmp.distributed.rank_monitor import explain_lost_peers
from distmp.distributed.roll_call import RollCall
from distmp.distributed.world import World
from distmp.errors import TrainingError
from distmp.precision.builders import autocast_off

_numbers = itertools.count(1)


class EngineCalls:
    """Guards the public methods of an engine that all ranks call together.

    Args:
        world: The ranks.
        model: The model of the engine; calls of its `load_state_dict` are counted.

    Attributes:
        number: Number of the engine among those of several ranks in this process, from 1; 0 for an
            engine of a single process. Ranks compare it, since two engines may be of one kind.
        counts: Number of calls on this rank of each method that changes the training state. Ranks
            compare these numbers in every step.
    """

    def __init__(self, world: World, model: nn.Module) -> None:
        self.counts = {"engine.step": 0, "engine.load_state_dict": 0, "model.load_state_dict": 0}
        self.number = 0 if world.group is None else next(_numbers)
        self._of_which = f" of engine {self.number}" if self.number > 1 else ""
        self._world = world
        self._roll_call = RollCall(world)
        self._current = ""
        self._failures = 0
        self._failure: BaseException | None = None
        model.register_load_state_dict_post_hook(partial(_count, self.counts))

    @contextmanager
    def call(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Make a call that all ranks make together.

        Args:
            name: Name of the method.
            waits: Wait until all ranks have made the call.

        Raises:
            TrainingError: Inside of another call; after a call that did not fail on all ranks; and
                if another rank makes a different call.
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
                    self._roll_call.check_failed_everywhere(self._failures, self._failure)
                    self._failure = None
                if waits:
                    self._roll_call.wait_for_all(f"engine.{name}(){self._of_which}")
                else:
                    self._roll_call.count(f"engine.{name}(){self._of_which}")
                yield
        except BaseException as error:
            self._failure = error
            self._failures += 1
            raise
        finally:
            self._current = ""

    def count(self, name: str) -> None:
        """Count a call that does not wait for other ranks."""
        self._roll_call.count(f"engine.{name}(){self._of_which}")


def _count(counts: dict[str, int], module: nn.Module, keys: object) -> None:
    """Count a state loaded into a model; the hook holds no reference to the engine."""
    counts["model.load_state_dict"] += 1
