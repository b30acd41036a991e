"""Builds what stays the same in an engine: model, strategy, policy and optimizer."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from distmp.distributed.comparison import check_same, describe_model
from distmp.distributed.failing_together import explain_lost_peers
from distmp.distributed.wait_times import StepClock
from distmp.distributed.world import World, world_of_process
from distmp.engine.engine_config import EngineConfig
from distmp.engine.low_precision_matmuls import LowPrecisionMatmuls
from distmp.engine.precision_phases import PhaseSchedule, phase_formats
from distmp.engine.updates import Updates
from distmp.errors import ConfigError
from distmp.models.loss import computes_loss
from distmp.optim.factories import OptimizerFactory, ScheduleFactory
from distmp.parallel import ParallelConfig
from distmp.parallel.build_strategy import build_strategy, resolve_strategy
from distmp.parallel.materialize import InitialValues, initial_values
from distmp.parallel.module_buffers import ModuleBuffers
from distmp.parallel.reproducible import make_deterministic, prepare_cublas
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.parallel.strategy import Strategy, check_model
from distmp.precision import PrecisionPolicy, resolve
from distmp.precision.policy import SIXTEEN_BIT, costs
from distmp.quantization.layers import log_formats
from distmp.scaling.settings import unused_rules
from distmp.utils.deferred import NotDeferrableError, build_deferred, describe_initial_values
from distmp.utils.dtypes import dtype_name


def _warn_about_copies(dtype: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # with keep_vars the caller asks for the parameters themselves
        warnings.warn(
            f"module.state_dict() returns {dtype} copies of the weights; the FP32 weights "
            "are in engine.state_dict(), and engine.export(directory) writes them",
            RuntimeWarning,
            stacklevel=3,
        )


def build_model(
    model: nn.Module | Callable[[], nn.Module], world: World, *, initialize: bool
) -> tuple[nn.Module, InitialValues, int]:
    """Return the model, initial values of its parameters on the meta device, and a seed.

    The seed is a random number that is the same on all ranks.

    Args:
        model: A module, or a function that returns it; see `distmp.Engine`.
        world: The ranks, all of which have to call this.
        initialize: Whether to compute initial values; with False those in the state dict are NaN.

    Raises:
        ConfigError: If it is no model, or a function whose parameters cannot be deferred.
    """
    is_function = callable(model) and not isinstance(model, nn.Module | type)
    # Every rank draws, so that the generators of all ranks advance; rank 0's seed counts.
    seed = world.ranks.gather(int(torch.randint(2**62, ())))[0]
    try:
        module = build_deferred(model, seed, world.device) if is_function else model
    except NotDeferrableError as error:
        name = getattr(model, "__qualname__", type(model).__name__)
        problem = f"{error}; pass the model itself, which every rank then builds whole"
        raise ConfigError("model", name, f"the constructor {problem}") from error
    check_model(module)
    assert isinstance(module, nn.Module)
    return module, initial_values(module, seed, world.device, initialize=initialize), seed


def return_logits(model: nn.Module) -> list[nn.Module]:
    """Make models return logits; return the modules that computed the loss sum in their place."""
    chunked = [part for part in model.modules() if computes_loss(part)]
    for part in chunked:
        part.takes_targets = False  # type: ignore[assignment]
    return chunked


logger = logging.getLogger("distmp")

LossFunction = Callable[[nn.Module, Any], "tuple[Tensor, Tensor | float]"]


@dataclass(frozen=True)
class EngineSetup:
    """What an engine decides and builds once; `EngineState` is what its steps change.

    Attributes:
        config: The settings, with "auto" resolved.
        world: Rank, number of ranks, device and process group of this process.
        policy: The precision policy.
        policy_reason: Why this policy was selected.
        loss: The loss function.
        strategy: The distributed model and its gradients.
        buffers: The buffers of the model, such as running statistics.
        updates: The optimizer.
        low_precision_matmuls: The linear layers with low-precision matmuls, and their statistics.
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
    low_precision_matmuls: LowPrecisionMatmuls
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
) -> EngineSetup:
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
        return_logits(model)  # the policy would round a loss that the model computes itself
    if config.reproducible:
        make_deterministic(world.device)
    strategy = _distribute(model, values, policy, config, world, initialize=initialize)
    if policy.has_masters and config.strategy not in SHARDED_STRATEGIES and world.rank == 0:
        # Not a closure, which could not be pickled with the module.
        warn = functools.partial(_warn_about_copies, dtype_name(policy.compute_dtype))
        strategy.module.register_state_dict_pre_hook(warn)
    layers = strategy.low_precision_layers
    phases = None
    if layers is not None and config.precision_phases:
        phases = PhaseSchedule(layers, policy, config.precision_phases, quiet=world.rank != 0)
    if layers is not None and world.rank == 0:
        compiled = config.parallel is not None and config.parallel.compile != "none"
        log_formats(layers, policy, world.device, compiled=compiled)
    return EngineSetup(
        config,
        world,
        policy,
        reason,
        loss,
        strategy,
        ModuleBuffers(strategy.module, world.group, reproducible=config.reproducible),
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
    with explain_lost_peers(world.group):
        described = config.describe() | describe_model(model)
        if initialize and config.strategy in SHARDED_STRATEGIES:
            # A rank computes its shards alone; other strategies copy the values of rank 0.
            described |= describe_initial_values(model)
        check_same(world.group, world.device, described)
        return build_strategy(
            config.strategy, model, policy, world, config, config.parallel, values
        )
