"""Builds a training run from its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from distmp.checkpoint import recovery
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig
from distmp.distributed.progress import current_phase
from distmp.distributed.world import World
from distmp.engine.checkpoints import load_checkpoint
from distmp.engine.engine import Engine
from distmp.optim import Muon
from distmp.quantization.layers import describe_formats, formats_record
from distmp.telemetry.console import Console
from distmp.training import components
from distmp.training.components import ModelAndData, Progress
from distmp.training.restarts import Restarts
from distmp.training.run_directory import RunDirectory, record_start, try_to_write
from distmp.training.run_fingerprint import Changes, changes_since, describe_model, run_fingerprint
from distmp.training.run_lease import DirectoryChoice, RunLease, this_job
from distmp.training.strategy_choice import choose_strategy
from distmp.utils.settings.yaml_files import write_yaml


@dataclass(eq=False)
class Run:
    """A training run on one rank, as `build_run` returns them.

    Attributes:
        config: The configuration.
        world: The ranks.
        console: Prints messages; quiet on all ranks but the first.
        model_and_data: Data, loss, and the model before it was distributed.
        engine: Takes the optimizer steps. The state of the checkpoint, if any, has been loaded.
        fingerprint: Properties of the run that a checkpoint stores, see `run_fingerprint`.
        directory: The directory of the run.
        restarts: Earlier attempts of this job.
        checkpoint: The checkpoint that was loaded; None for a new run.
        progress: Steps and samples up to now.
        lease: On rank 0, the right to write to the directory; None on the others.
    """

    config: RunConfig
    world: World
    console: Console
    model_and_data: ModelAndData
    engine: Engine
    fingerprint: dict[str, Any]
    directory: RunDirectory
    restarts: Restarts
    checkpoint: StoredCheckpoint | None
    progress: Progress
    lease: RunLease | None


def build_run(config: RunConfig, world: World, console: Console, restarts: Restarts) -> Run:
    """Build a run, load its checkpoint, and print a summary. Collective over all ranks.

    Raises:
        DistmpError: On every rank, if some rank cannot run this configuration.
    """
    choice = None
    if world.rank == 0:
        choice = DirectoryChoice(config, this_job(restarts.job()), console.message)
    try:
        return _Builder(config, world, console, restarts, choice).build()
    except BaseException:
        if choice is not None:
            choice.release()
        raise


@dataclass(frozen=True)
class _Builder:
    """Builds a run; on rank 0, `choice` claims its directory."""

    config: RunConfig
    world: World
    console: Console
    restarts: Restarts
    choice: DirectoryChoice | None

    def build(self) -> Run:
        """Return the run; see `build_run`."""
        config, world, ranks = self.config, self.world, self.world.ranks
        parts = ranks.all_or_none(lambda: components.build_model_and_data(config, world))
        checkpoint = self._find_checkpoint()
        progress = Progress() if checkpoint is None else components.stored_progress(checkpoint)
        # Counted before a sharded strategy leaves only a part of each parameter on this rank.
        parameters = _count_parameters(parts.model)
        chosen, reason = choose_strategy(config, parts, world)
        engine = components.build_engine(
            chosen, parts, world, policy=config.precision.policy, load=checkpoint is not None
        )
        if checkpoint is None:
            components.start_from_weights(parts, engine)
        fingerprint = run_fingerprint(config, parts.datasets, world, engine.policy)
        fingerprint |= describe_model(parts.model, config)
        if checkpoint is None and self._freezes_random_weights():
            self.console.message(
                "model.peft: the model has random weights, and they stay frozen; name its weights "
                "with hf:DIRECTORY or model.weights"
            )
        changes = Changes()
        if checkpoint is not None:
            changes = changes_since(checkpoint.state.numbers, fingerprint)
            if not config.resume_force:
                ranks.all_or_none(lambda: changes.refuse(str(checkpoint)))
        run = Run(
            config,
            world,
            self.console,
            parts,
            engine,
            fingerprint,
            self._choose_directory(checkpoint),
            self.restarts,
            checkpoint,
            progress,
            None if self.choice is None else self.choice.lease,
        )
        for line in _summary(run, parameters):
            self.console.message(line)
        if reason:
            self.console.message(f"strategy: {chosen.strategy} ({reason})")
        _record_start(run)
        if checkpoint is not None:
            _continue_from(checkpoint, run, changes)
        if (attempt := self.restarts.describe_attempt(progress.step)) is not None:
            self.console.message(attempt)
        return run

    def _freezes_random_weights(self) -> bool:
        model = self.config.model
        known = model.peft is not None and not model.is_import_path
        return known and components.configured_weights(model) is None

    def _find_checkpoint(self) -> StoredCheckpoint | None:
        """Claim the directory to continue, and return the checkpoint to continue from."""
        config = self.config

        def claim() -> tuple[str, list[str]]:
            assert self.choice is not None
            directory = self.choice.continued(self.restarts.directory)
            is_new = config.resume is None or (config.resume == "auto" and directory is None)
            first = [] if is_new else [str(config.resume)]
            resumes = self.restarts.resumes()
            path = config.run_dir if directory is None else str(directory.path)
            return path, first if resumes is None else resumes

        path, resumes = self.world.ranks.from_rank_0(claim)
        directory = RunDirectory(Path(path), config.checkpoint.path)
        found = (recovery.resolve(resume, directory.checkpoints) for resume in resumes)
        return next((checkpoint for checkpoint in found if checkpoint is not None), None)

    def _choose_directory(self, checkpoint: StoredCheckpoint | None) -> RunDirectory:
        """Return the directory of the run that wrote the checkpoint, or create one, on rank 0."""

        def choose() -> str:
            assert self.choice is not None
            directory = self.restarts.directory or self.choice.final(checkpoint)
            self.restarts.begin(directory, checkpoint)
            return str(directory.path)

        path = self.world.ranks.from_rank_0(choose)
        return RunDirectory(Path(path), self.config.checkpoint.path)


def _summary(run: Run, parameters: str) -> Iterator[str]:
    """Yield lines about the run, with the reason for every automatic choice."""
    config, world, engine, batch = run.config, run.world, run.engine, run.config.batch
    yield f"data: {run.model_and_data.datasets.description}"
    yield (
        f"model: {config.model.name}, {parameters}; "
        f"precision {engine.policy.name} ({engine.policy_reason})"
    )
    if engine.low_precision_matmuls.layers is not None:
        yield f"formats: {describe_formats(engine.low_precision_matmuls.layers)}"
    yield (
        f"ranks: {world.world_size} on {world.device.type}{_backend(world)}, strategy "
        f"{engine.strategy}{f' ({engine.strategy_reason})' if engine.strategy_reason else ''}; "
        f"batch {batch.global_batch_size} = {world.world_size} ranks x "
        f"{run.model_and_data.microbatches} microbatches x {batch.microbatch_size} samples"
    )
    optimizer, optim = engine.optimizer, config.optim
    name = optimizer.describe() if isinstance(optimizer, Muon) else optim.name
    yield f"optimizer: {name}; lr {optim.lr:g}, weight decay {optim.weight_decay:g} of matrices"


def _record_start(run: Run) -> None:
    """Write the configuration and the manifest, and print the directory of the run."""
    config, log, step = run.config, run.console.message, run.progress.step
    log(f"run directory: {run.directory.path}")
    if run.checkpoint is not None:
        log(f"continuing from {run.checkpoint}")
        if step >= config.steps:
            log(
                f"nothing is left to train: the checkpoint is of step {step}, and "
                f"steps = {config.steps}"
            )
    if run.world.rank == 0:
        try_to_write(run.directory.config, lambda path: write_yaml(config, path), log)
    layers = run.engine.low_precision_matmuls.layers
    formats = {} if layers is None else {"low_precision_matmuls": formats_record(layers)}
    record_start(run.directory.manifest, run.world, asdict(config), first_step=step, **formats)


def _continue_from(checkpoint: StoredCheckpoint, run: Run, changes: Changes) -> None:
    """Report what changed since the checkpoint, and load it."""
    if run.progress.step >= run.config.steps or run.config.schedule.name == "constant":
        # A change of `steps` affects the learning rates of later steps; here it does not.
        changes.consequential.pop("steps", None)
    current_phase.enter("loading a checkpoint", transfers=True)
    if run.world.rank == 0:
        changes.report(run.console.message)
    load_checkpoint(run.engine, checkpoint, optimizer="optim.name" not in changes.dangerous)


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
