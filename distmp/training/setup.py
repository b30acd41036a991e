"""What a run is made of: data, model and engine of a configuration, and where the run stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from distmp.checkpoint import store
from distmp.config import RunConfig
from distmp.data.build import Datasets, build_datasets
from distmp.data.loading import Batch, step_batches
from distmp.data.order import microbatches_per_rank
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.models.build import Loss, build_loss, build_model
from distmp.optim.build import optimizer_factory, schedule_factory
from distmp.parallel.reproducible import check_power_of_two
from distmp.precision import PolicyLike
from distmp.training.run_directory import RunDirectory, latest_run


class RunComponents(NamedTuple):
    """What a run is made of, before anything is distributed."""

    datasets: Datasets
    model: nn.Module
    loss: Loss
    microbatches: int


@dataclass
class Progress:
    """Where a run stands; all that is needed to find the next sample.

    Attributes:
        step: Steps done, skipped ones included.
        samples: Samples consumed by all ranks together, or passed over by a rollback.
        rollbacks: How often the run has gone back to a checkpoint.
        rolled_back_to: The step that it went back to the last time.
    """

    step: int = 0
    samples: int = 0
    rollbacks: int = 0
    rolled_back_to: int | None = None


def prepare(config: RunConfig, world: World) -> RunComponents:
    """Build everything that needs no other rank.

    Raises:
        ConfigError: If data, model or batch cannot be had as configured.
    """
    microbatches = microbatches_per_rank(
        config.batch.global_batch_size, config.batch.microbatch_size, world.world_size
    )
    if config.reproducible:
        check_power_of_two(microbatches)
    store.check_reachable(config.checkpoint.path, config.resume)
    datasets = build_datasets(config.data)
    torch.manual_seed(config.seed)
    model = build_model(config.model, datasets.vocabulary_size, config.data.sequence_length)
    return RunComponents(datasets, model, build_loss(config.model), microbatches)


def start_from_weights(config: RunConfig, model: nn.Module) -> None:
    """Give the model the weights that `model.weights` names, if any.

    Raises:
        ConfigError: If they cannot be read or do not fit.
    """
    if config.model.weights is not None:
        # Imported here: most runs have no use for it.
        from distmp.export.weights import load_weights

        load_weights(model, config.model.weights)


def build_engine(
    config: RunConfig,
    parts: RunComponents,
    world: World,
    *,
    policy: PolicyLike,
    attribution: bool,
    first_step_checks: bool = True,
) -> Engine:
    """Build the engine of a configuration.

    Args:
        config: The settings of optimizer, schedule, strategy and loss scale.
        parts: What `prepare` returned.
        world: The ranks, which all have to call it.
        policy: What is computed in which type.
        attribution: Whether the engine keeps what `Engine.explain` needs.
        first_step_checks: Whether the engine looks for mistakes in the first step.

    Raises:
        ConfigError: If model, policy, strategy and optimizer do not fit together.
    """
    return Engine(
        parts.model,
        parts.loss,
        optimizer_factory(config.optim),
        policy=policy,
        strategy=config.strategy,
        parallel=config.parallel(parts.microbatches),
        schedule=schedule_factory(config.schedule, config.steps),
        max_norm=config.optim.max_norm,
        loss_scale=config.precision.loss_scale,
        max_consecutive_skips=config.precision.max_consecutive_skips,
        attribution=attribution,
        shard_optimizer=config.shard_optimizer,
        reproducible=config.reproducible,
        on_nonfinite=config.precision.on_nonfinite,
        divergence=config.divergence,
        first_step_checks=first_step_checks,
        device=world.device,
    )


def training_batches(
    config: RunConfig, parts: RunComponents, world: World, progress: Progress
) -> Generator[list[Batch], None, None]:
    """Return the microbatches of this rank for each step from `progress` on; close it when done."""
    return step_batches(
        parts.datasets.train,
        seed=config.seed,
        first_sample=progress.samples,
        global_batch_size=config.batch.global_batch_size,
        microbatch_size=config.batch.microbatch_size,
        rank=world.rank,
        world_size=world.world_size,
        workers=config.data.workers,
        pin_memory=world.device.type == "cuda",
    )


def find_checkpoint(config: RunConfig) -> store.StoredCheckpoint | None:
    """Return the checkpoint to continue from, verified, or None for a run from scratch.

    Collective over all ranks. Damaged checkpoints are logged and skipped.

    Raises:
        CheckpointError: If there is none where `resume` says, or it is damaged.
    """
    if config.resume is None:
        return None
    place = config.checkpoint.path
    run = store.Ranks(None).on_rank_0(
        f"find the folder of {config.run_dir}",
        lambda: str((latest_run(config.run_dir, place) or RunDirectory(Path(config.run_dir))).path),
    )
    return store.resolve(config.resume, RunDirectory(Path(run), place).checkpoints)


def restore(
    engine: Engine, checkpoint: store.StoredCheckpoint, *, optimizer: bool = True
) -> Progress:
    """Load a checkpoint into an engine; return the progress of the run. Collective over all ranks.

    Args:
        engine: Receives the state.
        checkpoint: Verified, as `find_checkpoint` returns it.
        optimizer: Whether to load the optimizer state; otherwise it starts from scratch.

    Raises:
        CheckpointError: If the checkpoint cannot be read or does not fit the engine.
    """
    left_out = () if optimizer else ("optimizer/",)
    live = engine.prepare_to_load(
        {name: kind for name, kind in checkpoint.tensors.items() if not name.startswith(left_out)}
    )
    checkpoint.load(
        {name: tensor for name, tensor in live.items() if not name.startswith(left_out)}
    )
    engine.finish_loading(live)
    known = {field.name for field in dataclasses.fields(Progress)}
    numbers = checkpoint.numbers.items()
    return Progress(**{name: number for name, number in numbers if name in known})
