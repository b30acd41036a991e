"""The engine: one mixed-precision optimizer step over all ranks, readable from top to bottom."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.data.evaluation import ForwardOnly
from distmp.diagnosis.attribution import OverflowContext, OverflowReport, diagnose
from distmp.diagnosis.replay import StepInputs, StepReplay
from distmp.distributed.compare_ranks import (
    Fingerprint,
    check_same,
    describe_model,
    describe_param_groups,
    hyperparameters,
    raise_difference,
)
from distmp.distributed.lost_peers import explain_lost_peers
from distmp.distributed.own_time import StepClock
from distmp.distributed.progress import DECISION, UPDATE, VALIDATION, current_phase
from distmp.distributed.stopping import until_stop_requested
from distmp.distributed.world import world_of_process
from distmp.engine.batch_errors import explain_batch_errors
from distmp.engine.calls import EngineCalls
from distmp.engine.config import EngineConfig, EngineSettings, check_max_norm, with_settings
from distmp.engine.evaluation import (
    Evaluation,
    MetricFunction,
    MetricSums,
    evaluation_mode,
    recorded_outputs,
)
from distmp.engine.microbatches import WRONG_COUNT, MicrobatchSource, MicrobatchStats, moved
from distmp.engine.model import build_model, return_logits
from distmp.engine.narrow_checks import CallCheck
from distmp.engine.narrow_products import NarrowProducts
from distmp.engine.nominal_weight import agree_on_nominal_weight, round_up_to_power_of_two
from distmp.engine.outcome import WARN_AFTER_SKIPS, StepNumbers, StepOutcome, advice
from distmp.engine.precision_phases import build_schedule, phase_formats
from distmp.engine.rounded_copies import warn_about_copies
from distmp.engine.spike_check import DivergenceGuard, SpikeCheck
from distmp.engine.state import EngineState, TensorSpec
from distmp.engine.step_checks import (
    IS_EMPTY,
    FirstStepChecks,
    ModeCheck,
    check_evaluated,
    check_gradients_enabled,
    check_loss,
    check_loss_function,
    check_metric,
    check_not_inference,
    check_outcome,
    check_stop,
    count_microbatches,
    explain_graph_errors,
)
from distmp.engine.step_sums import sum_over_ranks
from distmp.errors import ConfigError, TrainingError, attribute, rank_names, ranks_by_value
from distmp.optim import LearningRates, OptimizerFactory, ScheduleFactory
from distmp.optim.learning_rates import METRIC_UPDATES
from distmp.optim.rounding import set_rounding
from distmp.optim.state import check_state, prepare_for_device_skip
from distmp.optim.stepped import SteppedTensors
from distmp.parallel import ParallelConfig, Strategy, build_strategy, resolve_strategy
from distmp.parallel.materialize import InitialValues
from distmp.parallel.matrices import place_matrices, place_shards
from distmp.parallel.module_buffers import ModuleBuffers
from distmp.parallel.reproducible import (
    check_power_of_two,
    make_deterministic,
    prepare_cublas,
)
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.precision import resolve
from distmp.precision.builders import autocast_of_dtypes
from distmp.precision.costs import costs
from distmp.precision.policy import SIXTEEN_BIT
from distmp.precision.switches import product_switches
from distmp.quantization.description import log_formats
from distmp.scaling import (
    LossScale,
    StepDecision,
    decide_step,
    loss_scale_rules,
    unused_rules,
)
from distmp.scaling.step_decision import PRESCALE, divisor_fits
from distmp.utils.deferred import describe_initial_values
from distmp.utils.flat_shard import global_shape
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.host_copy import to_device
from distmp.utils.host_memory import return_freed_memory

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from distmp.checkpoint.location import Location
    from distmp.engine.saving import Saves

logger = logging.getLogger("distmp")

# Steps whose microbatches are kept for a replay. The outcome of a step is usually read after the
# next step was started.
STEPS_KEPT = 2

T = TypeVar("T")

# What to use in place of attributes that users expect.
_INSTEAD_OF = {
    "backward": "leave it out: engine.step runs the backward pass of the loss function's result",
    "zero_grad": "leave it out: engine.step clears the gradients",
    "clip_grad_norm_": "use Engine(..., max_norm=1.0), or assign engine.max_norm",
    "parameters": "use engine.model.parameters(), or engine.weights() for the FP32 weights",
    "named_parameters": "use engine.model.named_parameters(), or engine.weights()",
    "train": "use engine.model.train(); engine.evaluate sets and restores the mode itself",
    "eval": "use engine.model.eval(); engine.evaluate sets and restores the mode itself",
    "training": "use engine.model.training",
    "forward": "use engine.module(...)",
    "to": "use Engine(..., device=...)",
    "save_checkpoint": "use engine.save(folder)",
    "load_checkpoint": "use engine.load(folder)",
    "save_pretrained": "use engine.export(folder)",
    "lr": "use engine.optimizer.param_groups[0]['lr']",
    "global_step": "use int(engine.step_counts[:2].sum()), or the `step` that engine.load returns",
}

LossFunction = Callable[[nn.Module, Any], "tuple[Tensor, Tensor | float]"]


class Engine:
    """Takes optimizer steps in mixed precision over all ranks.

    All ranks apply or skip each step together. The gradient is that of the global mean loss,
    regardless of how samples or tokens are distributed over microbatches and ranks.

    Args:
        model: A module, which is trained in place, or a function that returns it. With a function,
            a rank of a sharded strategy computes one parameter at a time and keeps its shard. The
            same holds for parameters on the meta device. Others get the values of rank 0.
        loss: `loss(module, batch)` runs `module(...)` and returns the loss *sum* over the batch and
            its weight (the number of summed tokens or samples), a number or a 0-dim tensor.
        optimizer: Builds the optimizer on `[(name, tensor), ...]`, the FP32 tensors to be stepped.
        config: The settings; None uses the defaults.
        schedule: Builds a torch learning-rate scheduler on an optimizer. It follows the number of
            applied updates, or with `ReduceLROnPlateau` the metric of `schedule_step`.
        device: The device to train on; None uses the GPU of this rank if there is one.
        initialize: Whether to compute the initial values of parameters on the meta device. With
            False they are NaN until a state is loaded.
        settings: Fields of `EngineConfig`, which override those in `config`: `policy`, `strategy`,
            `max_norm`, ...

    If torchrun has started several processes and the default process group does not exist, the
    engine initializes it.

    Attributes:
        config: The settings, with "auto" resolved.
        world: Rank, number of ranks, device and process group of this process.
        device: The device that this rank trains on.
        module: The prepared model; call it for inference.
        optimizer: The optimizer that the argument `optimizer` built.
        policy: The precision policy.
        policy_reason: Why this policy was selected.
        strategy: Name of the strategy.
        strategy_reason: What the strategy has selected and why; may be empty.
        max_norm: Clip the norm of the global gradient to this; None disables clipping. May be set
            between steps.
        nominal_weight: The constant that keeps gradients at the magnitude of a mean; None before
            the first step.
        loss_scale: The loss scale.
        divergence: Compares loss and norm of each step with those of the steps before it.
        clock: Measures the time that this rank computes in a step, while it is active.
        narrow_products: The linear layers with narrow products, and their statistics.
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
        check_not_inference("building an engine")
        config = with_settings(config, settings)
        if config.reproducible:
            prepare_cublas(device)  # before joining the ranks, which initializes CUDA
        self.world = world_of_process(device)
        self.device = self.world.device
        model, values, seed = build_model(model, self.world, initialize=initialize)
        check_loss_function(loss)
        self.policy, self.policy_reason = resolve(config.policy, self.device)
        phase_formats(self.policy, config.precision_phases)  # refuses other policies
        self.strategy = resolve_strategy(config.strategy, self.world)
        self.config = config = replace(
            config,
            policy=self.policy,
            strategy=self.strategy,
            parallel=config.parallel or ParallelConfig(),
        )
        self._warn_about_policy()
        if self.policy.output_dtype in SIXTEEN_BIT:
            return_logits(model)
        self.max_norm = config.max_norm
        self.nominal_weight = (
            None
            if config.nominal_weight is None
            else round_up_to_power_of_two(config.nominal_weight)
        )
        self._loss = loss
        if config.reproducible:
            make_deterministic(self.device)
        self._strategy = self._build_strategy(model, values, initialize=initialize)
        self.strategy_reason = self._strategy.reason
        self.module = self._strategy.module
        if self.strategy not in SHARDED_STRATEGIES and self.world.rank == 0:
            warn_about_copies(self.module, self.policy)
        self.clock = StepClock(self.device)
        layers = self._strategy.narrow_layers
        formats = build_schedule(
            layers,
            self.policy,
            config.precision_phases,
            compiled=bool(config.parallel and config.parallel.compile != "none"),
            quiet=self.world.rank != 0,
        )
        self.narrow_products = NarrowProducts(layers, self.world, formats)
        if layers is not None and self.world.rank == 0:
            log_formats(layers, self.policy, self.device)
        self._buffers = ModuleBuffers(
            self._strategy.model, self.world.group, reproducible=config.reproducible
        )
        self._calls = EngineCalls(self.world, self._strategy.model)
        self._set_up_optimizer(optimizer, schedule)
        self.loss_scale = LossScale(
            loss_scale_rules(self.policy.loss_scale, config.loss_scale), self.device
        )
        self.divergence = DivergenceGuard(config.divergence, self.device)
        # Updates applied, steps skipped, steps skipped since the last update.
        self._counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        # Upper bound of the updates applied, known to the host without waiting for the device.
        self._max_applied = 0
        self._state = EngineState(
            self._strategy,
            self.optimizer,
            self._names,
            self.loss_scale,
            self.divergence,
            self._counts,
            self._learning_rates,
            seed,
            formats,
            skips_on_device=self._skips_on_device,
            quiet=self.world.rank != 0,
        )
        checks = config.first_step_checks
        self._first_step_checks = FirstStepChecks(self.world, self.module) if checks else None
        self._modes = ModeCheck(self.model)
        self._warns_of_mode = checks
        if checks:
            self._strategy.watch_copies()
        self._call_check = CallCheck(self.narrow_products.layers if checks else None)
        self._has_gradients = False
        # Whether the caller has called `check`.
        self._is_checked = False
        self._previous: StepOutcome | None = None
        self._saves: Saves | None = None
        self.loads = 0
        self.holds_average = False
        self._recent: deque[tuple[StepOutcome, StepInputs]] = deque(maxlen=STEPS_KEPT)
        return_freed_memory()

    def _build_strategy(
        self, model: nn.Module, values: InitialValues, *, initialize: bool
    ) -> Strategy:
        """Check that all ranks have the same set-up, and distribute the model."""
        with explain_lost_peers(self.world.group):
            described = self.config.describe() | describe_model(model)
            if initialize and self.strategy in SHARDED_STRATEGIES:
                # A rank computes its shards alone; other strategies copy the values of rank 0.
                described |= describe_initial_values(model)
            check_same(self.world.group, self.device, described)
            return build_strategy(
                self.strategy,
                model,
                self.policy,
                self.world,
                self.config.accumulation,
                self.config.parallel,
                values,
            )

    def _warn_about_policy(self) -> None:
        if self.world.rank == 0:
            for cost in costs(self.policy):
                logger.warning("precision %s reduces accuracy: %s", self.policy.name, cost)
            if unused := unused_rules(self.policy.loss_scale, self.config.loss_scale):
                logger.warning("precision %s: %s", self.policy.name, unused)

    def _set_up_optimizer(
        self, optimizer: OptimizerFactory, schedule: ScheduleFactory | None
    ) -> None:
        parameters = self._strategy.optimizer_parameters()
        self._build_optimizer = optimizer
        self.optimizer = self._strategy.build_optimizer(optimizer, parameters)
        self._names = {id(tensor): name for name, tensor in parameters}
        set_rounding(self.optimizer, self.policy)
        self._place()
        # The host steps offloaded parameters, and has to wait for the decision.
        on_host = any(tensor.device.type != self.device.type for _, tensor in parameters)
        self._skips_on_device = prepare_for_device_skip(self.optimizer) and not on_host
        self._stepped = SteppedTensors(self.optimizer, parameters)
        self._learning_rates = LearningRates(
            self.optimizer, schedule, self.device, on_device=self._skips_on_device
        )

    def _place(self) -> None:
        place_matrices(self.optimizer, self._strategy, self._names, self.device)
        place_shards(self.optimizer, self._strategy, self._names)

    @property
    def model(self) -> nn.Module:
        """The model inside `module`, with the parameter names of the user's model."""
        return self._strategy.model

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device in every step, so that outcomes are complete."""
        return self.device.type == "cpu" or not self._skips_on_device

    # The step

    def step(
        self, microbatches: Iterable[Any], *, count: int | None = None, stop: bool = False
    ) -> StepOutcome:
        """Train on the microbatches of this rank; every rank has to call it.

        Args:
            microbatches: Batches (tensors, or nested containers of tensors) for `loss`; at least
                one, and with a sharded strategy the same number on every rank. A list, or an
                iterable that gives these microbatches and then ends. Without `attribution`, the
                engine holds one microbatch of an iterable at a time.
            count: Number of microbatches; needed for an iterable without a length.
            stop: Whether this rank requests to stop; the outcome reports it on every rank.

        Returns:
            The outcome. Reading its numbers waits for the step; after the next step was started
            they are usually available.

        Raises:
            ConfigError: If `microbatches` are not batches or not as many as announced, or the loss
                function does not return a loss sum and a weight.
            LostPeerError: If another rank has ended.
        """
        with self._calls.call("step", waits=False):
            check_gradients_enabled()
            number = count_microbatches(microbatches, count)
            check_stop(stop)
            check_max_norm(self.max_norm)
            if self.holds_average:
                raise TrainingError(
                    "engine.step inside of average.as_weights() would train the average; call it "
                    "outside, and after an error inside only after engine.load"
                )
            if self.config.reproducible:
                check_power_of_two(number)
            self._check_unchanged()
            source = MicrobatchSource(microbatches, number, keep=self.config.attribution)
            if not (source.is_sequence or source.advance()):
                raise ConfigError("microbatches", [], IS_EMPTY)
            self._check_mode()
            if self._first_step_checks is not None:
                outcome = self._check_and_take_first_step(self._first_step_checks, source, stop)
                self._first_step_checks = None
            else:
                outcome = self._take_step(source, stop)
        self._check_previous_step(outcome)
        return outcome

    def _check_mode(self) -> None:
        """Warn once if the model is trained in evaluation mode."""
        if self._warns_of_mode and (warning := self._modes.warning()):
            self._warns_of_mode = False
            self._warn(warning, stacklevel=4)

    def _take_step(self, source: MicrobatchSource, stop: bool) -> StepOutcome:
        self._calls.counts["engine.step"] += 1
        current_phase.enter("beginning of the step")
        rate = self._learning_rates.set(self._counts[0], self._max_applied)
        scale = self.loss_scale.value
        self._buffers.begin_step()
        stats = self._accumulate(source, scale)
        current_phase.enter(DECISION)
        self.clock.end()
        total, differ, of_products = self._sum_over_ranks(stats, source, stop=stop)
        self.clock.begin()
        decision = decide_step(total, scale, self.nominal_weight or 1.0, self.max_norm)
        spike_check = self.divergence.check(decision)
        decision = decision.skipping(spike_check.skip | differ)
        current_phase.enter(UPDATE)
        self._update(decision)
        self._buffers.end_step(decision.found_inf)
        self._strategy.end_step(decision.found_inf)
        exhausted = self.loss_scale.update(
            decision.overflow | (decision.dropped > 0), decision.empty
        )
        self.divergence.remember(decision)
        self.narrow_products.end_step(of_products, decision)
        exhausted = exhausted & decision.overflow
        outcome = self._outcome(decision, spike_check, differ, rate, scale, exhausted)
        outcome.microbatch_problem = source.problem
        outcome.narrow_statistics = self.narrow_products.statistics
        outcome.formats = self.narrow_products.formats
        if self.config.attribution:
            inputs = StepInputs(
                tuple(source.kept),
                stats.streams,
                stats.losses,
                stats.weights,
                position=(self.narrow_products.step - 1, self.world.rank * source.count),
                formats=self.narrow_products.layer_formats,
            )
            self._recent.append((outcome, inputs))
        return outcome

    def _accumulate(self, source: MicrobatchSource, scale: Tensor) -> MicrobatchStats:
        """Run forward and backward of the microbatches, and reduce the gradients."""
        strategy = self._strategy
        strategy.compare_microbatches(source.count)
        strategy.begin_step()
        self.narrow_products.begin_step()
        stats = MicrobatchStats.empty()
        drawn = iter(source)
        stream, first = self._stream("step"), 0
        if self.config.reproducible:
            stream, first = self._stream("step", rank=0), self.world.rank * source.count
        # Once per step, since it takes 0.1 ms, unless the caller's code may draw in between.
        kept = partial(generators_kept, self.device)
        kept_once, kept_each = (kept, nullcontext) if source.is_list else (nullcontext, kept)
        # Once per step: setting and restoring the switches takes as long as 20 small kernels.
        with product_switches(self.policy), kept_once():
            for index in range(source.count):
                if not (source.is_sequence or self._has_next(source)):
                    break
                if self.config.reproducible:
                    self._buffers.begin_microbatch(index)
                strategy.begin_microbatch(last=index == source.count - 1)
                if self.narrow_products.layers is not None:
                    self.narrow_products.begin_microbatch(index, source.count)
                stats.streams.append(f"{stream} {first + index}")
                current_phase.enter("forward of microbatch", index + 1)
                batch = next(drawn)
                with kept_each():
                    seed_generators(stats.streams[-1], self.device)
                    loss, weight = self._forward(batch)
                    del batch
                    if index == 0:
                        factor = self._backward_factor(scale, weight, source.count)
                    current_phase.enter("backward of microbatch", index + 1)
                    self._backward(loss, factor)
                # Copied: torch's mse_loss keeps the memory of all terms of its sum alive.
                stats.add(loss.detach().clone(), weight, strategy.end_microbatch())
        source.end()
        if source.problem is not None and self.world.world_size == 1:
            raise source.error()
        current_phase.enter("reduction of the gradients")
        strategy.finish_gradients()
        if not self._has_gradients:
            self._check_gradients(stats)
        return stats

    def _stream(self, use: str, rank: int | None = None) -> str:
        """Return the key of this rank's random numbers in a step, see `seed_generators`."""
        rank = self.world.rank if rank is None else rank
        return f"{use} {self._state.seed} {self.narrow_products.step} {rank}"

    def _has_next(self, source: MicrobatchSource) -> bool:
        """Return whether an iterable has another microbatch.

        A rank whose iterable ends early joins the reductions of the others, and the step is
        skipped.

        Raises:
            ConfigError: If all ranks have ended here.
            TrainingError: If the ranks have to run the same number, and some have ended here.
        """
        has_next = source.advance()
        self._strategy.compare_next(has_next)
        if not has_next:
            if self.strategy in SHARDED_STRATEGIES or self.config.reproducible:
                raise source.error()
            self._strategy.begin_microbatch(last=True)
            self._strategy.end_microbatch()
        return has_next

    def _forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch = moved(batch, self.device)
        with (
            autocast_of_dtypes(
                self.policy, self.device, sharded=self.strategy in SHARDED_STRATEGIES
            ),
            explain_batch_errors(batch, self.module),
        ):
            self._strategy.computing_loss(computing=True)
            try:
                loss_sum, weight = check_loss(self._loss(self.module, batch))
            finally:
                self._strategy.computing_loss(computing=False)
        if self._first_step_checks is not None:
            self._first_step_checks.check(batch, loss_sum, weight)
        return loss_sum, _scalar(weight, self.device)

    def _backward_factor(self, scale: Tensor, weight: Tensor, microbatches: int) -> Tensor:
        """Return S / n0; the first step determines n0 from the weight of its first microbatch."""
        if self.nominal_weight is None:
            self.nominal_weight = agree_on_nominal_weight(
                weight, microbatches, self.world, reproducible=self.config.reproducible
            )
        return scale / (self.nominal_weight or 1.0)

    def _backward(self, loss: Tensor, factor: Tensor) -> None:
        loss = loss.float()
        with explain_graph_errors(), self._strategy.backward_context(loss):
            # The gradient of `loss * factor`, without the kernels of the product.
            loss.backward(factor)

    def _sum_over_ranks(
        self, stats: MicrobatchStats, source: MicrobatchSource, *, stop: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of the step over ranks, see `distmp.engine.step_sums.sum_over_ranks`."""
        size = self.world.world_size
        settings = self._settings_of_step() if size > 1 else ()
        if source.problem is not None:
            settings = (self.world.rank, source.problem)  # unlike on any other rank
        return sum_over_ranks(
            self._strategy,
            stats,
            Fingerprint.of(settings, size),
            self.narrow_products.terms(),
            self.world,
            stop=stop,
            reproducible=self.config.reproducible,
        )

    def _settings_of_step(self) -> object:
        """Return the settings that all ranks have to share in a step; no values of the device."""
        return (
            self._calls.number,
            self._calls.counts,
            self.max_norm,
            self.nominal_weight,
            hyperparameters(self.optimizer),
            self._learning_rates.planned(self._max_applied),
            [parameter.requires_grad for parameter in self.model.parameters()],
            self._modes.evaluating(),
        )

    def _described_settings_of_step(self) -> dict[str, str]:
        """Return `_settings_of_step` as text by name, for a comparison between ranks."""
        return {
            "engine": str(self._calls.number),
            "max_norm": repr(self.max_norm),
            "nominal_weight": repr(self.nominal_weight),
            **describe_param_groups(self.optimizer),
            "schedule": repr(self._learning_rates.planned(self._max_applied)),
            **self._modes.described(),
            **describe_model(self.model),
            **{f"calls of {name}": str(count) for name, count in self._calls.counts.items()},
        }

    def _update(self, decision: StepDecision) -> None:
        """Step the optimizer, or leave weights and state unchanged, according to the decision."""
        decision = self._fit_divisor(decision)
        if self._skips_on_device:
            self._max_applied += 1
            # Read by torch's fused optimizers: they divide by grad_scale and skip on found_inf.
            self.optimizer.grad_scale = decision.grad_scale  # type: ignore[attr-defined]
            self.optimizer.found_inf = decision.found_inf  # type: ignore[attr-defined]
            self._strategy.prepare_optimizer_grads()
            self._stepped.step()
        elif decision.found_inf.item() == 0:
            self._max_applied += 1
            for part in self._strategy.gradients():
                if part.tensors:
                    divisor = decision.grad_scale.to(part.tensors[0].device)
                    torch._foreach_div_(part.tensors, divisor)
            self._strategy.prepare_optimizer_grads()
            self._stepped.step_in_place()
        self._strategy.copy_master_to_model()

    def _fit_divisor(self, decision: StepDecision) -> StepDecision:
        """Multiply gradients by a power of two first if FP32 does not represent their divisor."""
        if divisor_fits(decision.divisor):
            return decision
        for part in self._strategy.gradients():
            torch._foreach_mul_(part.tensors, PRESCALE)
        return decision._replace(grad_scale=(decision.divisor * PRESCALE).to(torch.float32))

    def _outcome(
        self,
        decision: StepDecision,
        spike_check: SpikeCheck,
        differ: Tensor,
        rate: Tensor,
        scale: Tensor,
        exhausted: Tensor,
    ) -> StepOutcome:
        skipped = decision.found_inf.to(torch.int64)
        # In place: `state_dict` returns this tensor, and a checkpoint is loaded into it.
        self._counts += torch.stack([1 - skipped, skipped, skipped])
        self._counts[2] *= skipped
        return StepOutcome(
            {
                "loss": decision.loss,
                "weight": decision.weight,
                "grad_norm": decision.grad_norm,
                "learning_rate": rate,
                "loss_scale": scale,
                "overflow": decision.overflow,
                "dropped": decision.dropped,
                "skipped": skipped,
                "spike": spike_check.spike,
                "loss_limit": spike_check.loss_limit,
                "norm_limit": spike_check.norm_limit,
                "stop": decision.stop,
                "applied_total": self._counts[0],
                "skipped_total": self._counts[1],
                "skipped_in_a_row": self._counts[2],
                "scale_exhausted": exhausted,
            },
            differ,
        )

    # Checks around the step

    def _check_unchanged(self) -> None:
        """Refuse changes of model and optimizer that have no effect; train unfrozen parameters."""
        self._stepped.check(self.optimizer)
        self._strategy.check_model()
        self.narrow_products.check_unchanged()
        self._train_unfrozen()

    def _check_gradients(self, stats: MicrobatchStats) -> None:
        """Refuse a loss that does not depend on any trained parameter.

        Raises:
            ConfigError: If no trained parameter has had a gradient so far.
        """
        trained = [tensor for _, tensor in self._strategy.optimizer_parameters()]
        self._has_gradients = any(
            tensor.grad is not None for tensor in (*trained, *self.module.parameters())
        )
        # A dropped microbatch does not count. Only this check reads the flags: the host waits.
        if not (self._has_gradients or any(bool(flag) for flag in stats.dropped)):
            raise ConfigError(
                "loss",
                getattr(self._loss, "__name__", type(self._loss).__name__),
                f"gives none of the {len(trained)} trained parameters a gradient; run the module "
                "that is passed to it, not another one, and return a loss of its output",
            )

    def _check_and_take_first_step(
        self, checks: FirstStepChecks, source: MicrobatchSource, stop: bool
    ) -> StepOutcome:
        """Take a step, and check its arguments for likely mistakes."""
        checks.compare_batches(source.next)
        with checks.check_ids():
            outcome = self._take_step(source, stop)
        for warning in checks.warnings():
            self._warn(warning, stacklevel=4)
        return outcome

    def _check_previous_step(self, outcome: StepOutcome) -> None:
        """Check the latest completed step: on a device that is the step before this one.

        Raises:
            ConfigError: If ranks took it with different settings.
        """
        completed, self._previous = (outcome if self.host_waits else self._previous), outcome
        if completed is None:
            return
        self._check_ranks_agree(completed)
        if warning := self._call_check.warning(completed.narrow_statistics):
            self._warn(warning, stacklevel=4)
        if self._learning_rates.lacks_metric(self._max_applied):
            self._warn(
                f"the schedule follows a metric and has had none in {METRIC_UPDATES} updates, so "
                "the learning rate is constant; call engine.schedule_step(metric) after each "
                "validation",
                stacklevel=4,
            )
        if not self._is_checked and completed.read("skipped_in_a_row") == WARN_AFTER_SKIPS:
            self._warn_about_skips(completed)

    def _check_ranks_agree(self, outcome: StepOutcome) -> None:
        """Raise if ranks have different settings, or an iterable does not fit `count`."""
        if outcome.ranks_differ:
            self._previous = None  # reported
            with explain_lost_peers(self.world.group):
                self._check_sources(outcome)
                raise_difference(self.world.group, self._described_settings_of_step())

    def _check_sources(self, outcome: StepOutcome) -> None:
        """Raise if an iterable has another number of microbatches than `count` on any rank."""
        problems = dict(enumerate(self.world.ranks.gather(outcome.microbatch_problem)))
        if any(problems.values()):
            by_rank = "; ".join(
                f"{problem or 'is complete'} on {rank_names(ranks)}"
                for problem, ranks in ranks_by_value(problems).items()
            )
            raise ConfigError("microbatches", by_rank, WRONG_COUNT)

    def _warn_about_skips(self, outcome: StepOutcome) -> None:
        """Warn about many skipped steps in a row, for loops that never call `check`."""
        cause = self.explain(outcome) or advice(outcome.numbers)
        self._warn(
            f"{WARN_AFTER_SKIPS} steps in a row were skipped, so nothing is trained: {cause}; call "
            "engine.check(outcome) after each step to end training if this continues",
            stacklevel=5,
        )

    def _warn(self, message: str, stacklevel: int) -> None:
        """Warn the caller of `step`, independent of logging; on rank 0 only."""
        if self.world.rank == 0:
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)

    def _train_unfrozen(self) -> None:
        """Add unfrozen parameters to the optimizer, in the groups that its builder makes."""
        unfrozen = self._strategy.unfrozen()
        if not unfrozen:
            return
        self._calls.wait_for_all(f"which trains {unfrozen[0][0]}")
        parameters = self._strategy.add_parameters(unfrozen)
        self._names.update((id(tensor), name) for name, tensor in parameters)
        addition = self._strategy.build_optimizer(self._build_optimizer, parameters)
        prepare_for_device_skip(addition)
        self._learning_rates.add_groups(addition.param_groups)
        for group in addition.param_groups:
            self.optimizer.add_param_group(group)
        self.optimizer.state.update(addition.state)
        self._place()
        self._stepped.add(parameters)

    # After the step

    def explain(self, outcome: StepOutcome) -> OverflowReport | None:
        """Replay a step to find out why it overflowed; every rank has to call it.

        The host waits for the device. The replay runs `loss` again on the microbatches of the step
        with the same random numbers, and leaves weights, buffers and generators unchanged. The
        gradients of the last step are lost.

        Args:
            outcome: The outcome of one of the last two steps. The replay is exact if no update was
                applied since, which is always so directly after the step.

        Returns:
            The same report on every rank, also stored in `outcome.overflow_report`. None for a step
            without overflow, for an older step, and without `attribution`.
        """
        check_outcome(outcome)
        if outcome.overflow_report is None and outcome.numbers.overflow:
            for recent, inputs in self._recent:
                if recent is outcome:
                    with self._calls.call("explain"):
                        outcome.overflow_report = self._replay(outcome.numbers, inputs)
        return outcome.overflow_report

    def check(self, outcome: StepOutcome) -> None:
        """Raise if training cannot continue after this step; every rank has to call it.

        Raises:
            ConfigError: On all ranks, if they took the step with different settings.
            TrainingError: On all ranks, with the result of `explain`, if the loss scale cannot be
                lowered further, or after `max_consecutive_skips` skipped steps in a row.
        """
        check_outcome(outcome)
        self._is_checked = True
        self._check_ranks_agree(outcome)
        numbers = outcome.numbers
        limit = self.config.max_consecutive_skips
        if not (numbers.skipped_in_a_row >= limit or numbers.scale_exhausted):
            return
        if numbers.scale_exhausted:
            problem = (
                f"precision.loss_scale.min_scale = {numbers.loss_scale:g}: overflow at the lowest "
                "loss scale that is allowed"
            )
        else:
            reason = "were skipped as spikes" if numbers.spike else "had no finite update"
            problem = (
                f"precision.max_consecutive_skips = {limit}: that many steps in a row {reason}"
            )
        raise TrainingError(f"{problem}; {self.explain(outcome) or advice(numbers)}")

    def schedule_step(self, metric: float | Tensor) -> float:
        """Let `schedule` adapt the learning rate to a metric; every rank has to call it.

        The schedule must follow a metric: `torch.optim.lr_scheduler.ReduceLROnPlateau`. Call this
        method instead of `scheduler.step(metric)`, for example after each validation.

        Args:
            metric: The metric over all ranks, such as the result of `evaluate`: one number, the
                same on every rank. As in torch, a NaN counts as no improvement.

        Returns:
            The learning rate of the next step, of the first parameter group.

        Raises:
            ConfigError: If `schedule` follows no metric, or the metric differs between ranks.
        """
        with self._calls.call("schedule_step"):
            value = check_metric(metric)
            check_same(self.world.group, self.device, {"metric": repr(value)})
            return self._learning_rates.follow(value)

    def _replay(self, numbers: StepNumbers, inputs: StepInputs) -> OverflowReport:
        context = OverflowContext(
            scale=numbers.loss_scale,
            weight=numbers.weight,
            floor=self.loss_scale.floor,
            compute_dtype=self.policy.compute_dtype,
            has_masters=self.policy.has_masters,
            exact=int(self._counts[0]) == numbers.applied_total,
        )
        replay = StepReplay(self._strategy, self._replay_microbatch, inputs, self.world.rank)
        evidence = replay.evidence(context.scale, context.lowest, context.compute_dtype)
        all_evidence: list[Any] = [evidence]
        if self.world.group is not None:
            all_evidence = [None] * self.world.world_size
            dist.all_gather_object(all_evidence, evidence, group=self.world.group)
        return diagnose(all_evidence, context)

    def _replay_microbatch(self, batch: Any, scale: Tensor) -> Tensor:
        with product_switches(self.policy):
            loss, _ = self._forward(batch)
            self._backward(loss, scale / (self.nominal_weight or 1.0))
        return loss.detach().clone()

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Any]) -> float:
        """Return the mean loss over the microbatches of all ranks; every rank has to call it.

        Args:
            microbatches: Batches for `loss`. With a sharded strategy every rank needs the same
                number of them; pad with microbatches of weight 0.

        Returns:
            The mean over the global weight; NaN if that is 0.

        Raises:
            ConfigError: If no rank has a microbatch.
        """
        return self.evaluate_metrics(microbatches, {}).loss

    @torch.no_grad()
    def evaluate_metrics(
        self, microbatches: Iterable[Any], metrics: Mapping[str, MetricFunction]
    ) -> Evaluation:
        """Return the mean loss and the mean of each metric; every rank has to call it.

        Each microbatch takes one forward pass. One all-reduce sums over ranks, in FP64.

        Args:
            microbatches: As for `evaluate`. Metrics ignore microbatches of weight 0.
            metrics: `metric(outputs, batch)` by name, the same on every rank. `outputs` is what the
                model returned to the loss function, or a tuple if that called it several times. A
                model that computes its loss itself returns logits. The result is a sum over the
                microbatch and its weight, like that of a loss.

        Raises:
            ConfigError: If a metric returns something else, there is no output, or no rank has a
                microbatch.
        """
        # Ranks with other metrics would wait for each other in the all-reduce.
        with self._calls.call(f"evaluate_metrics[{', '.join(metrics)}]" if metrics else "evaluate"):
            check_evaluated(microbatches)
            compared = microbatches
            if self.strategy in SHARDED_STRATEGIES and not isinstance(
                microbatches, until_stop_requested
            ):
                compared = self._same_number(microbatches)
            sums = MetricSums(metrics, self.device)
            stream = self._stream("evaluation")
            with (
                evaluation_mode(self.module),
                product_switches(self.policy),
                recorded_outputs(self.module, active=bool(metrics)) as outputs,
            ):
                for index, batch in enumerate(current_phase.each(VALIDATION, compared)):
                    counts = not isinstance(batch, ForwardOnly)
                    batch = moved(batch if counts else batch.batch, self.device)
                    with generators_kept(self.device):
                        seed_generators(f"{stream} {index}", self.device)
                        loss_sum, weight = self._forward(batch)
                    if counts:
                        sums.add(batch, loss_sum, weight, outputs)
                    outputs.clear()
            # A stop ends the batches of a run's validation, perhaps before the first one.
            ended = isinstance(microbatches, until_stop_requested) and microbatches.ended_early
            return sums.result(self.world.group, may_be_empty=ended)

    def _same_number(self, microbatches: Iterable[T]) -> Iterator[T]:
        """Yield microbatches; raise an error if other ranks have more or fewer of them."""
        for batch in microbatches:
            self._strategy.compare_next(True)
            yield batch
        self._strategy.compare_next(False)

    def gather(self, values: T, samples: Tensor | None = None) -> T:
        """Gather values per sample from all ranks, for a metric; every rank has to call it.

        Without `samples`, the result holds the rows of rank 0, then those of rank 1, and so on:
        also the samples that a data loader repeats, to give all ranks the same number. With
        `samples`, each sample is in the result once, in the order of the indices.

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
        from distmp.engine.gathering import gather_rows

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
        return self._state.tensors(self.nominal_weight)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the optimizer steps: live tensors by parameter name.

        They are those of `state_dict`. Call `publish_weights` after changing them. The host waits
        for the copy that a save in the background makes of them.
        """
        if self._saves is not None:
            self._saves.release()
        return self._state.weights()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients that the optimizer reads, sharded as `weights`, by parameter name.

        None for a parameter that was not used. Valid inside a step pre-hook of the optimizer; they
        may still be multiplied by the loss scale.
        """
        return self._state.gradients()

    def publish_weights(self) -> None:
        """Update the parameters in the compute dtype from `weights`; every rank has to call it."""
        self._strategy.copy_master_to_model()

    @property
    def step_counts(self) -> Tensor:
        """Updates applied, steps skipped, and steps skipped since the last update: int64 [3]."""
        return self._counts

    def updated_by_optimizer(self) -> set[str]:
        """Return the names in `state_dict` of tensors that only an optimizer update changes."""
        return self._state.updated_by_optimizer()

    def prepare_to_load(self, stored: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Create the optimizer state that a stored state has, so that it can be loaded in place.

        Args:
            stored: Shape and dtype of every stored tensor, by its name in `state_dict`.

        Returns:
            The live tensors to load before `finish_loading`: all of `state_dict`, except what
            states of older versions lack and the state of parameters that no rank has used.
        """
        self._calls.count("prepare_to_load")
        if self._saves is not None:
            self._saves.finish()  # it copies the state that changes now
        self._train_unfrozen()
        return self._state.prepare(stored, self.nominal_weight)

    def finish_loading(self, live: Mapping[str, Tensor]) -> None:
        """Continue from values that were loaded into the live tensors.

        Args:
            live: What `prepare_to_load` returned.
        """
        self._calls.counts["engine.load_state_dict"] += 1
        self.nominal_weight = self._state.finish(live)
        self._max_applied = int(self._counts[0])
        self.narrow_products.continue_from(int(self._counts[:2].sum()))
        self.holds_average = False
        self.loads += 1
        return_freed_memory()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state with the names and the sharding of this engine's `state_dict`.

        Values are copied into the live tensors; then the parameters in the compute dtype are
        derived from the FP32 weights.

        Args:
            state: Tensors by name.

        Raises:
            CheckpointError: If the state lacks a tensor of this engine.
        """
        check_state(state)
        live = self.prepare_to_load(
            {name: (global_shape(value), value.dtype) for name, value in state.items()}
        )
        self._state.copy(state, live)
        self.finish_loading(live)

    def save(
        self,
        folder: str | Path,
        numbers: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        keep: int | None = 2,
    ) -> Location:
        """Save everything that training continues from; every rank has to call it.

        Writes the checkpoint `folder/step-000100` after 100 steps. It is atomic, has checksums, and
        loads under any strategy, policy and number of ranks.

        Args:
            folder: Directory of the checkpoints, on storage that all ranks share: a path, or a URL
                for fsspec.
            numbers: Values to load with the checkpoint, such as the position in the data: the same
                on all ranks, of types that JSON keeps. If `samples` is among them, the number of
                samples consumed by all ranks, a run of the trainer can continue from there.
            wait: Return when the checkpoint is written. With False, a thread writes a copy of the
                state while training continues, and an error is raised by the next call of `save`,
                `load` or `wait_for_save`.
            keep: Number of latest checkpoints to keep in the folder; None keeps all.

        Returns:
            Path of the checkpoint.

        Raises:
            ConfigError: If an argument is invalid, such as a folder that is named like a file
                (`model.pt`), or `numbers` differ between ranks.
            TrainingError: Inside of `WeightAverage.as_weights`.
            CheckpointError: On all ranks, if this checkpoint, or the previous one in the
                background, could not be written. Earlier checkpoints are unchanged.
        """
        with self._calls.call("save"):
            if self._saves is None:
                from distmp.engine.saving import Saves  # many engines save nothing

                self._saves = Saves(self.world)
            self._buffers.broadcast()  # the loss of another engine may have changed them
            return self._saves.save(folder, self, numbers, keep, wait=wait)

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
        self, folder: str | Path, *, missing_ok: bool = False, optimizer: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint of `save` or of a trainer's run; every rank has to call it.

        Args:
            folder: A checkpoint, or a directory of checkpoints, whose newest healthy one is loaded;
                damaged ones are logged. If it has none, its folders `step-100`, `epoch_3`,
                `checkpoints` ... are searched.
            missing_ok: Whether to leave the engine unchanged if there is no checkpoint yet.
            optimizer: Whether to load the optimizer state. With False it starts from scratch, so
                that the engine may have another optimizer than the checkpoint.

        Returns:
            The `numbers` of `save`, and `step`, the number of steps taken, if they lack it. For a
            trainer's run, its numbers.

        Raises:
            ConfigError: If there is no checkpoint, it has the state of another optimizer, or ranks
                name different folders.
            CheckpointError: On all ranks, if a named checkpoint, or all in the directory, are
                damaged, or if it does not fit the model.
        """
        from distmp.engine.saving import (
            check_optimizer,
            find_checkpoint,
            load_checkpoint,
            loaded_numbers,
        )

        with self._calls.call("load"):
            if self._saves is not None:
                self._saves.finish()
            described = {"folder": str(folder), "optimizer": repr(bool(optimizer))}
            check_same(self.world.group, self.device, described)
            checkpoint = find_checkpoint(folder, missing_ok=missing_ok)
            if checkpoint is None:
                return {"step": int(self._counts[:2].sum())}
            if optimizer:
                check_optimizer(self, checkpoint)
            load_checkpoint(self, checkpoint, optimizer=optimizer)
            return loaded_numbers(checkpoint)

    def export(
        self,
        folder: str | Path,
        state: Mapping[str, Tensor] | None = None,
        *,
        max_shard_size: int | None = None,
    ) -> None:
        """Write the FP32 weights as safetensors; every rank has to call it.

        The folder has the format of `distmp export`; it has a `config.json` only if the model is
        one of transformers or distmp's transformer. All ranks gather one tensor at a time, and rank
        0 writes it. An existing folder of weights is replaced when the new one is complete.

        Args:
            folder: The folder to write.
            state: Tensors to write in place of `state_dict()`, with its names and shards, such as
                an average of the weights.
            max_shard_size: Maximum size of one file, in bytes; None: 5 GB.

        Raises:
            CheckpointError: On all ranks, if the folder cannot be written, or holds other files.
            ConfigError: If `state` lacks a weight, or has an unknown one, if `folder` is named like
                a file (`model.safetensors`), or if `max_shard_size` is not positive.
        """
        from distmp.export.running import save_weights

        with self._calls.call("export"):
            save_weights(self, folder, state, max_shard_size)

    def tensors_by_use(self) -> dict[str, list[Tensor]]:
        """Return the live tensors that persist between steps, by their use.

        Keys are "parameters", "module buffers", "master weights", "optimizer state", "FP32
        gradients" and "partial sums of microbatches". A tensor may occur under several keys: FP32
        parameters are their own master weights.
        """
        strategy = self._strategy
        state = pytree.tree_leaves([*self.optimizer.state.values()])
        return {
            "master weights": [tensor for _, tensor in strategy.optimizer_parameters()],
            "parameters": list(self.module.parameters()),
            "module buffers": list(self.module.buffers()),
            "optimizer state": [leaf for leaf in state if isinstance(leaf, Tensor)],
            "partial sums of microbatches": strategy.partial_sums(),
            "FP32 gradients": strategy.gradient_memory(),
        }

    if not TYPE_CHECKING:  # mypy would accept any name

        def __getattr__(self, name):
            """Name the replacement of what models and optimizers of other libraries have."""
            attribute(self, name, _INSTEAD_OF)

        def __setattr__(self, name, value):
            """Refuse to assign what would have no effect, such as `engine.lr`."""
            if name in _INSTEAD_OF:
                attribute(self, name, _INSTEAD_OF)
            super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: hooks and process groups stay with the original.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError(
            "an engine cannot be copied or pickled; build another one on a separate model, and "
            "load engine.state_dict() into it"
        )


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return `value` as a 0-dim tensor on `device`; the host does not wait for the device."""
    if isinstance(value, Tensor):
        return to_device(value.detach(), device)
    return torch.scalar_tensor(value, dtype=torch.float64, device=device)
