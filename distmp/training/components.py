"""Builds data, model and engine from a configuration, and loads checkpoints into them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.manifest import check_number
from distmp.config import RunConfig
from distmp.data.datasets import Datasets, build_datasets
from distmp.data.loading import steps
from distmp.data.order import Division, microbatches_per_rank
from distmp.data.streams import Step, length_of
from distmp.distributed.comparison import check_same
from distmp.distributed.world import World
from distmp.engine.checkpoints import load_checkpoint
from distmp.engine.engine import Engine
from distmp.errors import CheckpointError, listed, require
from distmp.export.weights import BuiltModel, StoredWeights, misfits, read_shards
from distmp.models import adapters, huggingface
from distmp.models.architecture import Loss, build_loss, build_model
from distmp.models.settings import ModelConfig
from distmp.optim.factories import optimizer_factory, schedule_factory
from distmp.parallel.reproducible import check_power_of_two
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.parallel.strategy import check_model
from distmp.precision import PolicyLike, PrecisionPolicy, resolve
from distmp.utils.deferred import NotDeferrableError, build_deferred, build_whole
from distmp.utils.generators import seed_all

logger = logging.getLogger("distmp")

_OTHER_WEIGHTS = "ranks find different files; put the files of the model on storage that all share"


class ModelAndData(NamedTuple):
    """Data, model and loss of a run, before anything is distributed.

    Attributes:
        datasets: Training data and, if any, held-out data.
        model: The model as it was built.
        loss: Returns the loss sum and the weight of a microbatch.
        microbatches: Microbatches per step on each rank.
        weights: What a new run loads into the engine; None if there is nothing to load.
        built: Names and dimensions of the model as it was built.
    """

    datasets: Datasets
    model: nn.Module
    loss: Loss
    microbatches: int
    weights: StoredWeights | None
    built: BuiltModel


@dataclass
class Progress:
    """The position of a run in its steps and its data.

    Attributes:
        step: Steps done, skipped ones included.
        samples: Samples consumed by all ranks together, or skipped by a rollback.
        rollbacks: Number of rollbacks up to now.
        rolled_back_to: The step of the checkpoint of the last rollback; None without one.
    """

    step: int = 0
    samples: int = 0
    rollbacks: int = 0
    rolled_back_to: int | None = None


def build_model_and_data(config: RunConfig, world: World, seed: int | None = None) -> ModelAndData:
    """Build data, model and loss without communication.

    Args:
        config: The run.
        world: All ranks.
        seed: Seed of the random numbers that a function of the user draws to build datasets, such
            as for a split; None for that of the run.

    Raises:
        ConfigError: If the settings of data, model or batch are invalid, or the data does not fit
            them.
    """
    microbatches = microbatches_per_rank(
        config.batch.global_batch_size, config.batch.microbatch_size, world.world_size
    )
    if config.reproducible:
        check_power_of_two(microbatches)
    # Functions of users may draw from any generator; a resumed run needs the same data.
    seed_all(config.seed if seed is None else seed)
    datasets = build_datasets(config.data)
    _check_datasets(config, datasets)
    seed_all(config.seed)
    model = _build(config, datasets.vocabulary_size, world)
    weights = configured_weights(config.model)
    if weights is not None and weights.name is not None:
        model, weights = _with_weights(model, weights, config.model, quiet=world.rank != 0)
    if config.model.peft is not None:
        adapters.add_adapters(model, config.model.peft, config.seed)
    check_model(model)
    if config.model.is_hugging_face and config.model.loss == "next_token":
        huggingface.prepare_loss(model)
    built = BuiltModel.of(model, has_adapters=config.model.peft is not None)
    return ModelAndData(datasets, model, build_loss(config.model), microbatches, weights, built)


def _check_datasets(config: RunConfig, datasets: Datasets) -> None:
    """Refuse data on which a run would not train as configured.

    Raises:
        ConfigError: If there are fewer samples than a step has, or none for validation.
    """
    size = config.batch.global_batch_size
    samples = length_of(datasets.train)
    problem = (
        f"is more than the {samples} samples of the training data, so a step would repeat samples; "
        "use a smaller batch, or more data"
    )
    require(samples is None or samples >= size, "batch.global_batch_size", size, problem)
    problem = "data.source returned None for split='validation'"
    config.validation.check(datasets.validation is not None, problem)


def _with_weights(
    model: nn.Module, weights: StoredWeights, config: ModelConfig, *, quiet: bool
) -> tuple[nn.Module, StoredWeights | None]:
    """Load the weights of a Hugging Face directory now if transformers has to convert them.

    Args:
        model: The model as it was built.
        weights: The weights in its directory.
        config: Section `model`.
        quiet: Whether to leave warnings to another rank.

    Returns:
        The model, and the weights that are still to be loaded, or None.
    """
    rest: StoredWeights | None = weights
    if problems := [*misfits(model.state_dict(keep_vars=True), weights)]:
        ties = BuiltModel.of(model).names
        (model, unknown), rest = huggingface.load(config), None
        _check_ties(ties, BuiltModel.of(model).names, weights)
        if not quiet:
            logger.warning(
                "model.name = %r: transformers converts its weights, so every rank loads the whole "
                "model (%s); to load shards, save the model with `save_pretrained` first",
                config.name,
                problems[0],
            )
    else:
        unknown = sorted(weights.shapes().keys() - model.state_dict(keep_vars=True).keys())
    huggingface.refuse_unused(model, unknown, config)
    return model, rest


def _check_ties(built: Mapping[str, str], loaded: Mapping[str, str], stored: StoredWeights) -> None:
    """Refuse stored weights with different values that the model ties: transformers unties them."""
    if untied := sorted(name for name, first in loaded.items() if built[name] != first):
        raise stored.error(
            f"has other values for {listed(untied)} than for the weights that the model ties to "
            "them; set model.options: {tie_word_embeddings: false}"
        )


def _build(config: RunConfig, vocabulary_size: int | None, world: World) -> nn.Module:
    """Build the model, if possible without memory for its parameters."""

    def build() -> nn.Module:
        return build_model(config.model, vocabulary_size, config.data.sequence_length)

    try:
        return build_deferred(build, config.seed)
    except NotDeferrableError as error:
        sharded = config.strategy in ("auto", *SHARDED_STRATEGIES)
        if sharded and world.world_size > 1 and world.rank == 0:
            logger.warning(
                "model.name = %r: its constructor %s, so every rank builds the whole model first",
                config.model.name,
                error,
            )
        return build_whole(build, config.seed)


def configured_weights(config: ModelConfig) -> StoredWeights | None:
    """Return the weights that a new run starts from; None for random weights."""
    if config.weights is not None:
        return StoredWeights(Path(config.weights))
    directory = huggingface.weights_directory(config.name) if config.is_hugging_face else None
    return None if directory is None else StoredWeights(directory, config.name)


def build_engine(
    config: RunConfig,
    parts: ModelAndData,
    world: World,
    *,
    policy: PolicyLike,
    load: bool = False,
    **changes: Any,
) -> Engine:
    """Build the engine of a configuration.

    Args:
        config: The settings of optimizer, schedule, strategy and loss scale.
        parts: What `build_model_and_data` returned.
        world: The ranks; all have to call it.
        policy: The precision policy. An old device of one rank may not support it.
        load: Whether a checkpoint is loaded next, so that initial values are not needed.
        **changes: Other fields of the engine's settings.

    Raises:
        ConfigError: If model, policy, strategy and optimizer are not compatible, or ranks would
            start from other weights.
        SetupError: On every rank, if the device of a rank does not support the policy.
    """
    resolved, _ = world.ranks.all_or_none(lambda: resolve(policy, world.device))
    weights = "none" if parts.weights is None else str(parts.weights.path)
    check_same(world.group, world.device, {"model weights": weights}, _OTHER_WEIGHTS)
    round_frozen(config, parts, resolved)
    settings = replace(config.engine(parts.microbatches), policy=policy, **changes)
    return Engine(
        parts.model,
        parts.loss,
        optimizer_factory(
            config.optim, stochastic_rounding=resolved.stochastic_rounding, seed=config.seed
        ),
        settings,
        schedule=schedule_factory(config.schedule, config.steps),
        device=world.device,
        # Weights in files have no values for adapters.
        initialize=not load and (parts.weights is None or config.model.peft is not None),
    )


def round_frozen(config: RunConfig, parts: ModelAndData, policy: PrecisionPolicy) -> None:
    """Cast the frozen weights of a model with adapters to the compute dtype of the policy."""
    if config.model.peft is not None:
        adapters.round_frozen(parts.model, policy)


def start_from_weights(parts: ModelAndData, engine: Engine) -> None:
    """Load the weights of a new run, if any, into its engine. Collective over all ranks.

    Raises:
        SetupError: On every rank, if they cannot be read or do not fit the model.
    """
    weights = parts.weights
    if weights is not None:
        state = engine.state_dict()
        engine.world.ranks.all_or_none(lambda: read_shards(state, parts.built, weights))
        engine.load_state_dict(state)


def training_batches(
    config: RunConfig, parts: ModelAndData, world: World, progress: Progress
) -> Generator[Step, None, None]:
    """Yield the steps of this rank from `progress` on. Close it when done.

    The workers start in this call.
    """
    sizes = config.batch.global_batch_size, config.batch.microbatch_size
    division = Division(progress.samples, *sizes, world.rank, world.world_size)
    data, workers = parts.datasets.train, config.data.workers
    return steps(data, division, world, seed=config.seed, workers=workers)


def restore(engine: Engine, checkpoint: StoredCheckpoint) -> Progress:
    """Load a checkpoint into an engine; return the progress of the run. Collective over all ranks.

    Args:
        engine: Receives the state.
        checkpoint: Verified, as `recovery.resolve` returns it.

    Raises:
        CheckpointError: If the checkpoint cannot be read or does not match the engine.
    """
    progress = stored_progress(checkpoint)
    load_checkpoint(engine, checkpoint)
    return progress


def stored_progress(checkpoint: StoredCheckpoint) -> Progress:
    """Return the progress of the run that wrote a checkpoint.

    Raises:
        CheckpointError: If its numbers are not those of a run.
    """
    numbers = checkpoint.state.numbers
    try:
        for name in ("configuration", "data", "ranks", "versions", "callbacks"):
            if not isinstance(numbers.get(name, {}), dict):
                raise CheckpointError(f"{name} is a {type(numbers[name]).__name__}")
        names = [field.name for field in dataclasses.fields(Progress)]
        found = {name: numbers[name] for name in names if numbers.get(name) is not None}
        if not {"step", "samples"} <= found.keys():
            raise CheckpointError("they lack the step or the position in the data")
        return Progress(**{name: check_number(name, value) for name, value in found.items()})
    except CheckpointError as error:
        raise CheckpointError(f"the numbers in {checkpoint} cannot be used: {error}") from error
