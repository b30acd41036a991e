"""A whole training run: setup, loop, validation, checkpoints, and what is told about it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distmp import manifest, settings
from distmp.checkpoint import store
from distmp.config import RunConfig
from distmp.data.build import Datasets, build_datasets
from distmp.data.loading import Batch, evaluation_batches, step_batches
from distmp.data.order import microbatches_per_rank
from distmp.data.text import decode, encode
from distmp.engine import Engine
from distmp.launcher.accelerate import overruled
from distmp.models import huggingface
from distmp.models.build import Loss, build_loss, build_model
from distmp.models.sampling import generate
from distmp.optim.build import optimizer_factory, schedule_factory
from distmp.outcome import StepOutcome
from distmp.parallel.reproducible import check_power_of_two
from distmp.parallel.world import World, all_or_none
from distmp.precision import PolicyLike
from distmp.run_directory import RunDirectory, create_run, latest_run
from distmp.scaling import lockstep
from distmp.stopping import StopSignals
from distmp.telemetry import (
    Console,
    Overlap,
    RecordWriter,
    StepProfiler,
    StepRecord,
    StepTimer,
    Stragglers,
    draw_curves,
    peak_memory_bytes,
    read_records,
    trackers,
)
from distmp.telemetry.trackers import Trackers


class Parts(NamedTuple):
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
        samples: Samples consumed by all ranks together.
    """

    step: int = 0
    samples: int = 0


class Trainer:
    """Carries out one `RunConfig` on the ranks of `world`.

    Args:
        config: What to do.
        world: The ranks, this one among them.
        console: Where to say what happens; a quiet one on all ranks but the first.

    Raises:
        SetupError: On every rank, if some rank cannot do what is configured.
    """

    def __init__(self, config: RunConfig, world: World, console: Console) -> None:
        self.config = config
        self.world = world
        self.console = console
        self.progress = Progress()
        self.timer = StepTimer()
        self.stopping = False
        self.parts = all_or_none(world, lambda: prepare(config, world))
        # Counted before some strategy leaves only a part of each on this rank.
        self.parameters = sum(parameter.numel() for parameter in self.parts.model.parameters())
        self.engine = all_or_none(
            world,
            lambda: build_engine(
                config,
                self.parts,
                world,
                policy=config.precision.policy,
                attribution=config.precision.attribution,
            ),
        )
        checkpoint = all_or_none(world, lambda: find_checkpoint(config))
        self.directory = self._agree_on_directory(checkpoint)
        self._introduce(checkpoint)
        if checkpoint is not None:
            self.progress = all_or_none(world, lambda: restore(self.engine, checkpoint))
        self.records = (
            RecordWriter(self.directory.records, resume_after_step=self.progress.step)
            if world.rank == 0
            else None
        )
        self.trackers = all_or_none(world, self._start_trackers)
        self.stragglers = Stragglers(
            world,
            self.engine.clock,
            self.engine.strategy,
            every=config.log.ranks_every,
            say=console.message,
        )

    def run(self, stop: StopSignals) -> bool:
        """Train to the end or to a request to stop; return whether the end was reached."""
        with closing(self.trackers):
            self.train(stop)
        self._save()
        finished = self.progress.step >= self.config.steps
        if finished:
            self._save_model()
            self._show_sample()
        else:
            self.console.message(
                f"stopped after step {self.progress.step}; continue with --resume auto"
            )
        self._draw_curves()
        if self.records is not None:
            self.records.close()
        return finished

    def train(self, stop: StopSignals) -> None:
        """Run the steps that are left, or those until some rank was asked to stop."""
        config, progress = self.config, self.progress
        batches = training_batches(config, self.parts, self.world, progress)
        profiler = StepProfiler(config.profile, self.directory.profile, self.world.rank)
        unread: _Unread | None = None
        with closing(batches):
            while progress.step < config.steps and not self.stopping:
                self._seed_step()
                profiler.before(progress.step + 1)
                self.stragglers.before(progress.step + 1)
                outcome = self.engine.step(next(batches), stop=stop.received is not None)
                progress.step += 1
                self.stragglers.after(progress.step, self.timer.paused_seconds)
                self._report_profile(profiler.after(progress.step))
                progress.samples += config.batch.global_batch_size
                # Where the host runs ahead of the device, the step before has ended by now.
                self._report(unread)
                unread = _Unread(progress.step, progress.samples, outcome, self.timer.lap())
                if config.lockstep.every and progress.step % config.lockstep.every == 0:
                    self._check_lockstep()
                last = progress.step == config.steps
                if last or self._is_due(config.validation.every):
                    self._report(unread, self._validate(last=last))
                    unread = None
                if self.engine.host_waits or self._is_due(config.checkpoint.every):
                    # A step that was skipped is repeated exactly while the weights stand still.
                    self._report(unread)
                    unread = None
                if self._is_due(config.checkpoint.every):
                    self._save()
        self._report_profile(profiler.close())
        self._report(unread)

    def _report_profile(self, overlap: Overlap | None) -> None:
        if overlap is not None:
            self.console.message(f"profile: {self.directory.profile}; {overlap}")

    def _seed_step(self) -> None:
        """Make dropout and the like a function of the seed and the position, as the data is."""
        # A reproducible engine draws from it per microbatch, and every rank must start alike.
        rank = 0 if self.config.reproducible else self.world.rank
        key = f"{self.config.seed} {self.progress.samples} {rank}"
        digest = hashlib.sha256(key.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big"))

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return every > 0 and step % every == 0 and step < self.config.steps

    def _report(self, unread: _Unread | None, validation_loss: float | None = None) -> None:
        """Read a step's numbers, record them, and draw the conclusions that all ranks draw."""
        if unread is None:
            return
        numbers = unread.outcome.numbers
        with self.timer.paused():
            report = self.engine.explain(unread.outcome)
        record = StepRecord(
            step=unread.step,
            samples=unread.samples,
            loss=numbers.loss,
            weight=numbers.weight,
            grad_norm=numbers.grad_norm,
            learning_rate=numbers.learning_rate,
            loss_scale=numbers.loss_scale,
            skipped=numbers.skipped,
            dropped=numbers.dropped,
            skipped_total=numbers.skipped_total,
            applied_total=numbers.applied_total,
            tokens_per_second=numbers.weight / unread.seconds,
            step_seconds=unread.seconds,
            memory_bytes=peak_memory_bytes(self.world.device),
            validation_loss=validation_loss,
            overflow=None if report is None else report.to_record(),
            rank_seconds=self.stragglers.seconds(unread.step),
        )
        if self.records is not None:
            self.records.write(record)
        self.trackers.write(record)
        self.console.step(record, self.config.steps)
        if report is not None:
            self.console.message(f"step {unread.step} skipped: {report}")
        if numbers.dropped:
            self.console.message(
                f"step {unread.step}: {numbers.dropped} microbatches left out, their gradients "
                "were not finite"
            )
        self.stopping = self.stopping or numbers.stop
        self.engine.check(unread.outcome)

    def _check_lockstep(self) -> None:
        with self.timer.paused():
            lockstep.check(self.engine, self.config.lockstep.on_difference)

    def _validate(self, *, last: bool) -> float | None:
        """Return the mean loss on held-out data, or None where there is none."""
        if self.parts.datasets.validation is None:
            return None
        settings = self.config.validation
        with self.timer.paused():
            loss = self.engine.evaluate(
                evaluation_batches(
                    self.parts.datasets.validation,
                    samples=settings.final_samples if last else settings.samples,
                    microbatch_size=self.config.batch.microbatch_size,
                    rank=self.world.rank,
                    world_size=self.world.world_size,
                )
            )
        if last:
            unit = "byte" if self.config.data.source == "text" else "unit of weight"
            self.console.message(f"held-out loss {loss:.4f} nats per {unit}")
        return loss

    def _show_sample(self) -> None:
        # The loss `next_token` says that the model turns token ids into logits.
        writes_text = self.config.data.source == "text" and self.config.model.loss == "next_token"
        if writes_text and self.config.sample.length > 0:
            self.console.message(f"a sample of what it writes:\n{self._sample()}")

    def _sample(self) -> str:
        prompt = encode(self.config.sample.prompt).to(self.world.device)
        # Every rank writes the same text, because the forward of a sharded model needs all ranks.
        tokens = generate(
            self.engine.module,
            prompt,
            count=self.config.sample.length,
            sequence_length=self.config.data.sequence_length,
            temperature=self.config.sample.temperature,
            generator=torch.Generator().manual_seed(self.config.seed),
        )
        return decode(tokens)

    def _draw_curves(self) -> None:
        if self.records is not None and self.config.log.curves:
            draw_curves(read_records(self.directory.records), self.directory.curves)

    def _agree_on_directory(self, checkpoint: Path | None) -> RunDirectory:
        """Continue in the folder that the checkpoint belongs to, or make one; rank 0 decides."""

        def choose() -> str:
            if self.world.rank != 0:
                return ""
            newest = latest_run(self.config.run_dir)
            if checkpoint is not None and newest is not None and newest.owns(checkpoint):
                return str(newest.path)
            return str(create_run(self.config.run_dir).path)

        chosen = [all_or_none(self.world, choose)]
        if self.world.group is not None:
            dist.broadcast_object_list(chosen, src=0, group=self.world.group)
        return RunDirectory(Path(chosen[0]))

    def _introduce(self, checkpoint: Path | None) -> None:
        """Say what is about to run, with the reason of every automatic choice."""
        engine, batch = self.engine, self.config.batch
        say = self.console.message
        say(f"data: {self.parts.datasets.description}")
        say(
            f"model: {self.config.model.name}, {self.parameters:,} parameters; "
            f"precision {engine.policy.name} ({engine.policy_reason})"
        )
        say(
            f"ranks: {self.world.world_size} on {self.world.device.type}, strategy "
            f"{engine.strategy}{f' ({engine.strategy_reason})' if engine.strategy_reason else ''}; "
            f"batch {batch.global_batch_size} = {self.world.world_size} ranks x "
            f"{self.parts.microbatches} microbatches x {batch.microbatch_size} samples"
        )
        for line in overruled(os.environ, engine.policy, engine.strategy):
            say(line)
        say(f"run directory: {self.directory.path}")
        if checkpoint is not None:
            say(f"continuing from {checkpoint}")
        if self.world.rank == 0:
            settings.write_yaml(self.config, self.directory.config)
        manifest.record(self.directory.manifest, self.world, settings.to_mapping(self.config))

    def _start_trackers(self) -> Trackers:
        log = self.config.log
        return trackers.start(
            log.trackers if self.world.rank == 0 else (),
            log.tracker_options,
            project=log.project,
            directory=self.directory.path,
            hyperparameters=settings.to_mapping(self.config),
            after_step=self.progress.step,
            complain=self.console.message,
        )

    def _save(self) -> None:
        with self.timer.paused():
            store.save(
                self.directory.checkpoints,
                self.progress.step,
                self.engine.state_dict(),
                {"step": self.progress.step, "samples": self.progress.samples},
                keep=self.config.checkpoint.keep,
            )

    def _save_model(self) -> None:
        """Save a Hugging Face model for others to load; the FP32 weights, whatever trained them."""
        if not self.config.model.is_hugging_face:
            return
        prefix = "model/"
        state = self.engine.state_dict().items()
        weights = [(k.removeprefix(prefix), v) for k, v in state if k.startswith(prefix)]
        folder = self.directory.model
        huggingface.save(folder, self.parts.model, weights, writes=self.world.rank == 0)
        self.console.message(f"model in the format of Hugging Face: {folder}")


class _Unread(NamedTuple):
    """A step whose numbers have not been read yet."""

    step: int
    samples: int
    outcome: StepOutcome
    seconds: float


def prepare(config: RunConfig, world: World) -> Parts:
    """Build everything that needs no other rank.

    Raises:
        ConfigError: If data, model or batch cannot be had as configured.
    """
    microbatches = microbatches_per_rank(
        config.batch.global_batch_size, config.batch.microbatch_size, world.world_size
    )
    if config.reproducible:
        check_power_of_two(microbatches)
    datasets = build_datasets(config.data)
    torch.manual_seed(config.seed)
    model = build_model(config.model, datasets.vocabulary_size, config.data.sequence_length)
    return Parts(datasets, model, build_loss(config.model), microbatches)


def build_engine(
    config: RunConfig,
    parts: Parts,
    world: World,
    *,
    policy: PolicyLike,
    attribution: bool,
) -> Engine:
    """Build the engine of a configuration.

    Args:
        config: The settings of optimizer, schedule, strategy and loss scale.
        parts: What `prepare` returned.
        world: The ranks, which all have to call it.
        policy: What is computed in which type.
        attribution: Whether the engine keeps what `Engine.explain` needs.

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
        device=world.device,
    )


def training_batches(
    config: RunConfig, parts: Parts, world: World, progress: Progress
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


def find_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint to continue from, or None for a run that starts anew.

    Raises:
        CheckpointError: If there is none where `resume` says.
    """
    if config.resume is None:
        return None
    directory = latest_run(config.run_dir) or RunDirectory(Path(config.run_dir))
    return store.resolve(config.resume, directory.checkpoints)


def restore(engine: Engine, checkpoint: Path) -> Progress:
    """Load a checkpoint into an engine; return where the run stood. Every rank has to call it.

    Raises:
        CheckpointError: If it cannot be read, or does not fit the engine.
    """
    engine.prepare_to_load(store.stored_tensors(checkpoint))
    state = engine.state_dict()
    store.load(checkpoint, state)
    engine.load_state_dict(state)
    numbers: dict[str, Any] = store.read_numbers(checkpoint)
    return Progress(numbers["step"], numbers["samples"])
