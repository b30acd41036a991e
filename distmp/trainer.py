"""A whole training run: setup, loop, validation, checkpoints, and what is told about it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distmp import rollback, settings
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
from distmp.parallel.world import World, all_or_none, from_rank_0
from distmp.precision import PolicyLike
from distmp.rollback import Finding
from distmp.run_directory import RunDirectory, create_run, latest_run
from distmp.scaling import lockstep
from distmp.stopping import StopSignals, asked_on_some_rank, until_asked
from distmp.telemetry import (
    Console,
    Overlap,
    RecordWriter,
    StepProfiler,
    StepRecord,
    StepTimer,
    draw_curves,
    peak_memory_bytes,
    read_records,
    trackers,
)
from distmp.telemetry.trackers import Trackers
from distmp.time_budget import TimeBudget, job_started


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
        samples: Samples consumed by all ranks together, or passed over by a rollback.
        rollbacks: How often the run has gone back to a checkpoint.
        rolled_back_to: The step that it went back to the last time.
    """

    step: int = 0
    samples: int = 0
    rollbacks: int = 0
    rolled_back_to: int | None = None


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
        self.stop = StopSignals()
        self.stopping = False
        self.validation_left_off = False
        self.out_of_bounds: _OutOfBounds | None = None
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
        # The step whose checkpoint this run has in its folder and in memory alike.
        self.saved_step: int | None = None
        if checkpoint is not None:
            self.progress = all_or_none(world, lambda: restore(self.engine, checkpoint))
            if self.directory.owns(checkpoint):
                self.saved_step = self.progress.step
        self.records = (
            RecordWriter(self.directory.records, resume_after_step=self.progress.step)
            if world.rank == 0
            else None
        )
        self.trackers = all_or_none(world, self._start_trackers)
        self.rolled_back: dict[str, Any] | None = None
        self.budget = TimeBudget(config.max_minutes, self._state_bytes(), job_started())

    def run(self, stop: StopSignals) -> bool:
        """Train to the end or to a request to stop; return whether the end was reached."""
        with closing(self.trackers):
            self.train(stop)
        if self.saved_step != self.progress.step:
            self._save()
        finished = self.progress.step >= self.config.steps and not self.validation_left_off
        if finished:
            self._save_model()
            self._show_sample()
        else:
            self.console.message(
                f"stopped after step {self.progress.step} ({self._why_stopped()}); "
                "continue with --resume auto"
            )
        self._draw_curves()
        if self.records is not None:
            self.records.close()
        return finished

    def train(self, stop: StopSignals) -> None:
        """Run the steps that are left, or those until some rank was asked to stop."""
        self.stop = stop
        if self.config.divergence.rolls_back and self.saved_step is None:
            self._save()
        if self.progress.step == self.config.steps:
            self._validate_again()
        self._train_on()
        while self.out_of_bounds is not None:
            self._roll_back(self.out_of_bounds)
            self._train_on()

    def _train_on(self) -> None:
        """Run steps up to the last one, to a request to stop, or to one that is out of bounds."""
        config, progress = self.config, self.progress
        self.stopping = self.stopping or asked_on_some_rank(self._asked(), self.world.group)
        batches = training_batches(config, self.parts, self.world, progress)
        profiler = StepProfiler(config.profile, self.directory.profile, self.world.rank)
        unread: _Unread | None = None
        with closing(batches):
            while progress.step < config.steps and not self._has_to_leave():
                self._seed_step()
                profiler.before(progress.step + 1)
                outcome = self.engine.step(next(batches), stop=self._asked())
                progress.step += 1
                self._report_profile(profiler.after(progress.step))
                progress.samples += config.batch.global_batch_size
                # Where the host runs ahead of the device, the step before has ended by now.
                self._report(unread)
                unread = _Unread(progress.step, progress.samples, outcome, self.timer.lap())
                self.budget.add_step(unread.seconds)
                if self.out_of_bounds is not None:
                    break
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
                if self._is_due(config.checkpoint.every) and self.out_of_bounds is None:
                    self._save()
        self._report_profile(profiler.close())
        if self.out_of_bounds is None:
            self._report(unread)

    def _has_to_leave(self) -> bool:
        return self.stopping or self.out_of_bounds is not None

    def _asked(self) -> bool:
        """Whether this rank is asked to stop."""
        return self.stop.received is not None or self.budget.is_spent()

    def _why_stopped(self) -> str:
        if self.stop.received is not None:
            return signal.Signals(self.stop.received).name
        if self.budget.is_spent():
            return f"max_minutes = {self.config.max_minutes:g}"
        return "another rank was asked to"

    def _roll_back(self, found: _OutOfBounds) -> None:
        """Go back to a checkpoint, and on from there with the data behind a step."""
        config, step, rollbacks = self.config, found.unread.step, self.progress.rollbacks
        rollback.check_limit(step, found.finding, rollbacks, config.divergence)
        checkpoints = self.directory.checkpoints
        checkpoint = Path(
            from_rank_0(self.world, lambda: str(rollback.checkpoint_before(checkpoints, step)))
        )
        guard = self.engine.divergence
        # What the guard has learned it keeps: early in a run it would be in its warm-up again.
        learned = {name: value.clone() for name, value in guard.state_dict().items()}
        self.progress = all_or_none(self.world, lambda: restore(self.engine, checkpoint))
        guard.load_state_dict(learned)
        first = self.progress.samples
        self.progress.samples = found.unread.samples + (
            config.divergence.pass_over * config.batch.global_batch_size
        )
        self.progress.rollbacks = rollbacks + 1
        self.progress.rolled_back_to = self.progress.step
        self.out_of_bounds = None
        # Whatever happens from now on, the run does not come to that place again.
        self._save()
        if self.records is not None:
            self.records.close()
            self.records = RecordWriter(
                self.directory.records, resume_after_step=self.progress.step
            )
        self.rolled_back = {
            "from_step": step,
            "to_step": self.progress.step,
            "problem": found.finding.problem,
            "samples_passed_over": self.progress.samples - first,
        }
        self.console.message(
            f"step {step}: {found.finding.problem}; back to step {self.progress.step}, and on with "
            f"sample {self.progress.samples} in place of {first} (rollback "
            f"{self.progress.rollbacks} of at most {config.divergence.max_rollbacks})"
        )

    def _validate_again(self) -> None:
        """Do the last validation of a run that is at its end: it may have been left off before."""
        loss = self._validate(last=True)
        if self.records is not None and loss is not None:
            self.records.close()
            records = read_records(self.directory.records)
            self.records = RecordWriter(
                self.directory.records, resume_after_step=self.progress.step - 1
            )
            if records and records[-1].step == self.progress.step:
                self.records.write(dataclasses.replace(records[-1], validation_loss=loss))

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
        finding = rollback.look(numbers, self.config.divergence)
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
            divergence=self._divergence_record(finding),
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
        if finding is not None and finding.action != "rollback":
            self.console.message(
                f"step {unread.step}{' skipped' if numbers.skipped else ''}: {finding.problem}"
            )
        self.stopping = self.stopping or numbers.stop
        self.engine.check(unread.outcome)
        if finding is not None and finding.action == "rollback" and self.out_of_bounds is None:
            self.out_of_bounds = _OutOfBounds(unread, finding)

    def _divergence_record(self, finding: Finding | None) -> dict[str, Any] | None:
        """Return what the guard has found, and in the first step after a rollback where from."""
        found = {} if finding is None else finding.to_record()
        if self.rolled_back is not None:
            found["rolled_back"], self.rolled_back = self.rolled_back, None
        return found or None

    def _check_lockstep(self) -> None:
        with self.timer.paused():
            lockstep.check(self.engine, self.config.lockstep.on_difference)

    def _validate(self, *, last: bool) -> float | None:
        """Return the mean loss on held-out data, or None where there is none."""
        if self.parts.datasets.validation is None:
            return None
        settings = self.config.validation
        batches = until_asked(
            evaluation_batches(
                self.parts.datasets.validation,
                samples=settings.final_samples if last else settings.samples,
                microbatch_size=self.config.batch.microbatch_size,
                rank=self.world.rank,
                world_size=self.world.world_size,
            ),
            self._asked,
            self.world.group,
        )
        with self.timer.paused():
            loss = self.engine.evaluate(batches)
        if batches.left_off:
            self.stopping = True
            self.validation_left_off = last
            return None
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
            newest = latest_run(self.config.run_dir)
            if checkpoint is not None and newest is not None and newest.owns(checkpoint):
                return str(newest.path)
            return str(create_run(self.config.run_dir).path)

        return RunDirectory(Path(from_rank_0(self.world, choose)))

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
        with self.timer.paused(), self.budget.saving():
            store.save(
                self.directory.checkpoints,
                self.progress.step,
                self.engine.state_dict(),
                dataclasses.asdict(self.progress),
                keep=self.config.checkpoint.keep,
            )
        self.saved_step = self.progress.step

    def _state_bytes(self) -> int:
        return sum(value.nbytes for value in self.engine.state_dict().values())

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


class _OutOfBounds(NamedTuple):
    """A step that the run has to go back from."""

    unread: _Unread
    finding: Finding


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
        divergence=config.divergence,
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
    known = {field.name for field in dataclasses.fields(Progress)}
    return Progress(**{name: number for name, number in numbers.items() if name in known})
