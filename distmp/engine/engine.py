"""One correct distributed mixed-precision step, readable from top to bottom."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.diagnosis.attribution import OverflowContext, OverflowReport, diagnose
from distmp.diagnosis.replay import StepInputs, StepReplay, generator_states, generators_as
from distmp.distributed.compare_ranks import (
    Fingerprint,
    check_same,
    described_groups,
    described_model,
    hyperparameters,
    raise_difference,
)
from distmp.distributed.lost_peers import lost_peers_explained
from distmp.distributed.own_time import StepClock
from distmp.distributed.progress import DECISION, UPDATE, VALIDATION, activity
from distmp.distributed.roll_call import RollCall
from distmp.distributed.world import check_failed_everywhere, world_of_process
from distmp.engine.outcome import StepNumbers, StepOutcome
from distmp.engine.settings import EngineSettings, check_max_norm
from distmp.engine.spike_check import DivergenceConfig, DivergenceGuard, SpikeCheck
from distmp.engine.step_checks import (
    FirstStep,
    backward_errors_explained,
    batch_errors_explained,
    check_evaluated,
    check_gradients_enabled,
    check_loss,
    check_loss_function,
    check_microbatches,
    check_not_inference,
    check_outcome,
    check_stop,
)
from distmp.errors import CheckpointError, ConfigError, TrainingError, listed
from distmp.optim import LearningRates, OptimizerFactory, ScheduleFactory
from distmp.optim.state import (
    check_shapes,
    check_state,
    create_state,
    named_state,
    never_stepped,
    prepare_for_device_skip,
)
from distmp.optim.stepped import SteppedTensors
from distmp.parallel import AccumulationSettings, ParallelConfig, build_strategy, resolve_strategy
from distmp.parallel.module_buffers import ModuleBuffers, buffers_restored
from distmp.parallel.reproducible import check_power_of_two, make_deterministic
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.parallel.strategy import check_model
from distmp.precision import PolicyLike, resolve
from distmp.precision.builders import autocast_context, autocast_off
from distmp.precision.costs import costs
from distmp.precision.switches import product_switches
from distmp.scaling import (
    LossScale,
    LossScaleConfig,
    StepDecision,
    all_reduce_stats,
    decide_step,
    local_stats,
    loss_scale_rules,
    ordered_total,
    pack,
    unused_rules,
)
from distmp.utils.flat_shard import whole_shape

logger = logging.getLogger("distmp")

# The outcome of a step is read at the latest when the next one has been started.
STEPS_KEPT = 2

# Numbers that `distmp.scaling.local_stats` returns; behind them are those of the fingerprint.
MEASURED = 6

# Steps skipped in a row after which the engine warns, where nobody calls `check`.
SKIPS_WARNED = 10

# A state lists the parameters that no rank has ever used, under names that begin so.
UNUSED = "unused/"

# Beginnings of names that states of older versions lack: what a new run has is kept there.
ADDED_LATER = ("loss_scale/overflows_in_a_row", "divergence/")

LossFunction = Callable[[nn.Module, Any], "tuple[Tensor, Tensor | float]"]


class Engine:
    """Model, optimizer and microbatches in, a correct distributed mixed-precision step out.

    Every rank applies or skips each step together; the gradient is that of the global mean loss,
    however tokens are spread over microbatches and ranks.

    Args:
        model: Trained in place. All ranks start from rank 0's parameters and buffers.
        loss: `loss(module, batch)` runs `module(...)` and returns the loss *sum* over the batch and
            its weight (how many tokens or samples were summed), a number or a 0-dim tensor.
        optimizer: Builds the optimizer on `[(name, tensor), ...]`, the FP32 tensors to be stepped.
        policy: What `distmp.policy` takes (a preset's name, text, a mapping), a `PrecisionPolicy`,
            or "auto" for what the device supports.
        strategy: "single", "ddp", "fsdp", "hsdp", "fsdp1" or "auto".
        parallel: How the model is sharded, checkpointed and compiled.
        schedule: Builds a torch learning-rate scheduler on an optimizer.
        max_norm: Clip the norm of the global gradient to this.
        loss_scale: Rules of the loss scale, for policies that have one.
        max_consecutive_skips: `check` gives up after so many skipped steps in a row.
        attribution: Keep the microbatches of the last two steps, so that `explain` can find out
            why one of them overflowed.
        shard_optimizer: Every rank keeps and steps only its share of FP32 weights and optimizer
            state (`single` and `ddp`).
        reproducible: The same bits however the microbatches of the global batch are spread over
            1, 2, 4, 8 ... ranks (`single` and `ddp`). Random numbers are drawn per microbatch, from
            torch's generator, whose seed must be the same on all ranks. Sets one CPU thread and
            `torch.use_deterministic_algorithms` for the whole process.
        on_nonfinite: "skip_step" skips a step in which any gradient is not finite;
            "drop_microbatch" leaves out the microbatch and takes the mean over the rest (`single`
            and `ddp`).
        divergence: Look for spikes of loss and norm and for losses that are not finite, and leave
            out the updates of such steps where `skip` says so. What else is to follow is left to
            the caller, who finds `spike`, `loss` and the limits in the numbers of the step.
        nominal_weight: Typical global weight of a step, a constant that keeps gradients at the
            magnitude of a mean. None takes that of the first step, agreed by all ranks.
        first_step_checks: Look at the values of the first step for what is probably not meant: ids
            above the vocabulary, a loss that is a mean, the same data on all ranks. Under `single`
            and `ddp` the loss function is run on two made-up batches for it.
        device: Where to train; None takes the GPU of this rank if there is one.

    In a process that torchrun has started beside others the engine joins them, if nobody has
    initialized the default process group before.

    Attributes:
        module: The prepared model; call it for inference.
        optimizer: What `optimizer` built.
        policy: The policy in force.
        policy_reason: Why, in words.
        strategy: The name of the strategy in force.
        strategy_reason: What it has chosen and why, in words; may be empty.
        divergence: What judges each step by those before it.
        clock: Measures the time of steps that is this rank's own, if it is made active.

    Raises:
        ConfigError: If model, policy, strategy and optimizer do not fit together.

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
        model: nn.Module,
        loss: LossFunction,
        optimizer: OptimizerFactory,
        *,
        policy: PolicyLike = "auto",
        strategy: str = "auto",
        parallel: ParallelConfig | None = None,
        schedule: ScheduleFactory | None = None,
        max_norm: float | None = None,
        loss_scale: LossScaleConfig | None = None,
        max_consecutive_skips: int = 50,
        attribution: bool = True,
        shard_optimizer: bool = False,
        reproducible: bool = False,
        on_nonfinite: str = "skip_step",
        divergence: DivergenceConfig | None = None,
        nominal_weight: float | None = None,
        first_step_checks: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        check_not_inference("building an engine")
        self.world = world_of_process(device)
        self.device = self.world.device
        check_model(model)
        check_loss_function(loss)
        self.policy, self.policy_reason = resolve(policy, self.device)
        self.strategy = resolve_strategy(strategy, self.world)
        settings = EngineSettings(
            policy=self.policy,
            strategy=self.strategy,
            parallel=ParallelConfig() if parallel is None else parallel,
            accumulation=AccumulationSettings(shard_optimizer, reproducible, on_nonfinite),
            max_norm=max_norm,
            loss_scale=loss_scale,
            max_consecutive_skips=max_consecutive_skips,
            attribution=attribution,
            divergence=divergence,
            nominal_weight=nominal_weight,
            first_step_checks=first_step_checks,
        )
        if self.world.rank == 0:
            for cost in costs(self.policy):
                logger.warning("precision %s loses some: %s", self.policy.name, cost)
            if unused := unused_rules(self.policy.loss_scale, loss_scale):
                logger.warning("precision %s: %s", self.policy.name, unused)
        self.max_norm = max_norm
        self.nominal_weight = None if nominal_weight is None else _power_of_two(nominal_weight)
        self.max_consecutive_skips = max_consecutive_skips
        self.attribution = attribution
        self._recent: deque[tuple[StepOutcome, StepInputs]] = deque(maxlen=STEPS_KEPT)
        self._loss = loss
        self.reproducible = reproducible
        if reproducible:
            make_deterministic(self.device)
        with lost_peers_explained(self.world.group):
            described = settings.described() | described_model(model)
            check_same(self.world.group, self.device, described)
            self._strategy = build_strategy(
                self.strategy,
                model,
                self.policy,
                self.world,
                settings.accumulation,
                settings.parallel,
            )
        self.strategy_reason = self._strategy.reason
        self.module = self._strategy.module
        self.clock = StepClock(self.device)
        self._buffers = ModuleBuffers(self._strategy.model, self.world.group)
        parameters = self._strategy.optimizer_parameters()
        self._build_optimizer = optimizer
        self.optimizer = self._strategy.build_optimizer(optimizer, parameters)
        self._names = {id(tensor): name for name, tensor in parameters}
        # Offloaded parameters are stepped on the host, which then has to wait for the decision.
        on_host = any(tensor.device.type != self.device.type for _, tensor in parameters)
        self._skips_on_device = prepare_for_device_skip(self.optimizer) and not on_host
        self._stepped = SteppedTensors(self.optimizer, parameters)
        self._learning_rates = LearningRates(
            self.optimizer, schedule, self.device, on_device=self._skips_on_device
        )
        self.loss_scale = LossScale(
            loss_scale_rules(self.policy.loss_scale, loss_scale), self.device
        )
        self.divergence = DivergenceGuard(divergence, self.device)
        # Updates applied, steps skipped, steps skipped since the last update.
        self._counts = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._most_applied = 0
        self._first_step = FirstStep(self.world, self.module) if first_step_checks else None
        # Whether the caller looks after steps that are skipped.
        self._is_checked = False
        self._previous: StepOutcome | None = None
        self._roll_call = RollCall(self.world)
        # The call that is under way, how many have failed, and why the last one has, if it has.
        self._under_way = ""
        self._calls = {"engine.step": 0, "engine.load_state_dict": 0, "model.load_state_dict": 0}
        self._strategy.model.register_load_state_dict_post_hook(_counter(self._calls))
        self._has_gradients = False
        self._failures = 0
        self._failure: BaseException | None = None

    def step(self, microbatches: Sequence[Any], *, stop: bool = False) -> StepOutcome:
        """Train on the microbatches of this rank; every rank has to call it.

        Args:
            microbatches: Batches (tensors, or any nesting of containers of them) for `loss`; at
                least one, and with a sharded strategy as many on every rank.
            stop: This rank asks to stop; every rank sees it in the outcome of this step.

        Returns:
            The outcome, readable at once and without waiting after the next step was started.

        Raises:
            ConfigError: If `microbatches` is not a list of batches, or the loss function does not
                return a loss sum and a weight for one.
            LostPeerError: If another rank has ended.
        """
        with self._call("step", waits=False):
            check_gradients_enabled()
            check_microbatches(microbatches)
            check_stop(stop)
            check_max_norm(self.max_norm)
            if self.reproducible:
                check_power_of_two(len(microbatches))
            self._check_unchanged()
            if self._first_step is not None:
                outcome = self._check_and_take_first_step(self._first_step, microbatches, stop)
                self._first_step = None
            else:
                outcome = self._take_step(microbatches, stop)
        self._look_back(outcome)
        return outcome

    @contextmanager
    def _call(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Make a call that all ranks make together, unless ranks have come apart.

        Args:
            name: Of the method.
            waits: Begin when all ranks have made it.

        Raises:
            TrainingError: Inside of another call; after a call that failed on this rank alone; and
                if another rank makes another call or has ended.
        """
        if self._under_way:
            raise TrainingError(
                f"engine.{name}() was called inside of engine.{self._under_way}(), as by the loss "
                "function; call it after that has returned"
            )
        self._under_way = name
        try:
            with lost_peers_explained(self.world.group), autocast_off(self.device):
                if self._failure is not None:
                    check_failed_everywhere(self.world, self._failures, self._failure)
                    self._failure = None
                if waits:
                    self._roll_call.meet(f"engine.{name}()")
                else:
                    self._roll_call.count(f"engine.{name}()")
                yield
        except BaseException as error:
            self._failure = error
            self._failures += 1
            raise
        finally:
            self._under_way = ""

    def _take_step(self, microbatches: Sequence[Any], stop: bool) -> StepOutcome:
        self._calls["engine.step"] += 1
        activity.enter("beginning of the step")
        rate = self._learning_rates.set(self._counts[0], self._most_applied)
        scale = self.loss_scale.value
        self._buffers.begin_step()
        stats = self._accumulate(microbatches, scale)
        activity.enter(DECISION)
        self.clock.end()
        fingerprint = Fingerprint(self._numbers_of_rank(), self.world.world_size)
        total = self._measure(stats, fingerprint, stop=stop)
        self.clock.begin()
        decision = decide_step(total[:MEASURED], scale, self.nominal_weight or 1.0, self.max_norm)
        differ = fingerprint.differs(total[MEASURED:])
        spike_check = self.divergence.check(decision)
        decision = decision.skipping(spike_check.skip | differ)
        activity.enter(UPDATE)
        self._update(decision)
        self._buffers.end_step(decision.found_inf)
        self._strategy.end_step(decision.found_inf)
        exhausted = self.loss_scale.update(
            decision.overflow | (decision.dropped > 0), decision.empty
        )
        self.divergence.remember(decision)
        exhausted = exhausted & decision.overflow
        outcome = self._outcome(decision, spike_check, differ, rate, scale, exhausted)
        if self.attribution:
            inputs = StepInputs(tuple(microbatches), stats.generators, stats.losses, stats.weights)
            self._recent.append((outcome, inputs))
        return outcome

    def _check_unchanged(self) -> None:
        """Refuse what was changed behind the engine; train what was unfrozen."""
        self._stepped.check(self.optimizer)
        self._strategy.check_model()
        self._adopt_unfrozen()

    def _check_and_take_first_step(
        self, checks: FirstStep, microbatches: Sequence[Any], stop: bool
    ) -> StepOutcome:
        """Take a step, and look for mistakes in what it is called with."""
        with checks.watch_ids():
            found = checks.warnings(
                microbatches[0],
                self._try_forward,
                # With shards a forward is a collective, and made-up data may take another way.
                probe=self.strategy not in SHARDED_STRATEGIES,
            )
            outcome = self._take_step(microbatches, stop)
        for warning in (*found, *checks.narrow_loss()):
            self._warn(warning, stacklevel=4)
        return outcome

    @torch.no_grad()
    def _try_forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Run a forward pass that leaves neither buffers nor random generators changed."""
        with (
            torch.compiler.set_stance("force_eager"),
            generators_as(generator_states(self.device)),
            buffers_restored(self._strategy.model),
        ):
            return self._forward(batch)

    def _look_back(self, outcome: StepOutcome) -> None:
        """Look at the last step that has ended: on a device at the one before.

        Raises:
            ConfigError: If ranks took it with different settings.
        """
        known, self._previous = (outcome if self.host_waits else self._previous), outcome
        if known is None:
            return
        if known.ranks_differ:
            with lost_peers_explained(self.world.group):
                raise_difference(self.world.group, self._described())
        if not self._is_checked and known.read("skipped_in_a_row") == SKIPS_WARNED:
            self._warn_of_skips(known)

    def _warn_of_skips(self, known: StepOutcome) -> None:
        """Warn of many skipped steps in a row, for loops that never call `check`."""
        cause = self.explain(known) or _general_advice(known.numbers)
        self._warn(
            f"{SKIPS_WARNED} steps in a row were skipped, so nothing is trained: {cause}; call "
            "engine.check(outcome) after each step to end training when that continues",
            stacklevel=5,
        )

    def _warn(self, message: str, stacklevel: int) -> None:
        """Warn the caller of `step`, whatever is logged; on rank 0 alone."""
        if self.world.rank == 0:
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)

    def _adopt_unfrozen(self) -> None:
        """Have the optimizer step what was unfrozen, in the groups that its builder gives them."""
        unfrozen = self._strategy.unfrozen()
        if not unfrozen:
            return
        self._roll_call.meet_in_call(f", which trains {unfrozen[0][0]}")
        parameters = self._strategy.adopt(unfrozen)
        self._names.update((id(tensor), name) for name, tensor in parameters)
        addition = self._strategy.build_optimizer(self._build_optimizer, parameters)
        prepare_for_device_skip(addition)
        self._learning_rates.add_groups(addition.param_groups)
        for group in addition.param_groups:
            self.optimizer.add_param_group(group)
        self.optimizer.state.update(addition.state)
        self._stepped.add(parameters)

    def explain(self, outcome: StepOutcome) -> OverflowReport | None:
        """Find out why a step overflowed, by repeating it; every rank has to call it.

        It waits for the device. The repetition runs `loss` again on the microbatches of the step,
        with the random numbers it had, and leaves weights, buffers and generators as they are.
        Gradients of the last step are gone afterwards.

        Args:
            outcome: Of one of the last two steps. The repetition is exact if no update has been
                applied since: always right after the step, later only by luck.

        Returns:
            The same report on every rank, kept in `outcome.overflow_report` as well. None for a
            step without overflow, for an older one, and where `attribution` is off.
        """
        check_outcome(outcome)
        if outcome.overflow_report is None and outcome.numbers.overflow:
            for recent, inputs in self._recent:
                if recent is outcome:
                    with self._call("explain"):
                        outcome.overflow_report = self._repeat(outcome.numbers, inputs)
        return outcome.overflow_report

    def check(self, outcome: StepOutcome) -> None:
        """Raise if it is pointless to go on after this step; every rank has to call it.

        Raises:
            TrainingError: On all ranks alike, with what `explain` has found: if the loss scale can
                sink no further, or after `max_consecutive_skips`.
        """
        check_outcome(outcome)
        self._is_checked = True
        numbers = outcome.numbers
        stuck = numbers.skipped_in_a_row >= self.max_consecutive_skips
        if not (stuck or numbers.scale_exhausted):
            return
        if numbers.scale_exhausted:
            problem = (
                f"precision.loss_scale.min_scale = {numbers.loss_scale:g}: overflow at the lowest "
                "loss scale that is allowed"
            )
        else:
            what = "were left out as spikes" if numbers.spike else "had nothing finite to apply"
            problem = (
                f"precision.max_consecutive_skips = {self.max_consecutive_skips}: so many steps in "
                f"a row {what}"
            )
        raise TrainingError(f"{problem}; {self.explain(outcome) or _general_advice(numbers)}")

    def _repeat(self, numbers: StepNumbers, inputs: StepInputs) -> OverflowReport:
        facts = OverflowContext(
            scale=numbers.loss_scale,
            weight=numbers.weight,
            floor=self.loss_scale.floor,
            compute_dtype=self.policy.compute_dtype,
            has_masters=self.policy.has_masters,
            exact=int(self._counts[0]) == numbers.applied_total,
        )
        replay = StepReplay(self._strategy, self._repeat_microbatch, inputs, self.world.rank)
        evidence = replay.evidence(facts.scale, facts.lowest, facts.compute_dtype)
        everyone: list[Any] = [evidence]
        if self.world.group is not None:
            everyone = [None] * self.world.world_size
            dist.all_gather_object(everyone, evidence, group=self.world.group)
        return diagnose(everyone, facts)

    def _repeat_microbatch(self, batch: Any, scale: Tensor) -> Tensor:
        loss, _ = self._forward(batch)
        self._backward(loss, scale)
        return loss.detach().clone()

    def _accumulate(self, microbatches: Sequence[Any], scale: Tensor) -> MicrobatchStats:
        """Run forward and backward; return what this rank has to say about it."""
        strategy = self._strategy
        strategy.announce(len(microbatches))
        strategy.begin_step()
        stats = MicrobatchStats([], [], [], [], [])
        seed = int(torch.randint(2**62, ())) if self.reproducible else None
        for index, batch in enumerate(microbatches):
            strategy.begin_microbatch(last=index == len(microbatches) - 1)
            if seed is not None:
                torch.manual_seed(seed + self.world.rank * len(microbatches) + index)
            if self.attribution:
                stats.generators.append(generator_states(self.device))
            activity.enter("forward of microbatch", index + 1)
            loss, weight = self._forward(batch)
            if index == 0 and self.nominal_weight is None:
                self.nominal_weight = self._agree_on_nominal_weight(weight, len(microbatches))
            activity.enter("backward of microbatch", index + 1)
            self._backward(loss, scale)
            # A copy, because torch's mse_loss sums into the memory of all of its terms.
            loss = loss.detach().clone()
            stats.losses.append(loss)
            stats.add(loss, weight, strategy.end_microbatch())
        activity.enter("reduction of the gradients")
        strategy.finish_gradients()
        if not self._has_gradients:
            self._check_gradients(stats)
        return stats

    def _check_gradients(self, stats: MicrobatchStats) -> None:
        """Refuse a loss that depends on nothing that is trained.

        Raises:
            ConfigError: If no trained parameter has ever had a gradient, on any rank.
        """
        trained = [tensor for _, tensor in self._strategy.optimizer_parameters()]
        self._has_gradients = any(
            tensor.grad is not None for tensor in (*trained, *self.module.parameters())
        )
        # What is dropped does not count as use. Read only here: the host waits for it.
        if not (self._has_gradients or any(bool(flag) for flag in stats.dropped)):
            raise ConfigError(
                "loss",
                getattr(self._loss, "__name__", type(self._loss).__name__),
                f"gives none of the {len(trained)} trained parameters a gradient; run the module "
                "that it is called with, not another one, and return what depends on its output",
            )

    def _measure(self, stats: MicrobatchStats, fingerprint: Fingerprint, *, stop: bool) -> Tensor:
        """Return what all ranks together have measured, and the sums of their fingerprints."""
        dropped = sum(stats.dropped) if stats.dropped else 0.0
        if self.reproducible:
            return ordered_total(
                self._strategy.gradient_shards(),
                stats.loss_sums,
                stats.weights,
                stop=stop,
                dropped=dropped,
                more=fingerprint.terms,
                group=self.world.group,
                device=self.device,
            )
        measured = local_stats(
            self._strategy.gradients(),
            pack(*stats.loss_sums, device=self.device).sum(),
            pack(*stats.weights, device=self.device).sum(),
            stop=stop,
            dropped=dropped,
            device=self.device,
        )
        if fingerprint.terms:
            measured = torch.cat([measured, pack(*fingerprint.terms, device=self.device)])
        return all_reduce_stats(measured, self.world.group)

    def _numbers_of_rank(self) -> object:
        """Return what this rank takes the step with, as far as the host knows it."""
        return (
            self._calls,
            self.max_norm,
            self.nominal_weight,
            hyperparameters(self.optimizer),
            self._learning_rates.planned(self._most_applied),
            [parameter.requires_grad for parameter in self._strategy.model.parameters()],
        )

    def _described(self) -> dict[str, str]:
        """Return the same in words, for a comparison between ranks."""
        return {
            "max_norm": repr(self.max_norm),
            "nominal_weight": repr(self.nominal_weight),
            **described_groups(self.optimizer),
            "schedule": repr(self._learning_rates.planned(self._most_applied)),
            **described_model(self._strategy.model),
            **{f"calls of {name}": str(count) for name, count in self._calls.items()},
        }

    def _backward(self, loss: Tensor, scale: Tensor) -> None:
        with product_switches(self.policy), backward_errors_explained():
            (loss.float() * (scale / (self.nominal_weight or 1.0))).backward()

    def _forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch
        )
        with (
            product_switches(self.policy),
            autocast_context(self.policy, self.device),
            batch_errors_explained(batch, self.module),
        ):
            loss_sum, weight = check_loss(self._loss(self.module, batch))
        if self._first_step is not None:
            self._first_step.look_at(loss_sum, weight)
        return loss_sum, _scalar(weight, self.device)

    def _agree_on_nominal_weight(self, batch_weight: Tensor, microbatches: int) -> float | None:
        """Return n0, or None if the first microbatches add up to no finite weight above 0."""
        weight = batch_weight.to(torch.float64, copy=True) * microbatches
        if self.reproducible:
            # The first microbatch of all stands on rank 0, however many ranks there are.
            weight = weight * self.world.world_size if self.world.rank == 0 else weight.zero_()
        if self.world.group is not None:
            dist.all_reduce(weight, group=self.world.group)
        total = weight.item()
        return _power_of_two(total) if 0 < total < math.inf else None

    def _update(self, decision: StepDecision) -> None:
        """Step the optimizer, or leave everything as it is, as the decision says."""
        if self._skips_on_device:
            self._most_applied += 1
            # What torch's fused optimizers look for: they divide by the one and skip for the other.
            self.optimizer.grad_scale = decision.grad_scale  # type: ignore[attr-defined]
            self.optimizer.found_inf = decision.found_inf  # type: ignore[attr-defined]
            self._strategy.prepare_optimizer_grads()
            self._stepped.step()
        elif decision.found_inf.item() == 0:
            self._most_applied += 1
            for part in self._strategy.gradients():
                if part.tensors:
                    divisor = decision.grad_scale.to(part.tensors[0].device)
                    torch._foreach_div_(part.tensors, divisor)
            self._strategy.prepare_optimizer_grads()
            self._stepped.step()
        self._strategy.copy_master_to_model()

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
        self._counts = self._counts + torch.stack([1 - skipped, skipped, skipped])
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

    @property
    def host_waits(self) -> bool:
        """Whether the host waits for the device in every step, so that outcomes are at hand."""
        return self.device.type == "cpu" or not self._skips_on_device

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Any]) -> float:
        """Return the mean loss over the microbatches of all ranks; every rank has to call it.

        With a sharded strategy every rank needs the same number of microbatches; one with a weight
        of 0 fills up.
        """
        with self._call("evaluate"):
            check_evaluated(microbatches)
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            with _evaluation_mode(self.module):
                for batch in activity.each(VALIDATION, microbatches):
                    loss_sum, weight = self._forward(batch)
                    total += torch.stack([loss_sum.to(torch.float64), weight.to(torch.float64)])
            if self.world.group is not None:
                dist.all_reduce(total, group=self.world.group)
            loss, weight = total.tolist()
            return float(loss / weight) if weight else float("nan")

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that training continues from, as flat names and live tensors.

        Weights are the FP32 ones under the names of the model's parameters, so that a state can be
        loaded under another policy or strategy. Sharded tensors are DTensors, or `FlatShard`s of a
        sharded optimizer.
        """
        state = {
            f"model/{name}": self._strategy.as_stored(name, tensor.detach())
            for name, tensor in self._strategy.optimizer_parameters()
        }
        for name, value in self._strategy.untrained().items():
            state[f"model/{name}"] = value.detach()
        for name, value in named_state(self.optimizer, self._names).items():
            parameter = name.rpartition("/")[0]
            state[f"optimizer/{name}"] = self._strategy.as_stored(parameter, value)
        for name, value in self.loss_scale.state_dict().items():
            state[f"loss_scale/{name}"] = value
        for name, value in self.divergence.state_dict().items():
            state[f"divergence/{name}"] = value
        for name in self._strategy.unused:
            state[f"{UNUSED}{name}"] = torch.zeros(())
        state["engine/counts"] = self._counts
        state["engine/nominal_weight"] = torch.tensor(
            self.nominal_weight or 0.0, dtype=torch.float64
        )
        return state

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: hooks and process groups stay with the original.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError(
            "an engine cannot be copied or pickled; build another one on a model of its own, and "
            "hand over engine.state_dict()"
        )

    def held_until_update(self) -> set[str]:
        """Return the names in `state_dict` of what only an update of the optimizer changes."""
        weights = {f"model/{name}" for name, _ in self._strategy.optimizer_parameters()}
        state = named_state(self.optimizer, self._names)
        return weights | {f"optimizer/{name}" for name in state}

    def _names_of_unused(self) -> tuple[str, ...]:
        """Return beginnings of names in `state_dict` of what another run need not have.

        Some optimizers create the state of a parameter before its first gradient.
        """
        return (UNUSED, *(f"optimizer/{name}/" for name in self._strategy.unused))

    def prepare_to_load(
        self, stored: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, Tensor]:
        """Create the optimizer state that a stored state has, so that it can be loaded in place.

        Args:
            stored: Shape and dtype of every stored tensor, by its name in `state_dict`.

        Returns:
            The live tensors to fill, for `load_state_dict`: all of `state_dict`, except what states
            of older versions lack and state of parameters that nobody has used.
        """
        self._roll_call.count("engine.prepare_to_load()")
        self._adopt_unfrozen()
        prefix = "optimizer/"
        optimizer_state = {
            name.removeprefix(prefix): kind
            for name, kind in stored.items()
            if name.startswith(prefix)
        }
        left_out = create_state(
            self.optimizer,
            self._names,
            optimizer_state,
            {
                name: whole_shape(self._strategy.as_stored(name, tensor))
                for name, tensor in self._strategy.optimizer_parameters()
            },
        )
        if self._skips_on_device:
            prepare_for_device_skip(self.optimizer)
        self._strategy.unused = [
            *(name.removeprefix(UNUSED) for name in stored if name.startswith(UNUSED)),
            *never_stepped(self.optimizer, self._names, optimizer_state),
        ]
        if left_out and self.world.rank == 0:
            logger.warning(
                "the state has been training %s, frozen or missing here: it stays so, and its "
                "optimizer state is lost. What was unfrozen during the run has to be unfrozen "
                "again before loading",
                listed(left_out),
            )
        live = self.state_dict()
        may_lack = (*ADDED_LATER, *self._names_of_unused())
        return {
            name: tensor
            for name, tensor in live.items()
            if name in stored or not name.startswith(may_lack)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state with the names of `state_dict`, sharded as this engine shards.

        Values are copied into the live tensors; then parameters in the compute type are made from
        the FP32 weights.

        Raises:
            CheckpointError: If the state lacks something that this engine trains.
        """
        check_state(state)
        self._calls["engine.load_state_dict"] += 1
        live = self.prepare_to_load(
            {name: (whole_shape(value), value.dtype) for name, value in state.items()}
        )
        if missing := live.keys() - state.keys():
            raise CheckpointError(f"the state lacks {listed(sorted(missing))}")
        check_shapes(state, live)
        lacking = self.state_dict().keys() - live.keys()
        absent = sorted(name for name in lacking if not name.startswith(self._names_of_unused()))
        if absent and self.world.rank == 0:
            logger.warning("the state is of an older version: %s starts anew", listed(absent))
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(state[name])
        prefix = "loss_scale/"
        self.loss_scale.load_state_dict(
            {name.removeprefix(prefix): live[name] for name in live if name.startswith(prefix)},
            quiet=self.world.rank != 0,
        )
        if any(name.startswith("divergence/") for name in live):
            self.divergence.load_state_dict(
                {name: live[f"divergence/{name}"] for name in self.divergence.state_dict()}
            )
        self._most_applied = int(self._counts[0])
        self.nominal_weight = float(live["engine/nominal_weight"]) or None
        self._strategy.copy_master_to_model()


class MicrobatchStats(NamedTuple):
    """What the microbatches of a step left behind on this rank, a list entry for each of them.

    Attributes:
        losses: Loss sums, 0-dim.
        loss_sums: The same, 0 where the microbatch was dropped.
        weights: Weights, 0-dim, 0 where the microbatch was dropped.
        dropped: Whether it was dropped, 0-dim bool; empty where none can be.
        generators: States of the random generators before it; empty without attribution.
    """

    losses: list[Tensor]
    loss_sums: list[Tensor]
    weights: list[Tensor]
    dropped: list[Tensor]
    generators: list[dict[torch.device, Tensor]]

    def add(self, loss: Tensor, weight: Tensor, kept: Tensor | None) -> None:
        """Count a microbatch, unless `kept`, 0-dim bool, says that it is left out."""
        if kept is not None:
            loss = torch.where(kept, loss, 0.0)
            weight = torch.where(kept, weight, 0)
            self.dropped.append(~kept)
        self.loss_sums.append(loss)
        self.weights.append(weight)


def _counter(calls: dict[str, int]) -> Callable[[nn.Module, object], None]:
    """Return a hook that counts states loaded into a model; it does not hold the engine."""

    def count(module: nn.Module, keys: object) -> None:
        calls["model.load_state_dict"] += 1

    return count


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:  # not all of them, if some were frozen in evaluation mode
            part.training = True


def _general_advice(numbers: StepNumbers) -> str:
    if numbers.weight == 0:
        return "no microbatch of any rank had a weight above 0; look at what the loss returns"
    if numbers.spike:
        return (
            f"loss {numbers.loss:.4g} (limit {numbers.loss_limit:.4g}), norm "
            f"{numbers.grad_norm:.4g} (limit {numbers.norm_limit:.4g}); lower optim.lr, or raise "
            "divergence.loss_threshold and norm_threshold if this is how the run goes"
        )
    return (
        f"loss {numbers.loss:.4g}, loss scale {numbers.loss_scale:g}; if the loss is finite use a "
        "bf16 policy or a lower precision.loss_scale.min_scale, if it is not lower optim.lr"
    )


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return `value` as a 0-dim tensor on `device`, without making the host wait for a copy."""
    if isinstance(value, Tensor):
        return value.detach().to(device, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


def _power_of_two(weight: float) -> float:
    """Round up to a power of two, so that dividing the loss by it costs no precision."""
    return 2.0 ** math.ceil(math.log2(weight))
