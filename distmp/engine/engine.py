"""The engine: what users call to train a model in mixed precision over all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.diagnosis.attribution import OverflowReport
from distmp.distributed.wait_times import StepClock
from distmp.distributed.world import World
from distmp.engine import step_checks
from distmp.engine.completed_steps import CompletedSteps
from distmp.engine.divergence_guard import DivergenceGuard
from distmp.engine.engine_config import EngineConfig, EngineSettings, check_max_norm, with_settings
from distmp.engine.evaluation import Evaluation, MetricFunction, evaluate, gather_rows
from distmp.engine.likely_mistakes import EvaluationMode, FirstStep, OtherOptimizer
from distmp.engine.low_precision_matmuls import LowPrecisionMatmuls
from distmp.engine.outcome import StepOutcome
from distmp.engine.parts import EngineCalls, EngineParts
from distmp.engine.replays import Replays
from distmp.engine.setup import LossFunction, set_up
from distmp.engine.state import EngineState, TensorSpec
from distmp.engine.step import take_step
from distmp.engine.wrong_index import LatestBatches
from distmp.errors import TrainingError, require
from distmp.optim.factories import OptimizerFactory, ScheduleFactory
from distmp.optim.state import check_state
from distmp.parallel.reproducible import check_power_of_two
from distmp.precision import PrecisionPolicy
from distmp.scaling.loss_scale import LossScale
from distmp.utils.flat_shard import global_shape
from distmp.utils.processes import return_freed_memory

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from distmp.engine.checkpoints import Saves

T = TypeVar("T")


class Engine:
    """Takes optimizer steps in mixed precision over all ranks.

    All ranks apply or skip each step together. The gradient is that of the global mean loss,
    regardless of how samples or tokens are distributed over microbatches and ranks.

    Args:
        model: A module, which is trained in place, or a function that returns it. With a function,
            a rank of a sharded strategy computes one parameter at a time and keeps its shard. The
            same holds for parameters on the meta device. Other parameters are copied from rank 0.
        loss: `loss(module, batch)` runs `module(...)` and returns the loss *sum* over the batch and
            its weight (the number of summed tokens or samples), a number or a 0-dim tensor.
        optimizer: Builds the optimizer on `[(name, tensor), ...]`, the FP32 tensors to be updated.
        config: The settings; None uses the defaults.
        schedule: Builds a torch learning-rate scheduler on an optimizer. It follows the number of
            applied updates.
        device: The device to train on; None uses the GPU of this rank if there is one.
        initialize: Whether to compute the initial values of parameters on the meta device. With
            False those in the state dict are NaN until a state is loaded.
        settings: Fields of `EngineConfig`, which override those in `config`: `policy`, `strategy`,
            `max_norm`, ...

    If torchrun has started several processes and the default process group does not exist, the
    engine initializes it.

    Attributes:
        optimizer: The optimizer that the argument `optimizer` built.
        batches: Explains errors of kernels by the latest microbatches.
        loads: Number of checkpoints that were loaded, by `load` or by a trainer.
        holds_average: Whether an average of the weights replaces them (`WeightAverage.as_weights`).

    Raises:
        ConfigError: If model, policy, strategy and optimizer are not compatible.

    Example:
        >>> model = nn.Linear(8, 1)
        >>> engine = Engine(
        ...     model,
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, lr=1e-2, fused=True),
        ...     policy="fp32",
        ...     max_norm=1.0,
        ... )
        >>> outcome = engine.step([torch.randn(16, 8), torch.randn(4, 8)])
        >>> outcome.numbers.weight, outcome.numbers.skipped
        (20.0, False)
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: LossFunction,
        optimizer: OptimizerFactory,
        config: EngineConfig | None = None,
        *,
        schedule: ScheduleFactory | None = None,
        device: torch.device | str | None = None,
        initialize: bool = True,
        **settings: Unpack[EngineSettings],
    ) -> None:
        step_checks.check_loss_function(loss)
        config = with_settings(config, settings)
        self._setup = setup = set_up(
            model, loss, optimizer, schedule, config, device, initialize=initialize
        )
        self._state = state = EngineState(setup)
        self.optimizer = setup.updates.optimizer
        self._calls = EngineCalls(setup.world, setup.strategy.module, self.optimizer)
        modes = EvaluationMode(self.model)
        self._parts = EngineParts(setup, state, self._calls, modes, [*self.model.parameters()])
        self._replays = Replays(self._parts)
        self._completed = CompletedSteps(self._parts, self._replays.explain)
        self._first_step = FirstStep(setup)
        self._other_optimizer = OtherOptimizer(
            setup.updates.tensors.versions, is_active=config.first_step_checks
        )
        if config.first_step_checks:
            setup.strategy.watch_copies()
        self.batches = LatestBatches(
            self.model, setup.world.rank, after_step=setup.config.attribution
        )
        self._saves: Saves | None = None
        self.loads = 0
        self.holds_average = False
        setup.buffers.enlist()  # last: an engine that was refused is none
        return_freed_memory()

    # What was decided at the start

    @property
    def config(self) -> EngineConfig:
        """The settings, with "auto" resolved."""
        return self._setup.config

    @property
    def world(self) -> World:
        """Rank, number of ranks, device and process group of this process."""
        return self._setup.world

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self._setup.device

    @property
    def module(self) -> nn.Module:
        """The prepared model, with the parameter names of the user's; call it for inference."""
        return self._setup.strategy.module

    model = module

    @property
    def policy(self) -> PrecisionPolicy:
        """The precision policy."""
        return self._setup.policy

    @property
    def policy_reason(self) -> str:
        """Why this policy was selected."""
        return self._setup.policy_reason

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self._setup.config.strategy

    @property
    def strategy_reason(self) -> str:
        """What the strategy has selected and why; may be empty."""
        return self._setup.strategy.reason

    @property
    def clock(self) -> StepClock:
        """Measures the time that this rank computes in a step, while it is active."""
        return self._setup.clock

    @property
    def low_precision_matmuls(self) -> LowPrecisionMatmuls:
        """The linear layers with low-precision matmuls, and their statistics."""
        return self._setup.low_precision_matmuls

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device in every step, so that outcomes are complete."""
        return self._setup.host_waits

    # What steps change

    @property
    def max_norm(self) -> float | None:
        """Clip the norm of the global gradient to this; None disables clipping. May be set."""
        return self._state.max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        check_max_norm(value)
        self._state.max_norm = value

    @property
    def nominal_weight(self) -> float | None:
        """The constant that keeps gradients at the magnitude of a mean; None before a step."""
        return self._state.nominal_weight

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale."""
        return self._state.loss_scale

    @property
    def divergence(self) -> DivergenceGuard:
        """Compares loss and norm of each step with those of the steps before it."""
        return self._state.divergence

    @property
    def step_counts(self) -> Tensor:
        """Updates applied, steps skipped, and steps skipped since the last update: int64 [3]."""
        return self._state.counts

    # The step

    def step(
        self, microbatches: Iterable[Any], *, count: int | None = None, stop: bool = False
    ) -> StepOutcome:
        """Train on the microbatches of this rank; every rank has to call it.

        Args:
            microbatches: Batches (tensors, or nested containers of tensors) for `loss`; at least
                one, and with a sharded strategy the same number on every rank. A list, or an
                iterable that gives these microbatches and then ends; it is read first.
            count: Number of microbatches; needed for an iterable without a length.
            stop: Whether this rank requests to stop; the outcome reports it on every rank.

        Returns:
            The outcome. Reading its numbers waits for the step; after the next step was started
            they are usually available.

        Raises:
            ConfigError: If `microbatches` are not batches or not as many as announced, or the loss
                function does not return a loss sum and a weight.
            TrainingError: If `check` is never called: after `max_consecutive_skips` skipped steps
                in a row, or one step later.
            SetupError: Before the first step, if another rank raises one of these errors.
            LostPeerError: If another rank has ended.
        """
        with self.batches.explaining(), self._calls.call("step", waits=False):
            batches = self._checked_together(microbatches, count)
            self.batches.add(self._state.steps + 1, batches)
            # Every text would count as True.
            require(not isinstance(stop, str), "stop", stop, "use True or False")
            first_step = None if self._first_step.is_done else self._first_step
            if first_step is not None:
                first_step.before(batches[0])
            self._calls.count_step(microbatches)
            warned = self._other_optimizer.before_step()
            try:
                outcome, stats = take_step(self._parts, batches, first_step, stop=bool(stop))
            except BaseException:
                self._setup.strategy.used.end_failed_step()
                # A device that has failed cannot copy; the error to tell is the first one.
                with contextlib.suppress(RuntimeError):
                    self._setup.buffers.end_failed_step()
                raise
            self._replays.keep(outcome, batches, stats)
            warned += [] if first_step is None else first_step.after()
            self._other_optimizer.accept_writes()
        warned += self._completed.warnings(outcome)
        if self.world.rank == 0:
            for warning in warned:  # independent of logging
                warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return outcome

    def _checked_together(self, microbatches: Iterable[Any], count: int | None) -> list[Any]:
        """Check as `_checked`; before the first step, all ranks fail if one does."""
        if not self.config.first_step_checks or self._calls.counts["engine.step"]:
            return self._checked(microbatches, count)
        if self.world.world_size > 1 and not self._setup.is_sharded:
            self._calls.weights = self._parts.weights()
        return self.world.ranks.all_or_own_error(lambda: self._checked(microbatches, count))

    def _checked(self, microbatches: Iterable[Any], count: int | None) -> list[Any]:
        """Check model, optimizer and microbatches before a step; return the microbatches."""
        step_checks.check_gradients_enabled()
        batches = step_checks.listed_microbatches(microbatches, count)
        if self.holds_average:
            raise TrainingError(
                "engine.step inside of average.as_weights() would train the average; call it "
                "outside, and after an error inside only after engine.load"
            )
        if self.config.reproducible:
            check_power_of_two(len(batches))
        self._setup.updates.check(self.optimizer)
        self._setup.strategy.check_model()
        self.low_precision_matmuls.check_unchanged()
        return batches

    # After the step

    def explain(self, outcome: StepOutcome) -> OverflowReport | None:
        """Replay a step to find out why it overflowed; every rank has to call it.

        The host waits for the device. The replay runs `loss` again on the microbatches of the step
        with the same random numbers, and leaves weights, buffers and generators unchanged. The
        gradients of the last step are lost.

        Args:
            outcome: The outcome of one of the last two steps. The replay is exact if no update was
                applied since then, as directly after the step.

        Returns:
            The same report on every rank, also stored in `outcome.overflow_report`. None for a step
            without overflow, for an older step, and without `attribution`.
        """
        return self._replays.explain(outcome)

    def check(self, outcome: StepOutcome, *, log: bool = True) -> None:
        """Raise if training cannot continue after this step; every rank has to call it.

        Args:
            outcome: The outcome of a step.
            log: Log a warning on rank 0 when a step was a spike, and once for steps in a row that
                were skipped or dropped microbatches. With a dynamic loss scale and a finite loss,
                only the third skipped step in a row is logged.

        Raises:
            ConfigError: On all ranks, if they took the step with different settings.
            TrainingError: On all ranks, with the result of `explain`, if the loss scale cannot be
                lowered further, or after `max_consecutive_skips` skipped steps in a row.
        """
        self._completed.is_checked = True
        self._completed.check_ranks_agree(outcome)
        if log:
            self._completed.log_skip(outcome)
        self._completed.check_can_continue(outcome)

    def evaluate(self, microbatches: Iterable[Any]) -> float:
        """Return the mean loss over the microbatches of all ranks; every rank has to call it.

        Args:
            microbatches: An iterable of batches for `loss`, such as a loader of torch, or
                `DataLoader.once()`; iterating over a `DataLoader` itself yields lists of them. With
                a sharded strategy every rank needs the same number of them; pad with microbatches
                of weight 0.

        Returns:
            The mean over the global weight; NaN if that is 0.

        Raises:
            ConfigError: If no rank has a microbatch.
            TrainingError: If an interrupted update has left the weights incomplete.
        """
        return self.evaluate_metrics(microbatches, {}).loss

    @torch.inference_mode(False)
    @torch.no_grad()
    def evaluate_metrics(
        self, microbatches: Iterable[Any], metrics: Mapping[str, MetricFunction]
    ) -> Evaluation:
        """Return the mean loss and the mean of each metric; every rank has to call it.

        Each microbatch takes one forward pass. One all-reduce sums over ranks, in FP64.

        Args:
            microbatches: As for `evaluate`. A microbatch whose loss has weight 0 counts in a metric
                with the metric's weight, so metrics of padding have weight 0, too.
            metrics: `metric(outputs, batch)` by name, the same on every rank. `outputs` is what the
                model returned to the loss function, or a tuple if that called it several times. A
                model that computes its loss itself returns logits. The result is a sum over the
                microbatch and its weight, like that of a loss.

        Raises:
            ConfigError: If a metric returns something else, there is no output, or no rank has a
                microbatch.
            TrainingError: If an interrupted update has left the weights incomplete.
        """
        # Ranks with other metrics would wait for each other in the all-reduce.
        with self._calls.call(f"evaluate_metrics[{', '.join(metrics)}]" if metrics else "evaluate"):
            step_checks.refuse_one_batch(microbatches)
            self._setup.updates.check(self.optimizer)
            return evaluate(self._setup, self._state, microbatches, metrics)

    def gather(self, values: T, samples: Tensor | None = None) -> T:
        """Gather values per sample from all ranks, for a metric; every rank has to call it.

        Without `samples`, the result holds the rows of rank 0, then those of rank 1, and so on,
        including samples that a data loader repeats to give all ranks the same number. With
        `samples`, the result holds each sample once, in the order of the indices.

        Args:
            values: A tensor, or nested dicts, lists and tuples of tensors, with the same structure
                and dtypes on all ranks. The first dimension is that of the samples; its size may
                differ between ranks. A 0-dim tensor counts as one row.
            samples: The index of each row's sample in the dataset, an integer tensor of shape
                (rows,). Rows with a negative index are padding and are dropped, as are further rows
                of the same sample.

        Returns:
            The same structure on every rank, with all rows, on the devices of `values`; without
            gradients.

        Raises:
            ConfigError: On all ranks, if structure, dtypes or row shapes differ between ranks, or
                `samples` does not fit `values`.
        """
        with self._calls.call("gather"):
            return gather_rows(values, samples, self.world)

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to continue training from: live tensors by flat name.

        Weights are the FP32 ones under the names of the model's parameters, so that a state can be
        loaded under another policy or strategy. Sharded tensors are DTensors; with a sharded
        optimizer they are of type `FlatShard`. Inside of `WeightAverage.as_weights` the weights are
        the average.
        """
        return self._state.tensors()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the optimizer updates: live tensors by parameter name.

        The tensors are those of `state_dict`. Call `publish_weights` after changing them. If a save
        in the background is copying them, the host waits for the copy.
        """
        if self._saves is not None:
            self._saves.writer.release()
        return self._state.weights()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients that the optimizer reads, sharded as `weights`, by parameter name.

        None for a parameter that was not used. Valid inside a step pre-hook of the optimizer: those
        of the mean, after clipping.
        """
        return self._state.gradients()

    def publish_weights(self) -> None:
        """Update the parameters in the compute dtype from `weights`; every rank has to call it.

        Ranks may have written to weights that are not sharded a different number of times, as after
        a broadcast, if the values are the same on all ranks now. This reads these weights, and the
        host waits.

        Raises:
            ConfigError: On all ranks, if weights that are not sharded differ between ranks.
        """
        with self._calls.call("publish_weights"):
            self._setup.strategy.publish_weights()
            self._other_optimizer.accept_writes()
            if self.world.world_size > 1 and not self._setup.is_sharded:
                self._parts.accept_equal_writes()

    def updated_by_optimizer(self) -> set[str]:
        """Return the names in `state_dict` of tensors that only an optimizer update changes."""
        return self._state.updated_by_optimizer()

    def prepare_to_load(self, stored: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Create the optimizer state that a stored state has, so that it can be loaded in place.

        Every rank has to call it. Until `finish_loading`, `step` and `save` are refused.

        Args:
            stored: Shape and dtype of every stored tensor, by its name in `state_dict`.

        Returns:
            The live tensors to load before `finish_loading`: all of `state_dict`, except the state
            of parameters that no rank has used.
        """
        self._calls.count("prepare_to_load")
        if self._saves is not None:
            self._saves.finish()  # it copies the state that changes now
        return self._state.prepare(stored)

    def finish_loading(self, live: Mapping[str, Tensor]) -> None:
        """Continue from values that were loaded into the live tensors; every rank has to call it.

        Args:
            live: What `prepare_to_load` returned.
        """
        self._calls.counts["engine.load_state_dict"] += 1
        self._state.finish(live)
        self._completed.forget()
        self._replays.recent.clear()
        self._other_optimizer.accept_writes()
        self.holds_average = False
        self.loads += 1
        return_freed_memory()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state with the names and the sharding of this engine's `state_dict`.

        Every rank has to call it. Values are copied into the live tensors; then the parameters in
        the compute dtype are derived from the FP32 weights.

        Args:
            state: Tensors by name.

        Raises:
            CheckpointError: If the state lacks a tensor of this engine, or has another shape or
                sharding. The engine then refuses `step` and `save` until a load succeeds.
        """
        with self._calls.call("load_state_dict"):
            check_state(state)
            live = self.prepare_to_load(
                {name: (global_shape(value), value.dtype) for name, value in state.items()}
            )
            self._state.copy(state, live)
            self.finish_loading(live)

    def save(
        self,
        directory: str | Path,
        numbers: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        keep: int | None = 2,
    ) -> Path:
        """Save everything that training continues from; every rank has to call it.

        Writes the checkpoint `directory/step-000100` after 100 steps. It is atomic, has checksums,
        and loads under any strategy, policy and number of ranks.

        Args:
            directory: Directory of the checkpoints, on storage that all ranks share.
            numbers: Values to load with the checkpoint, such as the position in the data: the same
                on all ranks, of types that JSON keeps. If `samples` is among them, the number of
                samples consumed by all ranks, a run of the trainer can continue from there.
            wait: Return when the checkpoint is written. With False, a thread writes a copy of the
                state while training continues, and an error is raised by the next call of `save`,
                `load` or `wait_for_save`.
            keep: Number of latest checkpoints to keep in the directory; None keeps all.

        Returns:
            Path of the checkpoint.

        Raises:
            ConfigError: If an argument is invalid, such as a directory that is named like a file
                (`model.pt`), or `numbers` differ between ranks.
            TrainingError: Inside of `WeightAverage.as_weights`, or after an update or a load that
                has failed.
            CheckpointError: On all ranks, if this checkpoint, or the previous one in the
                background, could not be written. Earlier checkpoints are unchanged.
        """
        with self._calls.call("save"):
            self._setup.updates.check(self.optimizer)
            if self._saves is None:
                from distmp.engine.checkpoints import Saves  # many engines save nothing

                self._saves = Saves(self.world)
            # The loss of another engine may have changed them.
            self._setup.buffers.broadcast(self.world.device)
            return self._saves.save(directory, self, numbers, keep, wait=wait)

    def wait_for_save(self) -> None:
        """Wait until a checkpoint in the background is written; every rank has to call it.

        Call it at the end of training, before the process group is destroyed.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        with self._calls.call("wait_for_save"):
            if self._saves is not None:
                self._saves.finish()

    def load(
        self, directory: str | Path, *, missing_ok: bool = False, optimizer: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint of `save` or of a trainer's run; every rank has to call it.

        Args:
            directory: A checkpoint, or a directory of checkpoints, whose newest healthy one is
                loaded; damaged ones are logged. If it has none, its directory `checkpoints` is
                searched.
            missing_ok: Whether to leave the engine unchanged if there is no checkpoint yet.
            optimizer: Whether to load the optimizer state. With False it starts from scratch, so
                that the engine may have another optimizer than the checkpoint.

        Returns:
            The `numbers` of `save`, and `step`, the number of steps taken, if they lack it. For a
            trainer's run, its numbers.

        Raises:
            ConfigError: If there is no checkpoint, it has the state of another optimizer, or ranks
                name different directories.
            CheckpointError: On all ranks, if a named checkpoint, or all in the directory, are
                damaged, or if it does not fit the model.
        """
        from distmp.engine.checkpoints import load

        with self._calls.call("load"):
            if self._saves is not None:
                self._saves.finish()
            numbers = load(self, directory, missing_ok=missing_ok, optimizer=optimizer)
            return {"step": self._state.steps} if numbers is None else numbers

    def export(
        self,
        directory: str | Path,
        state: Mapping[str, Tensor] | None = None,
        *,
        max_shard_size: int | None = None,
    ) -> None:
        """Write the FP32 weights as safetensors; every rank has to call it.

        The directory has the format of `distmp export`; it has a `config.json` only if the model is
        one of transformers or distmp's transformer. All ranks gather one tensor at a time, and rank
        0 writes it. An existing directory of weights is replaced when the new one is complete.

        Args:
            directory: The directory to write.
            state: Tensors to write in place of `state_dict()`, with its names and shards, such as
                an average of the weights.
            max_shard_size: Maximum size of one file, in bytes; None: 5 GB.

        Raises:
            CheckpointError: On all ranks, if the directory cannot be written, or holds other files.
            ConfigError: If `state` lacks a weight, or has an unknown one or another shape, if
                `directory` is named like a file (`model.safetensors`), or if `max_shard_size` is
                not positive.
            TrainingError: If an interrupted update has left the weights incomplete.
        """
        from distmp.export.running import save_weights

        with self._calls.call("export"):
            self._setup.updates.check(self.optimizer)
            save_weights(self, directory, state, max_shard_size)

    def tensors_by_use(self) -> dict[str, list[Tensor]]:
        """Return the live tensors that persist between steps, by their use.

        Keys are "parameters", "module buffers", "master weights", "optimizer state", "FP32
        gradients" and "partial sums of microbatches". A tensor may occur under several keys: FP32
        parameters are their own master weights.
        """
        strategy = self._setup.strategy
        state = pytree.tree_leaves([*self.optimizer.state.values()])
        return {
            "master weights": [tensor for _, tensor in strategy.optimizer_parameters()],
            "parameters": list(self.module.parameters()),
            "module buffers": list(self.module.buffers()),
            "optimizer state": [leaf for leaf in state if isinstance(leaf, Tensor)],
            **strategy.gradient_memory(),
        }

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: hooks and process groups stay with the original.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError(
            "an engine cannot be copied or pickled; build another one on a separate model, and "
            "load engine.state_dict() into it"
        )
