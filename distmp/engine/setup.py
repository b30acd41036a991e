"""What an engine decides once: the model and its strategy, the policy, and the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from distmp.distributed.compare_ranks import check_same, describe_model
from distmp.distributed.lost_peers import explain_lost_peers
from distmp.distributed.own_time import StepClock
from distmp.distributed.world import World, world_of_process
from distmp.engine.config import EngineConfig
from distmp.engine.model import build_model, return_logits
from distmp.engine.narrow_products import LowPrecisionMatmuls
from distmp.engine.precision_phases import PhaseSchedule, phase_formats
from distmp.engine.rounded_copies import warn_about_copies
from distmp.engine.updates import Updates
from distmp.optim import OptimizerFactory, ScheduleFactory
from distmp.parallel import ParallelConfig, Strategy, build_strategy, resolve_strategy
from distmp.parallel.materialize import InitialValues
from distmp.parallel.module_buffers import ModuleBuffers
from distmp.parallel.reproducible import make_deterministic, prepare_cublas
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision import PrecisionPolicy, resolve
from distmp.precision.costs import costs
from distmp.precision.policy import SIXTEEN_BIT
from distmp.quantization.description import log_formats
from distmp.scaling import unused_rules
from distmp.utils.deferred import describe_initial_values

logger = logging.getLogger("distmp")

LossFunction = Callable[[nn.Module, Any], "tuple[Tensor, Tensor | float]"]


@dataclass(frozen=True)
class Setup:
    """Everything that a step uses and does not change by itself.

    Attributes:
        config: The settings, with "auto" resolved.
        world: Rank, number of ranks, device and process group of this process.
        policy: The precision policy.
        policy_reason: Why this policy was selected.
        loss: The loss function.
        strategy: The distributed model and its gradients.
        buffers: The buffers of the model, such as running statistics.
        updates: The optimizer.
        narrow_products: The linear layers with low-precision matmuls, and their statistics.
        clock: Measures the time that this rank computes in a step, while it is active.
        first_seed: The seed of the run, unless a state with another one is loaded.
    """

    config: EngineConfig
    world: World
    policy: PrecisionPolicy
    policy_reason: str
    loss: LossFunction
    strategy: Strategy
    buffers: ModuleBuffers
    updates: Updates
    narrow_products: LowPrecisionMatmuls
    clock: StepClock
    first_seed: int

    @cached_property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.world.device

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device in every step, so that outcomes are complete."""
        return self.device.type == "cpu" or not self.updates.skips_on_device

    @cached_property
    def is_sharded(self) -> bool:
        """Whether a rank holds shards of the model, so that all ranks call it together."""
        return self.config.strategy in SHARDED_STRATEGIES


def set_up(
    model: nn.Module | Callable[[], nn.Module],
    loss: LossFunction,
    optimizer: OptimizerFactory,
    schedule: ScheduleFactory | None,
    config: EngineConfig,
    device: torch.device | str | None,
    *,
    initialize: bool,
) -> Setup:
    """Distribute a model over the ranks, and build its optimizer; every rank has to call it.

    Args:
        model: See `distmp.Engine`, as for the other arguments.
        loss: The loss function.
        optimizer: Builds the optimizer.
        schedule: Builds the scheduler.
        config: The settings.
        device: The device to train on.
        initialize: Whether to compute initial values.

    Raises:
        ConfigError: If model, policy, strategy and optimizer are not compatible.
    """
    if config.reproducible:
        prepare_cublas(device)  # before joining the ranks, which initializes CUDA
    world = world_of_process(device)
    model, values, seed = build_model(model, world, initialize=initialize)
    policy, reason = resolve(config.policy, world.device)
    phase_formats(policy, config.precision_phases)  # refuses other policies
    config = replace(
        config,
        policy=policy,
        strategy=resolve_strategy(config.strategy, world),
        parallel=config.parallel or ParallelConfig(),
    )
    if world.rank == 0:
        _warn_about_policy(policy, config)
    if policy.output_dtype in SIXTEEN_BIT:
        return_logits(model)
    if config.reproducible:
        make_deterministic(world.device)
    strategy = _distribute(model, values, policy, config, world, initialize=initialize)
    if config.strategy not in SHARDED_STRATEGIES and world.rank == 0:
        warn_about_copies(strategy.module, policy)
    layers = strategy.narrow_layers
    phases = None
    if layers is not None and config.precision_phases:
        phases = PhaseSchedule(layers, policy, config.precision_phases, quiet=world.rank != 0)
    if layers is not None and world.rank == 0:
        log_formats(layers, policy, world.device)
    return Setup(
        config,
        world,
        policy,
        reason,
        loss,
        strategy,
        ModuleBuffers(strategy.model, world.group, reproducible=config.reproducible),
        Updates(optimizer, schedule, strategy, policy, world.device),
        LowPrecisionMatmuls(layers, world, phases),
        StepClock(world.device),
        seed,
    )


def _warn_about_policy(policy: PrecisionPolicy, config: EngineConfig) -> None:
    for cost in costs(policy):
        logger.warning("precision %s reduces accuracy: %s", policy.name, cost)
    if unused := unused_rules(policy.loss_scale, config.loss_scale):
        logger.warning("precision %s: %s", policy.name, unused)


def _distribute(
    model: nn.Module,
    values: InitialValues,
    policy: PrecisionPolicy,
    config: EngineConfig,
    world: World,
    *,
    initialize: bool,
) -> Strategy:
    """Check that all ranks have the same set-up, and distribute the model."""
    assert config.parallel is not None
    with explain_lost_peers(world.group):
        described = config.describe() | describe_model(model)
        if initialize and config.strategy in SHARDED_STRATEGIES:
            # A rank computes its shards alone; other strategies copy the values of rank 0.
            described |= describe_initial_values(model)
        check_same(world.group, world.device, described)
        return build_strategy(
            config.strategy, model, policy, world, config.accumulation, config.parallel, values
        )
