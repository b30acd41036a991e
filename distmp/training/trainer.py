"""The training loop. Features around its steps are callbacks, see `distmp.training.callbacks`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from distmp.checkpoint import recovery
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig
from distmp.data.streams import Step
from distmp.distributed.orphans import is_orphan
from distmp.distributed.progress import current_phase
from distmp.distributed.stopping import StopSignals, stop_requested_on_any_rank
from distmp.distributed.world import World
from distmp.errors import LostPeerError, TrainingError
from distmp.telemetry.console import Console
from distmp.telemetry.measurements import StepTimer
from distmp.training.callbacks import Callback, PendingStep, StepResult, TrainingLoop
from distmp.training.callbacks.callback import Rollback, action_for
from distmp.training.callbacks.checkpointing import CallbackStates, Checkpointing
from distmp.training.callbacks.order import check_hooks, in_order, load_callbacks
from distmp.training.callbacks.stopping import EarlyStopping
from distmp.training.callbacks.validation import Validation
from distmp.training.components import Progress, restore, training_batches
from distmp.training.restarts import Restarts
from distmp.training.run import build_run
from distmp.utils.generators import seed_generators
from distmp.utils.imports import parse_entries

MAX_ROLLBACKS = 5


def checkpoint_before(directory: Path, step: int) -> StoredCheckpoint:
    """Return the checkpoint to go back to from `step`. Collective over all ranks.

    This is the latest healthy one of an earlier step. If the run went back to that one before and
    has not reached another checkpoint since, it is the one before it, where there is one.

    Args:
        directory: Holds the checkpoints of the run.
        step: The step that is out of bounds, or that after the last checkpoint of the run.

    Raises:
        TrainingError: On every rank, if there is none.
    """
    latest = recovery.usable(directory, before=step).checkpoint
    if latest is None:
        problem = f"has no healthy checkpoint before step {step} to roll back to"
        raise TrainingError(f"{directory} {problem}")
    numbers = latest.state.numbers
    if numbers.get("rolled_back_to") != numbers["step"]:
        return latest
    return recovery.usable(directory, before=numbers["step"]).checkpoint or latest


class Trainer(TrainingLoop):
    """Runs one `RunConfig` on the ranks of `world`.

    Args:
        config: The configuration of the run.
        world: The ranks.
        console: Prints messages; quiet on all ranks but the first.
        callbacks: Called after those of `config.callbacks`. Every rank passes the same ones.
        restarts: Earlier attempts of this job; None reads them from the launcher's store.

    Attributes:
        callbacks: All callbacks, in the order in which they are called.
        checkpointing: The callback that saves.
        For the others see `distmp.training.callbacks.TrainingLoop`.

    Raises:
        DistmpError: On every rank, if some rank cannot run this configuration.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        console: Console,
        callbacks: Sequence[Callback] = (),
        restarts: Restarts | None = None,
    ) -> None:
        if restarts is None:
            restarts = Restarts.of_this_job(world.world_size, config.checkpoint.path)
        entries = parse_entries("callbacks", config.callbacks)
        configured = world.ranks.all_or_none(lambda: load_callbacks(entries))
        self._users_callbacks = [*configured, *callbacks]
        world.ranks.all_or_none(lambda: check_hooks(self._users_callbacks))
        super().__init__(**vars(build_run(config, world, console, restarts)))
        self.timer = StepTimer()
        self.states = CallbackStates(quiet=world.rank != 0)
        self.checkpointing = Checkpointing(self, self.states)
        self.callbacks = in_order(self, self.checkpointing, self._users_callbacks)
        options = [entry.options for entry in entries]
        self.states.register(self.callbacks, dict(zip(map(id, configured), options, strict=True)))
        self.pending: PendingStep | None = None
        self.rollback_from: StepResult | None = None
        self._stop = StopSignals()
        self._stopping = False
        self._asked_by: str | None = None  # why this rank was asked to stop
        self._unfinished = False
        # Why the run ends early and counts as finished; None if it does not.
        self._finished_early: str | None = None
        # The samples of the next steps; None before and after these.
        self._batches: Generator[Step, None, None] | None = None

    def run(self, stop: StopSignals) -> bool:
        """Train until the last step or a request to stop; return whether all steps are done."""
        with self.active(stop):
            self.train()
            for callback in self._each("on_train_end"):
                callback.on_train_end(self, finished=self._is_finished())
            finished, step = self._is_finished(), self.progress.step
            if finished and self._finished_early is not None:
                self.console.message(f"finished after step {step}: {self._finished_early}")
            elif not finished:
                reason = self._asked_by or "another rank was asked to stop"
                advice = "continue with --resume auto"
                self.console.message(f"stopped after step {step} ({reason}); {advice}")
        return finished

    def _is_finished(self) -> bool:
        all_done = self.progress.step >= self.config.steps or self._finished_early is not None
        return all_done and not self._unfinished

    @contextmanager
    def active(self, stop: StopSignals) -> Iterator[None]:
        """Call `on_train_begin` of all callbacks, and at the end `on_exit`, also after an error.

        Args:
            stop: Receives requests to stop.
        """
        self._stop = stop
        with ExitStack() as exits:
            if self.lease is not None:
                exits.callback(self.lease.release)
            # The last one that is pushed exits first.
            for callback in reversed(self._in_order("on_exit")):
                exits.push(self._exit_of(callback))
            for callback in self._each("setup"):
                callback.setup(self)
            self.world.ranks.all_or_none(self.states.check)
            if self.checkpoint is not None:
                self.states.restore(self.checkpoint, self.console.message)
                self.checkpoint = None
            # Workers are forked from this process before a callback reads samples in it: they would
            # share the positions of files that the dataset has opened.
            self._batches = self._load()
            exits.callback(setattr, self, "_batches", None)  # ends its workers
            for callback in self._each("on_train_begin"):
                callback.on_train_begin(self)
            yield

    def _exit_of(self, callback: Callback) -> Callable[..., None]:
        def leave(_kind: object, error: BaseException | None, _traceback: object) -> None:
            failed_in = current_phase.now
            self._enter_hook("on_exit", callback)
            callback.on_exit(self, error)
            if error is not None:  # its message contains the phase in which it was raised
                current_phase.now = failed_in

        return leave

    def train(self) -> None:
        """Run the remaining steps, or until any rank has a request to stop."""
        self._train_steps()
        while self.rollback_from is not None:
            with self.timer.paused():
                self._roll_back(self.rollback_from)
            self._train_steps()

    def _train_steps(self) -> None:
        """Run steps up to the last one, to a request to stop, or to one that is out of bounds."""
        self._stopping = self._stopping or stop_requested_on_any_rank(
            self.is_asked_to_stop(), self.world.group
        )
        batches, self._batches = self._batches or self._load(), None
        first = True
        with closing(batches), self.engine.batches.explaining():
            while self.progress.step < self.config.steps:
                if self._stopping or self.rollback_from is not None:
                    break
                self._begin_step(first=first)
                first = False
                outcome = self.engine.step(next(batches).microbatches, stop=self.is_asked_to_stop())
                self.progress.step += 1
                self.progress.samples += self.config.batch.global_batch_size
                # The previous step: if the host does not wait for the device, it has ended by now.
                self.read_step()
                self.pending = launched = PendingStep(
                    self.progress.step, self.progress.samples, outcome, self.timer.lap()
                )
                if self.rollback_from is not None:
                    break
                for callback in self._each("on_step_launched"):
                    callback.on_step_launched(self, launched)
                if self.engine.host_waits or launched.validation_loss is not None:
                    # The host has waited already, and a skipped step can be replayed only before
                    # the weights change.
                    self.read_step()
        if self.rollback_from is None:
            self.read_step()

    def _load(self) -> Generator[Step, None, None]:
        return training_batches(self.config, self.model_and_data, self.world, self.progress)

    def _begin_step(self, *, first: bool) -> None:
        step = self.progress.step + 1
        # What callbacks draw is a function of the seed and the position in the data.
        seed_generators(f"run {self.config.seed} {self.progress.samples} {self.world.rank}")
        for callback in self._each("on_step_begin", step):
            callback.on_step_begin(self, step)
        current_phase.begin_step(step, first=first)
        begin = self.progress.samples
        end = begin + self.config.batch.global_batch_size - 1
        self.engine.batches.name = f"step {step} (samples {begin} to {end} of the run)"

    def read_step(self) -> None:
        """Read the numbers of the step that was launched last, if they have not been read.

        The host waits for that step. Every callback receives the numbers. Collective.
        """
        step, self.pending = self.pending, None
        if step is None:
            return
        current_phase.enter("results of the step")
        numbers = step.outcome.numbers
        with self.timer.paused():
            overflow = self.engine.explain(step.outcome)
        spike = action_for(numbers, self.config.divergence)
        result = StepResult(**vars(step), numbers=numbers, overflow=overflow, spike=spike)
        for callback in self._each("on_step_end"):
            callback.on_step_end(self, result)
        self._stopping = self._stopping or numbers.stop
        self._check_can_continue(step)
        if result.rolls_back and self.rollback_from is None:
            self.rollback_from = result

    def _check_can_continue(self, step: PendingStep) -> None:
        """Raise if training cannot continue, with the checkpoint to go back to."""
        try:
            self.engine.check(step.outcome, log=False)  # a callback has logged skips
        except LostPeerError:
            raise
        except TrainingError as error:
            advice = self.checkpointing.give_up(self, str(error))
            raise TrainingError(f"{error}; {advice}") from None

    def _roll_back(self, result: StepResult) -> None:
        # A step that was launched after the one that is out of bounds is discarded, unread.
        self.pending = None
        current_phase.enter("going back to a checkpoint", transfers=True)
        writer = self.checkpointing.writer
        writer.finish()
        checkpoint, done = self._load_earlier(result)
        self.states.restore(checkpoint, self.console.message)
        writer.resumed(self.progress.step, saved=False)
        self.rollback_from = None
        if self._finished_early is not None:  # after a step that the rollback has reverted
            self._stopping, self._finished_early = False, None
        for callback in self._each("on_rollback"):
            callback.on_rollback(self, done)
        # After the hooks, which may replace the state of their callbacks.
        self.checkpointing.save_now(self)
        samples = self.progress.samples
        self.console.message(
            f"step {done.from_step}: {done.problem}; back to step {done.to_step}, continuing with "
            f"sample {samples} instead of {samples - done.samples_skipped} (rollback "
            f"{self.progress.rollbacks} of at most {MAX_ROLLBACKS})"
        )

    def _load_earlier(self, result: StepResult) -> tuple[StoredCheckpoint, Rollback]:
        """Load a checkpoint from before a step, and skip the data up to that step. Collective.

        The statistics of the spike check stay: early in a run, older ones would still be in their
        warm-up. The caller saves the new position, so that a restart does not train on the skipped
        data.

        Raises:
            TrainingError: On every rank, after `MAX_ROLLBACKS` rollbacks, or if there is no
                checkpoint to go back to.
        """
        assert result.spike is not None
        step, problem, before = result.step, result.spike.problem, self.progress.rollbacks
        if before >= MAX_ROLLBACKS:
            raise TrainingError(
                f"step {step}: {problem}, and the run has already rolled back {before} times; "
                "lower optim.lr or optim.max_norm, or inspect the data, and continue with "
                "--resume and the path of an earlier checkpoint"
            )
        # Checkpoints after the last one of this run belong to a run that was abandoned.
        saved = self.checkpointing.writer.saved_step
        end = step if saved is None else min(step, saved + 1)
        checkpoint = checkpoint_before(self.directory.checkpoints, end)
        guard = self.engine.divergence
        statistics = {name: value.clone() for name, value in guard.state_dict().items()}
        stored = restore(self.engine, checkpoint)
        guard.load_state_dict(statistics)
        self.progress = Progress(stored.step, result.samples, before + 1, stored.step)
        return checkpoint, Rollback(step, stored.step, problem, result.samples - stored.samples)

    def report_validation(self, loss: float, metrics: Mapping[str, float]) -> None:
        """Pass loss and metrics on held-out data to the record of the step and to all callbacks."""
        if self.pending is not None:
            self.pending.validation_loss = loss
            self.pending.validation_metrics = metrics
        for callback in self._each("on_validation"):
            callback.on_validation(self, loss, metrics)

    def report_save(self, step: int, seconds: float) -> None:
        """Report a complete checkpoint to all callbacks."""
        for callback in self._each("on_save"):
            callback.on_save(self, step, seconds)

    def is_asked_to_stop(self) -> bool:
        """Return whether this rank has a request to stop, from a signal or a callback."""
        self._asked_by = self._asked_by or self._stop_reason()
        return self._asked_by is not None

    def stop_unfinished(self) -> None:
        """Stop after this step as unfinished: the run has to be resumed. Call it on every rank."""
        self._stopping = self._unfinished = True

    def finish_early(self, reason: str) -> None:
        """End the run after this step as finished, with exit code 0. Call it on every rank.

        Args:
            reason: Completes "finished after step N: ...".
        """
        self._stopping, self._finished_early = True, reason

    def _stop_reason(self) -> str | None:
        if is_orphan():
            return "its launcher has ended"
        if self._stop.received is not None:
            return signal.Signals(self._stop.received).name
        reasons = (callback.stop_reason(self) for callback in self.callbacks)
        return next(filter(None, reasons), None)  # also without False and ""

    def _each(self, hook: str, step: int | None = None) -> Iterator[Callback]:
        """Yield the callbacks in order, see `_enter_hook`."""
        for callback in self._in_order(hook):
            self._enter_hook(hook, callback, step)
            yield callback

    def _in_order(self, hook: str) -> list[Callback]:
        """Return the callbacks in the order in which this hook of theirs is called."""
        users, evaluates = self._users_callbacks, (Validation, EarlyStopping)
        if hook == "on_train_begin":  # a repeated validation calls hooks of the others
            return sorted(self.callbacks, key=lambda each: isinstance(each, Validation))
        if hook in ("on_train_end", "on_exit"):  # errors of the users' code lose no save
            return sorted(
                self.callbacks, key=lambda each: (each in users, isinstance(each, evaluates))
            )
        return self.callbacks

    def _enter_hook(self, hook: str, callback: Callback, step: int | None = None) -> None:
        """Enter a phase for a callback of the user, so that the report on a hang names it.

        Args:
            hook: Name of the hook.
            callback: Any callback.
            step: The step that the report names; None for that of the current phase.
        """
        if callback in self._users_callbacks:
            current_phase.enter(f"{hook} of callback {type(callback).__name__}", step=step)
