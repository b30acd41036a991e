"""Builds the components of a training run from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from distmp.checkpoint import store
from distmp.config import RunConfig
from distmp.distributed.progress import current_phase
from distmp.distributed.world import World
from distmp.engine import Engine
from distmp.engine.saving import load_checkpoint
from distmp.optim import Muon
from distmp.parallel.memory import Option
from distmp.quantization.description import describe_formats, formats_record
from distmp.telemetry import Console
from distmp.training import manifest
from distmp.training.directory_choice import DirectoryChoice
from distmp.training.restarts import Restarts
from distmp.training.resume_compat import Changes
from distmp.training.run import Run
from distmp.training.run_directory import RunDirectory, try_to_write
from distmp.training.run_fingerprint import (
    changes_since,
    describe_model,
    run_fingerprint,
    weights_folder,
)
from distmp.training.run_lease import this_job
from distmp.training.setup import (
    Progress,
    RunComponents,
    build_engine,
    find_checkpoint,
    prepare,
    start_from_weights,
    stored_progress,
)
from distmp.training.strategy_choice import choose_strategy
from distmp.utils import settings


def build_run(config: RunConfig, world: World, console: Console, restarts: Restarts) -> Run:
    """Build a run, load its checkpoint, and print a summary. Collective over all ranks.

    Raises:
        SetupError: On every rank, if some rank cannot run this configuration.
    """
    choice = None
    if world.rank == 0:
        choice = DirectoryChoice(config, this_job(restarts.job()), console.message)
    try:
        return _build_run(config, world, console, restarts, choice)
    except BaseException:
        if choice is not None:
            choice.release()
        raise


def _build_run(
    config: RunConfig,
    world: World,
    console: Console,
    restarts: Restarts,
    choice: DirectoryChoice | None,
) -> Run:
    components = world.ranks.all_or_none(lambda: prepare(config, world))
    checkpoint = _find_checkpoint(config, world, restarts, choice)
    progress = Progress() if checkpoint is None else stored_progress(checkpoint)
    # Counted before a sharded strategy leaves only a part of each parameter on this rank.
    parameters = _count_parameters(components.model)
    chosen, strategy_reason = choose_strategy(config, components, world)
    engine = world.ranks.all_or_none(
        lambda: _engine(chosen, components, world, load=checkpoint is not None)
    )
    if checkpoint is None:
        start_from_weights(components, engine)
    fingerprint = run_fingerprint(config, components.datasets, world, engine.policy)
    fingerprint |= describe_model(components.model, config)
    if checkpoint is None and _freezes_random_weights(config):
        console.message(
            "model.peft: the model has random weights, and they stay frozen; name its weights with "
            "hf:FOLDER or model.weights"
        )
    changes = world.ranks.all_or_none(lambda: _compare(config, fingerprint, checkpoint))
    directory = _choose_directory(config, world, restarts, checkpoint, choice)
    for line in _summary(chosen, world, components, engine, parameters, strategy_reason):
        console.message(line)
    _record_start(config, world, console, directory, checkpoint, progress.step, engine)
    if checkpoint is not None:
        if progress.step >= config.steps:
            # `steps` would change the learning rates of later steps, and there are none.
            changes.consequential.pop("steps", None)
        _continue_from(checkpoint, engine, world, console, changes)
    if (attempt := restarts.describe_attempt(progress.step)) is not None:
        console.message(attempt)
    return Run(
        config,
        world,
        console,
        components,
        engine,
        fingerprint,
        directory,
        restarts,
        checkpoint,
        progress,
        None if choice is None else choice.lease,
    )


def _find_checkpoint(
    config: RunConfig, world: World, restarts: Restarts, choice: DirectoryChoice | None
) -> store.StoredCheckpoint | None:
    """Claim the directory to continue, and return the checkpoint to continue from."""

    def claim() -> str | None:
        assert choice is not None
        directory = choice.continued(restarts.directory)
        return None if directory is None else str(directory.path)

    def configured() -> store.StoredCheckpoint | None:
        if config.resume == "auto" and path is None:
            return None
        directory = None if path is None else RunDirectory(Path(path), config.checkpoint.path)
        return find_checkpoint(config, directory)

    path = world.ranks.from_rank_0(claim)
    return world.ranks.all_or_none(lambda: restarts.checkpoint(configured))


def _engine(config: RunConfig, components: RunComponents, world: World, *, load: bool) -> Engine:
    precision = config.precision
    return build_engine(
        config,
        components,
        world,
        policy=precision.policy,
        attribution=precision.attribution,
        load=load,
    )


def _compare(
    config: RunConfig, fingerprint: dict[str, Any], checkpoint: store.StoredCheckpoint | None
) -> Changes:
    """Return what changed since the checkpoint; raise if it belongs to another run."""
    if checkpoint is None:
        return Changes()
    changes = changes_since(checkpoint.numbers, fingerprint)
    if not config.resume_force:
        changes.refuse(str(checkpoint))
    return changes


def _choose_directory(
    config: RunConfig,
    world: World,
    restarts: Restarts,
    checkpoint: store.StoredCheckpoint | None,
    choice: DirectoryChoice | None,
) -> RunDirectory:
    """Return the folder of the run that wrote the checkpoint, or create one, on rank 0."""

    def choose() -> str:
        assert choice is not None
        directory = restarts.directory or choice.final(checkpoint)
        restarts.begin(directory, checkpoint)
        return str(directory.path)

    return RunDirectory(Path(world.ranks.from_rank_0(choose)), config.checkpoint.path)


def _summary(
    config: RunConfig,
    world: World,
    components: RunComponents,
    engine: Engine,
    parameters: str,
    strategy_reason: str,
) -> Iterator[str]:
    """Yield lines about the run, with the reason for every automatic choice."""
    batch = config.batch
    yield f"data: {components.datasets.description}"
    yield (
        f"model: {config.model.name}, {parameters}; "
        f"precision {engine.policy.name} ({engine.policy_reason})"
    )
    if engine.narrow_products.layers is not None:
        yield f"formats: {describe_formats(engine.narrow_products.layers)}"
    yield (
        f"ranks: {world.world_size} on {world.device.type}{_backend(world)}, strategy "
        f"{engine.strategy}{f' ({engine.strategy_reason})' if engine.strategy_reason else ''}; "
        f"batch {batch.global_batch_size} = {world.world_size} ranks x "
        f"{components.microbatches} microbatches x {batch.microbatch_size} samples"
    )
    if isinstance(engine.optimizer, Muon):
        yield f"optimizer: {engine.optimizer.describe()}"
    if strategy_reason:
        option = Option(config.strategy, config.shard_optimizer)
        yield f"strategy: {option} ({strategy_reason})"


def _freezes_random_weights(config: RunConfig) -> bool:
    known = config.model.peft is not None and not config.model.is_import_path
    return known and weights_folder(config) is None


def _count_parameters(model: nn.Module) -> str:
    parameters = [*model.parameters()]
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{count:,} parameters" + (f", {trained:,} of them trained" if trained < count else "")


def _backend(world: World) -> str:
    if world.backend is None:
        return ""
    shared = world.device.type == "cuda" and world.backend == "gloo"
    return f" ({world.backend}{', because ranks share a GPU' if shared else ''})"


def _record_start(
    config: RunConfig,
    world: World,
    console: Console,
    directory: RunDirectory,
    checkpoint: store.StoredCheckpoint | None,
    step: int,
    engine: Engine,
) -> None:
    """Write the configuration and the manifest, and print the folder of the run."""
    console.message(f"run directory: {directory.path}")
    if checkpoint is not None:
        console.message(f"continuing from {checkpoint}{_which(config, directory)}")
        if step >= config.steps:
            console.message(
                f"nothing is left to train: the checkpoint is of step {step}, and "
                f"steps = {config.steps}"
            )
    if world.rank == 0:
        try_to_write(
            directory.config, lambda path: settings.write_yaml(config, path), console.message
        )
    layers = engine.narrow_products.layers
    manifest.record(
        directory.manifest,
        world,
        settings.to_mapping(config),
        first_step=step,
        narrow_products=None if layers is None else formats_record(layers),
    )


def _which(config: RunConfig, directory: RunDirectory) -> str:
    """Return why another directory than `run_dir` is continued, for a message."""
    if config.resume != "auto" or directory.path == Path(config.run_dir):
        return ""
    return (
        f", the newest directory of run_dir = {config.run_dir!r}; for another one, set resume to "
        "its path"
    )


def _continue_from(
    checkpoint: store.StoredCheckpoint,
    engine: Engine,
    world: World,
    console: Console,
    changes: Changes,
) -> None:
    """Report what changed since the checkpoint, and load it."""
    current_phase.enter("loading a checkpoint", transfers=True)
    if world.rank == 0:
        changes.report(console.message)
    same_optimizer = "optim.name" not in changes.dangerous
    world.ranks.all_or_none(lambda: load_checkpoint(engine, checkpoint, optimizer=same_optimizer))
