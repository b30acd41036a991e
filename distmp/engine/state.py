"""Saves and loads the state of an engine, under flat names.

Names begin with `model/`, `optimizer/`, `loss_scale/`, `divergence/`, `group/`, `low_precision/`,
`unused/` or `engine/`.

Loading has two parts: `prepare` creates the live tensors that a stored state has, and `finish`
updates the values derived from them. In between, a checkpoint or `Engine.load_state_dict` fills the
live tensors in place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World
from distmp.engine.divergence_guard import DivergenceGuard
from distmp.engine.settings import PHASES
from distmp.engine.setup import EngineSetup
from distmp.engine.updates import RATE
from distmp.errors import CheckpointError, listed
from distmp.optim.state import (
    check_complete,
    check_shapes,
    create_state,
    named_state,
    never_updated,
    prepare_for_device_skip,
    restore_numbers,
    state_keys,
)
from distmp.scaling.loss_scale import LossScale
from distmp.scaling.settings import loss_scale_rules
from distmp.utils.flat_shard import global_shape
from distmp.utils.tensor_trees import set_extra_state, under


def agree_on_nominal_weight(
    batch_weight: Tensor | float, microbatches: int, world: World, *, reproducible: bool
) -> float | None:
    """Return the nominal weight of a run, from the first microbatch of each rank.

    Args:
        batch_weight: Weight of the first microbatch of this rank.
        microbatches: Number of microbatches on each rank.
        world: The ranks, all of which have to call this.
        reproducible: Whether it must not depend on the number of ranks.

    Returns:
        The sum of the weights, rounded up to a power of two; None if it is not a finite number
        above 0.
    """
    weight = torch.zeros((), dtype=torch.float64, device=world.device) + batch_weight
    weight *= microbatches
    if reproducible:
        # The first microbatch of the global batch is on rank 0 for any number of ranks.
        weight = weight * world.world_size if world.rank == 0 else weight.zero_()
    if world.group is not None:
        dist.all_reduce(weight, group=world.group)
    total = weight.item()
    return round_up_to_power_of_two(total) if 0 < total < math.inf else None


def round_up_to_power_of_two(weight: float) -> float:
    """Round up to a power of two; dividing the loss by it is exact."""
    return 2.0 ** math.ceil(math.log2(weight))


logger = logging.getLogger("distmp")

# Prefix of the names under which a state lists the parameters that no rank has ever used.
UNUSED = "unused/"

# Prefix of the names of numbers in parameter groups.
GROUP = "group/"

# Name of the number of tokens that `precision.phases` needs.
TOKENS = "low_precision/tokens"


# Shape and dtype of a stored tensor.
TensorSpec = tuple[torch.Size, torch.dtype]


class EngineState:
    """The numbers that steps change, and the state of an engine as live tensors by flat name.

    Args:
        setup: The model, the strategy and the optimizer.

    Attributes:
        loss_scale: The loss scale.
        divergence: Compares loss and norm of each step with those of the steps before it.
        counts: int64 of shape (3,): updates applied, steps skipped, and steps skipped since the
            last update. Updated in place.
        counting: FP32 of shape (2, 3). With 0 for an applied step and 1 for a skipped one, where it
            differs from the first row counts are kept, and where from the second, 1 is added.
        nominal_weight: The constant that keeps gradients at the magnitude of a mean; None before
            the first step.
        max_norm: Clip the norm of the global gradient to this; None disables clipping. Not saved.
        seed: Determines the random numbers of every step, together with `steps`.
        steps: Number of steps taken, skipped ones included, as the host counts them.
    """

    def __init__(self, setup: EngineSetup) -> None:
        config = setup.config
        self._is_quiet = setup.world.rank != 0
        self._strategy = setup.strategy
        self._updates = setup.updates
        self._products = setup.low_precision_matmuls
        rules = loss_scale_rules(setup.policy.loss_scale, config.loss_scale)
        self.loss_scale = LossScale(rules, setup.device)
        self.divergence = DivergenceGuard(config.divergence, setup.device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=setup.device)
        self.counting = torch.tensor([[2.0, 2, 0], [1, 0, 0]]).to(setup.device)
        weight = config.nominal_weight
        self._configured_weight = weight and round_up_to_power_of_two(weight)
        self.nominal_weight = self._configured_weight
        self.max_norm = config.max_norm
        self.seed = setup.first_seed
        self.steps = 0
        self._factor: tuple[Tensor, float | None, Tensor] | None = None

    def backward_factor(self) -> Tensor:
        """Return S / n0, by which a loss is multiplied before its backward, 0-dim."""
        scale, nominal = self.loss_scale.value, self.nominal_weight
        known = self._factor
        if known is None or known[0] is not scale or known[1] != nominal:
            known = self._factor = scale, nominal, scale / (nominal or 1.0)
        return known[2]

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors by name, see `Engine.state_dict`."""
        state = {f"model/{name}": tensor for name, tensor in self.weights().items()}
        for name, value in self._strategy.frozen_and_buffers().items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"get_extra_state of the model returns a {type(value).__name__} for {name!r}; "
                    "only tensors can be saved"
                )
            # Of a parameter that was frozen during training, the master is stored.
            state.setdefault(f"model/{name}", value.detach())
        for name, value in named_state(self._updates.optimizer, self._updates.names).items():
            parameter = name.rpartition("/")[0]
            state[f"optimizer/{name}"] = self._strategy.as_stored(parameter, value)
        for name, value in self.loss_scale.state_dict().items():
            state[f"loss_scale/{name}"] = value
        for name, value in self.divergence.state_dict().items():
            state[f"divergence/{name}"] = value
        for name, value in self._updates.options().items():
            state[f"{GROUP}{name}"] = value
        if self._products.schedule is not None:
            state[TOKENS] = self._products.schedule.tokens
        for name in self._strategy.used.unused:
            state[f"{UNUSED}{name}"] = torch.zeros(())
        state["engine/counts"] = self.counts
        state["engine/seed"] = torch.tensor(self.seed)
        state["engine/nominal_weight"] = torch.tensor(
            self.nominal_weight or 0.0, dtype=torch.float64
        )
        return state

    def weights(self) -> dict[str, Tensor]:
        """Return the live tensors that the optimizer updates, by parameter name."""
        return {
            name: self._strategy.as_stored(name, tensor.detach())
            for name, tensor in self._strategy.optimizer_parameters()
        }

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of `weights`, by parameter name."""
        return {
            name: None if tensor.grad is None else self._strategy.as_stored(name, tensor.grad)
            for name, tensor in self._strategy.optimizer_parameters()
        }

    def updated_by_optimizer(self) -> set[str]:
        """Return the names of tensors that only an update of the optimizer changes."""
        weights = {f"model/{name}" for name, _ in self._strategy.optimizer_parameters()}
        state = named_state(self._updates.optimizer, self._updates.names)
        return weights | {f"optimizer/{name}" for name in state}

    def prepare(self, stored: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Create the optimizer state that a stored state has.

        Args:
            stored: Shape and dtype of every stored tensor.

        Returns:
            The live tensors to fill: all of `tensors`, except the state of parameters that no rank
            has used.

        Raises:
            CheckpointError: If there are phases, and the state has no number of tokens, or if the
                state of the optimizer is incomplete. The engine is unchanged.
        """
        if self._products.schedule is not None and TOKENS not in stored:
            raise CheckpointError(
                f"{PHASES}: the checkpoint lacks the number of tokens, which only runs with phases "
                "count; remove the phases, or use them from the start of the run"
            )
        optimizer_state = under("optimizer/", stored)
        shapes = {name: global_shape(tensor) for name, tensor in self.weights().items()}
        optimizer, names = self._updates.optimizer, self._updates.names
        check_complete(optimizer, names, optimizer_state)
        self._updates.is_complete = False
        left_out = create_state(optimizer, names, optimizer_state, shapes)
        if self._updates.skips_on_device:
            prepare_for_device_skip(optimizer)
        self._strategy.used.unused = [
            *under(UNUSED, stored),
            *never_updated(optimizer, names, optimizer_state),
        ]
        self._warn(
            "the state contains optimizer state of %s, which this engine does not train "
            "(frozen or missing); it is ignored",
            left_out,
        )
        # A parameter without a stored state starts new: some optimizers create its state before its
        # first gradient, and fused SGD a momentum that SGD without momentum has not saved.
        stateless = shapes.keys() - state_keys(optimizer_state).keys()
        new = (UNUSED, *(f"optimizer/{name}/" for name in stateless))
        live = self.tensors()
        started = stateless.difference(self._strategy.used.unused)
        started &= state_keys(under("optimizer/", live)).keys()
        self._warn("the state has no optimizer state of %s, which starts new", sorted(started))
        kept = {name for name in live if name not in stored and name.startswith(new)}
        kept |= {name for name in live if name.startswith(GROUP)}
        own = {name: tensor for name, tensor in live.items() if name not in kept}
        return own | self._options_to_load(live, stored)

    def _options_to_load(
        self, live: Mapping[str, Tensor], stored: Mapping[str, TensorSpec]
    ) -> dict[str, Tensor]:
        """Return tensors for the numbers of groups; without rates if they are of other groups."""
        options = {name: kind for name, kind in stored.items() if name.startswith(GROUP)}
        rates, saved = ({n for n in names if _is_rate(n)} for names in (live, options))
        if rates != saved:
            options = {name: kind for name, kind in options.items() if name not in saved}
            self._warn(
                "the state has no %s for the parameter groups and the schedule of this engine: "
                "its learning rates stay unchanged",
                sorted(rates),
            )
        known = self._updates.groups()
        self._warn(
            "the state has numbers of parameter groups with other parameters: %s; they are ignored",
            sorted(name for name in options if name.split("/")[1] not in known),
        )
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in options.items()}

    @torch.no_grad()
    def copy(self, state: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        """Copy values into the live tensors.

        Args:
            state: Values by name, with the sharding of the live tensors.
            live: The result of `prepare`.

        Raises:
            CheckpointError: If a tensor is missing or has another shape, or the state has a weight
                that the model does not have.
        """
        if missing := live.keys() - state.keys():
            raise CheckpointError(f"the state lacks {listed(sorted(missing))}")
        if others := {name for name in state.keys() - live.keys() if name.startswith("model/")}:
            raise CheckpointError(
                f"the state holds {listed(sorted(others))}, which this model does not have"
            )
        check_shapes(state, live)
        for name, tensor in live.items():
            tensor.copy_(state[name])

    def finish(self, live: Mapping[str, Tensor]) -> None:
        """Update values derived from the live tensors, after these were loaded.

        Args:
            live: The result of `prepare`.
        """
        self.loss_scale.load_state_dict(under("loss_scale/", live), quiet=self._is_quiet)
        self.divergence.load_state_dict(under("divergence/", live))
        self._updates.restore_options(under(GROUP, live))
        restore_numbers(self._updates.optimizer)
        set_extra_state(self._strategy.module, under("model/", live))
        self._updates.tensors.forget_writes()
        self._updates.is_complete = True
        self._strategy.publish_weights()
        self.seed = int(live["engine/seed"])
        self.nominal_weight = float(live["engine/nominal_weight"]) or self._configured_weight
        self._updates.max_applied = int(self.counts[0])
        self.steps = int(self.counts[:2].sum())
        self._products.continue_from_state()

    def _warn(self, message: str, names: list[str]) -> None:
        if names and not self._is_quiet:
            logger.warning(message, listed(names))


def _is_rate(name: str) -> bool:
    return name.startswith(GROUP) and name.endswith(RATE)
