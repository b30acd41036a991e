"""A whole training run: setup, loop, validation, checkpoints, and what is told about it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distmp.checkpoint import store
from distmp.checkpoint.writer import CheckpointWriter
from distmp.config import RunConfig
from distmp.distributed.progress import COMPARISON, SAVING, activity
from distmp.distributed.stopping import StopSignals, stop_requested_on_any_rank
from distmp.distributed.world import World, all_or_none, from_rank_0
from distmp.engine import rank_consistency
from distmp.engine.outcome import StepOutcome
from distmp.errors import CheckpointError
from distmp.models.architecture import architecture
from distmp.telemetry import (
    Console,
    StepLog,
    StepRecord,
    StepTimer,
    Stragglers,
    draw_curves,
    peak_memory_bytes,
    read_records,
    trackers,
)
from distmp.telemetry.profiling.recorder import StepProfiler
from distmp.telemetry.trackers import Trackers
from distmp.training import manifest, rollback
from distmp.training.accelerate_launch import overruled
from distmp.training.restarts import Restarts
from distmp.training.resume_compat import Changes
from distmp.training.rollback import SpikeAction
from distmp.training.run_directory import RunDirectory, create_run, latest_run
from distmp.training.run_fingerprint import changes_since, origin
from distmp.training.setup import (
    Progress,
    build_engine,
    find_checkpoint,
    prepare,
    restore,
    start_from_weights,
    training_batches,
)
from distmp.training.time_budget import TimeBudget, job_started
from distmp.training.validation import Validation
from distmp.utils import settings


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
        self.out_of_bounds: _OutOfBounds | None = None
        self.rolled_back: dict[str, Any] | None = None
        self.parts = all_or_none(world, lambda: prepare(config, world))
        self.restarts = Restarts.of_this_job(world.world_size, config.checkpoint.path)
        checkpoint = all_or_none(
            world, lambda: self.restarts.checkpoint(lambda: find_checkpoint(config))
        )
        if checkpoint is None:
            all_or_none(world, lambda: start_from_weights(config, self.parts.model))
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
        self.origin = origin(config, self.parts.datasets, world, self.engine.policy)
        self.origin["model"] = architecture(self.parts.model, config.model)
        changes = all_or_none(world, lambda: self._compare(checkpoint))
        self.directory = self._agree_on_directory(checkpoint)
        self._introduce(checkpoint)
        saved_bytes = 0 if config.max_minutes is None else self._state_bytes()
        self.budget = TimeBudget(config.max_minutes, saved_bytes, job_started())
        self.writer = CheckpointWriter(
            config.checkpoint,
            self.directory.checkpoints,
            world,
            timeout_seconds=60 * config.timeout_minutes,
            say=console.message,
            took=self._saved,
        )
        self.writer.guard(self.engine.optimizer)
        if checkpoint is not None:
            activity.enter("loading a checkpoint", transfers=True)
            if world.rank == 0:
                changes.tell(console.message)
            same_optimizer = "optim.name" not in changes.dangerous
            self.progress = all_or_none(
                world, lambda: restore(self.engine, checkpoint, optimizer=same_optimizer)
            )
            saved = self.directory.owns(checkpoint)
            self.writer.resumed(self.progress.step, saved=saved)
        if told := self.restarts.announce(self.progress.step):
            console.message(told)
        self.log = StepLog(
            self.directory.records if world.rank == 0 else None,
            self.progress.step,
            all_or_none(world, self._start_trackers),
            console,
            config.steps,
        )
        self.validation = Validation(config, self.parts, self.engine, world, self._asked)
        self.profiler = StepProfiler(config.profile, self.directory.profile, world, console.message)
        self.stragglers = Stragglers(
            world,
            self.engine.clock,
            self.engine.strategy,
            every=config.log.ranks_every,
            say=console.message,
        )

    def run(self, stop: StopSignals) -> bool:
        """Train to the end or to a request to stop; return whether the end was reached."""
        with closing(self.log):
            with self.writer:
                self.train(stop)
                self._save_now()
            finished = self.progress.step >= self.config.steps and not self.validation.ended_early
            if finished:
                self._save_model()
                self._show_sample()
            else:
                self.console.message(
                    f"stopped after step {self.progress.step} ({self._why_stopped()}); "
                    "continue with --resume auto"
                )
            self._draw_curves()
        self.writer.check()
        if not finished:
            from_rank_0(self.world, self._check_gain)
        return finished

    def train(self, stop: StopSignals) -> None:
        """Run the steps that are left, or those until some rank was asked to stop."""
        self.stop = stop
        if self.config.divergence.rolls_back and self.writer.saved_step is None:
            self._save()
        if self.progress.step == self.config.steps:
            self._validate_again()
        with self.profiler:
            self._train_on()
            while self.out_of_bounds is not None:
                self._roll_back(self.out_of_bounds)
                self._train_on()

    def _train_on(self) -> None:
        """Run steps up to the last one, to a request to stop, or to one that is out of bounds."""
        config, progress = self.config, self.progress
        self.stopping = self.stopping or stop_requested_on_any_rank(self._asked(), self.world.group)
        batches = training_batches(config, self.parts, self.world, progress)
        unread: _Unread | None = None
        first_step = progress.step
        with closing(batches):
            while progress.step < config.steps and not self._has_to_leave():
                with self.timer.paused():
                    self.profiler.before(progress.step + 1)
                activity.begin_step(progress.step + 1, first=progress.step == first_step)
                self._seed_step()
                self.stragglers.before(progress.step + 1)
                outcome = self.engine.step(next(batches), stop=self._asked())
                progress.step += 1
                self.stragglers.after(progress.step, self.timer.paused_seconds)
                progress.samples += config.batch.global_batch_size
                # Where the host runs ahead of the device, the step before has ended by now.
                self._report(unread)
                unread = _Unread(progress.step, progress.samples, outcome, self.timer.lap())
                self.budget.add_step(unread.seconds)
                if self.out_of_bounds is not None:
                    break
                if (
                    config.rank_consistency.every
                    and progress.step % config.rank_consistency.every == 0
                ):
                    self._check_rank_consistency()
                last = progress.step == config.steps
                if last or self._is_due(config.validation.every):
                    self._report(unread, self._validate(last=last))
                    unread = None
                save = not last and self.writer.is_due(progress.step)
                if self.engine.host_waits or save:
                    # A step that was skipped is repeated exactly while the weights stand still.
                    self._report(unread)
                    unread = None
                if save and self.out_of_bounds is None:
                    self._save()
        self.profiler.finish()
        if self.out_of_bounds is None:
            self._report(unread)

    def _has_to_leave(self) -> bool:
        return self.stopping or self.out_of_bounds is not None

    def _asked(self) -> bool:
        """Whether this rank is asked to stop."""
        return self.stop.received is not None or self.budget.is_spent() or self.writer.wants_stop

    def _why_stopped(self) -> str:
        if self.stop.received is not None:
            return signal.Signals(self.stop.received).name
        if self.writer.wants_stop:
            return "a checkpoint could not be written"
        if self.budget.is_spent():
            return f"max_minutes = {self.config.max_minutes:g}"
        return "another rank was asked to"

    def _check_gain(self) -> None:
        """Refuse to be started again, as schedulers do, where that does not get the run further."""
        if self.stop.received == signal.SIGINT:
            return
        seconds = time.time() - job_started()
        cause = f"{self._why_stopped()}, {seconds:.0f} s after the job had begun"
        self.restarts.check_gain(self.directory, self.progress.step, cause)

    def _roll_back(self, found: _OutOfBounds) -> None:
        """Go back to a checkpoint, and on from there with the data behind a step."""
        config, step, rollbacks = self.config, found.unread.step, self.progress.rollbacks
        rollback.check_limit(step, found.spike, rollbacks, config.divergence)
        activity.enter("going back to a checkpoint", transfers=True)
        self.writer.finish()
        checkpoint = rollback.checkpoint_before(self.directory.checkpoints, step)
        guard = self.engine.divergence
        # What the guard has learned it keeps: early in a run it would be in its warm-up again.
        learned = {name: value.clone() for name, value in guard.state_dict().items()}
        self.progress = all_or_none(self.world, lambda: restore(self.engine, checkpoint))
        guard.load_state_dict(learned)
        first = self.progress.samples
        self.progress.samples = found.unread.samples + (
            config.divergence.skip_data_steps * config.batch.global_batch_size
        )
        self.progress.rollbacks = rollbacks + 1
        self.progress.rolled_back_to = self.progress.step
        self.out_of_bounds = None
        self.writer.resumed(self.progress.step, saved=False)
        # Whatever happens from now on, the run does not come to that place again.
        self._save_now()
        self.log.rewind(self.progress.step)
        self.rolled_back = {
            "from_step": step,
            "to_step": self.progress.step,
            "problem": found.spike.problem,
            "samples_skipped": self.progress.samples - first,
        }
        self.console.message(
            f"step {step}: {found.spike.problem}; back to step {self.progress.step}, and on with "
            f"sample {self.progress.samples} in place of {first} (rollback "
            f"{self.progress.rollbacks} of at most {config.divergence.max_rollbacks})"
        )

    def _validate_again(self) -> None:
        """Do the last validation of a run that is at its end: it may have been left off before."""
        loss = self._validate(last=True)
        if loss is not None:
            self.log.add_validation(self.progress.step, loss)

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
        activity.enter("results of the step")
        numbers = unread.outcome.numbers
        with self.timer.paused():
            report = self.engine.explain(unread.outcome)
        spike = rollback.look(numbers, self.config.divergence)
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
            divergence=self._divergence_record(spike),
            rank_seconds=self.stragglers.seconds(unread.step),
        )
        self.log.write(record)
        if report is not None:
            self.console.message(f"step {unread.step} skipped: {report}")
        if numbers.dropped:
            self.console.message(
                f"step {unread.step}: {numbers.dropped} microbatches left out, their gradients "
                "were not finite"
            )
        if spike is not None and spike.action != "rollback":
            self.console.message(
                f"step {unread.step}{' skipped' if numbers.skipped else ''}: {spike.problem}"
            )
        self.stopping = self.stopping or numbers.stop
        self.engine.check(unread.outcome)
        if spike is not None and spike.action == "rollback" and self.out_of_bounds is None:
            self.out_of_bounds = _OutOfBounds(unread, spike)

    def _divergence_record(self, spike: SpikeAction | None) -> dict[str, Any] | None:
        """Return what the guard has found, and in the first step after a rollback where from."""
        found = {} if spike is None else spike.to_record()
        if self.rolled_back is not None:
            found["rolled_back"], self.rolled_back = self.rolled_back, None
        return found or None

    def _check_rank_consistency(self) -> None:
        activity.enter(COMPARISON)
        with self.timer.paused():
            rank_consistency.check(self.engine, self.config.rank_consistency.on_difference)

    def _validate(self, *, last: bool) -> float | None:
        """Return the mean loss on held-out data, or None where there is none."""
        settings = self.config.validation
        with self.timer.paused():
            loss = self.validation.loss(settings.final_samples if last else settings.samples)
        self.stopping = self.stopping or self.validation.ended_early
        if last and loss is not None:
            unit = "byte" if self.config.data.source == "text" else "unit of weight"
            self.console.message(f"held-out loss {loss:.4f} nats per {unit}")
        return loss

    def _show_sample(self) -> None:
        activity.enter("writing a sample")
        text = self.validation.sample()
        if text is not None:
            self.console.message(f"a sample of what it writes:\n{text}")

    def _draw_curves(self) -> None:
        activity.enter("drawing curves")
        if self.world.rank == 0 and self.config.log.curves:
            self._try_to_write(
                self.directory.curves,
                lambda path: draw_curves(read_records(self.directory.records), path),
            )

    def _agree_on_directory(self, checkpoint: store.Location | None) -> RunDirectory:
        """Continue in the folder that the checkpoint belongs to, or make one; rank 0 decides."""
        place = self.config.checkpoint.path

        def choose() -> str:
            directory = self.restarts.directory or choose_anew()
            self.restarts.begin(directory, checkpoint)
            return str(directory.path)

        def choose_anew() -> RunDirectory:
            newest = latest_run(self.config.run_dir, place)
            if checkpoint is not None and newest is not None and newest.owns(checkpoint):
                newest.path.mkdir(parents=True, exist_ok=True)
                return newest
            return create_run(self.config.run_dir, place)

        return RunDirectory(Path(from_rank_0(self.world, choose)), place)

    def _introduce(self, checkpoint: store.Location | None) -> None:
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
            self._try_to_write(
                self.directory.config, lambda path: settings.write_yaml(self.config, path)
            )
        manifest.record(
            self.directory.manifest,
            self.world,
            settings.to_mapping(self.config),
            first_step=0 if checkpoint is None else store.read_numbers(checkpoint).get("step", 0),
        )

    def _try_to_write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file that training can do without; say so if the disk does not take it."""
        try:
            write(path)
        except OSError as error:
            self.console.message(f"cannot write {path}: {error}; the run goes on without it")

    def _compare(self, checkpoint: store.Location | None) -> Changes:
        """Return what has changed since the checkpoint, unless it makes another run of it."""
        if checkpoint is None:
            return Changes()
        changes = changes_since(store.read_numbers(checkpoint), self.origin)
        if not self.config.resume_force:
            changes.refuse(str(checkpoint))
        return changes

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
        activity.enter(SAVING, transfers=True)
        with self.timer.paused():
            self.writer.save(
                self.progress.step,
                self.engine.state_dict(),
                self._numbers(),
                self.engine.held_until_update(),
            )

    def _save_now(self) -> None:
        activity.enter(SAVING, transfers=True)
        self.writer.save_now(self.progress.step, self.engine.state_dict(), self._numbers())

    def _saved(self, seconds: float) -> None:
        """Take note of a save that has ended."""
        self.budget.add_save(seconds)
        self.restarts.note_saved()

    def _numbers(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.progress), **self.origin}

    def _state_bytes(self) -> int:
        return sum(value.nbytes for value in self.engine.state_dict().values())

    def _save_model(self) -> None:
        """Save a Hugging Face model for others to load; the FP32 weights, whatever trained them."""
        if not self.config.model.is_hugging_face:
            return
        # Imported here: most runs have no use for it.
        from distmp.export.export import live_weights, write

        activity.enter("saving the model", transfers=True)
        folder, writes = self.directory.model, self.world.rank == 0
        weights = live_weights(self.engine.state_dict(), keep=writes)
        if not writes:
            return
        try:
            write(folder, weights, self.origin["model"], torch.float32)
        except CheckpointError as error:
            self.console.message(f"{error}; distmp export writes it from the checkpoint")
        else:
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
    spike: SpikeAction
