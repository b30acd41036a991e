"""A `torch.amp.GradScaler` whose ranks and optimizers apply or skip a step together.

torch's scaler checks the gradients of one rank, separately for each optimizer. Here the first
`step` of an iteration sums one small vector over all ranks. Every rank gets the same flag from it
and, for clipping, the same norm. The vector also shows whether scale and calls are the same on all
ranks.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from distmp.distributed import rank_monitor
from distmp.distributed.comparison import Fingerprint
from distmp.distributed.rank_monitor import PendingDecision, RankMonitor
from distmp.errors import ConfigError, TrainingError, brief, listed, require
from distmp.scaling.calls import CallLog, Decision, difference
from distmp.scaling.local_gradients import (
    check_norm,
    local_gradients,
    non_finite_names,
    square_sum,
    unscale,
)
from distmp.scaling.loss_scale import LossScale
from distmp.scaling.norms import summed
from distmp.scaling.rank_group import RankGroup
from distmp.scaling.reduced_flags import (
    CheckedOptimizer,
    GradientVersions,
    ReducedFlags,
    reduce_flags,
)
from distmp.scaling.settings import LossScaleConfig
from distmp.scaling.step_decision import (
    PRESCALE,
    clip_coefficient,
    divisor_fits,
    divisor_overflows,
    not_finite,
)
from distmp.utils.host_copy import HostCopy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("distmp")

# How long an `update` without a step waits for the decision of other ranks.
MISUSE_SECONDS = 10.0


class DistributedGradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling in which all ranks make the same decision.

    Use it like `torch.amp.GradScaler`; every rank has to make the same calls in the same order. In
    a process without a process group it scales, skips and steps like torch's scaler, bit by bit,
    with these differences: the scale stays between `min_scale` and `max_scale`, an overflow at
    `min_scale` is an error, an optimizer without gradients is not an error, FP16 gradients are
    unscaled, optimizers that are unscaled before the first step skip together, a skipped first step
    of fused SGD leaves no momentum (torch's scaler leaves uninitialized values), and
    `load_state_dict` does not override the arguments for growth and backoff.

    Gradients have to be reduced before a step, as DDP and FSDP do in backward. If the scale differs
    between ranks, all ranks skip, and raise an error at `update`. If ranks call the scaler
    differently, all ranks skip the first decision that differs and raise the same error, which
    shows the calls of each rank. If a rank leaves out a step after a common decision, the next
    decision raises an error which reports that weights differ. If a rank does not reach a
    decision, a warning after a minute, and the error of the failed reduction, name the rank and its
    line of code.

    The first `step` of an iteration decides for its optimizer, for every optimizer that was
    unscaled before and, if one of these is registered, for all registered ones, which therefore
    need all their gradients by then. A decision is one all-reduce of eight numbers. Without a fused
    optimizer `step` waits for the device once. With a fused optimizer it does not wait, except at
    its first use on several ranks, which check that they use the same optimizer, and for SGD until
    it has momentum.

    Args:
        device: Device type of the scale.
        init_scale: Initial scale.
        growth_factor: Factor by which the scale is multiplied after `growth_interval` consecutive
            clean steps.
        backoff_factor: Factor by which the scale is multiplied after `hysteresis` consecutive
            overflows, and after each further one.
        growth_interval: Number of consecutive clean steps before the scale grows.
        enabled: False disables everything, except clipping with `clip_grad_norm_`.
        group: Ranks that decide together: a process group, a device mesh (all of its ranks), or
            None for all ranks.
        optimizers: Optimizers of one model, which apply or skip together; see `register`.
        hysteresis: Number of consecutive overflows before a backoff.
        min_scale: Lower limit of the scale; None is 1, or `init_scale` if that is lower.
        max_scale: Upper limit of the scale; None is 2^24, or `init_scale` if that is higher.
        static: Fix the scale at `init_scale`; steps with an overflow are still skipped.
        max_consecutive_skips: Raise an error after this number of consecutive skipped steps; None
            never does.

    Raises:
        ConfigError: If a number is out of range, and on a rank outside `group`.
        AssertionError: For factors that torch's scaler refuses.

    Example:
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> scaler = DistributedGradScaler("cpu", optimizers=[optimizer])
        >>> scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
        >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        65536.0
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        static: bool = False,
        max_consecutive_skips: int | None = None,
    ) -> None:
        self._loss_scale: LossScale | None = None
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._rules = LossScaleConfig()
        if self._enabled:
            self._set_rules(
                dynamic=not static,
                init=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                min_scale=min(1.0, init_scale) if min_scale is None else min_scale,
                max_scale=max(2.0**24, init_scale) if max_scale is None else max_scale,
            )
        most = max_consecutive_skips
        valid = most is None or most >= 1
        require(valid, "max_consecutive_skips", most, "use 1 or more steps, or None")
        self._max_consecutive_skips = max_consecutive_skips
        self._ranks = RankGroup(group)
        self._registered: list[torch.optim.Optimizer] = []
        self._has_scaled = False
        self._init_counts = SkipCounts(0, 0, 0)
        # Number of consecutive and of total skips, int64 of shape (2,) on the device of the scale.
        self._skips: Tensor | None = None
        self._latest_found_inf: Tensor | None = None
        # Above 0 if the latest step of an optimizer was skipped, 0-dim on the device. By its `id`:
        # a mapping would keep optimizers alive.
        self._flags: dict[int, Tensor] = {}
        # Flags of the last iteration that the host has not read yet.
        self._unread: HostCopy | None = None
        self._warned_of_partial_update = False
        self._calls = CallLog()
        # Decisions for which the host has not read yet whether ranks made different calls: each
        # with its reduction and the flag.
        self._unchecked: list[tuple[Decision, PendingDecision | None, HostCopy]] = []
        # From now on, other ranks can query the latest call of this one.
        self._monitor: RankMonitor | None = rank_monitor.current()
        self._begin_iteration()
        problem = "use a list of optimizers: optimizers=[optimizer]"
        require(isinstance(optimizers, Iterable), "optimizers", brief(optimizers), problem)
        self.register(*optimizers)

    def register(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make optimizers apply or skip together: an overflow in one skips all.

        All their gradients have to be complete at the first `step` of an iteration.
        """
        self._registered = _distinct([*self._registered, *optimizers])

    # One iteration

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each tensor of an iterable, by the scale."""
        self._has_scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale; ranks decide later, in `step`."""
        self._record_call("unscale_")
        self._unscale(optimizer)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._inspected.get(id(optimizer))
        if known is not None:
            known.check_unchanged()
            if known.found_inf is not None and _skips_on_device(optimizer):
                self._calls.unscales(optimizer)
        super().unscale_(optimizer)
        if not self._enabled:
            return
        state = self._per_optimizer_states[id(optimizer)]
        if known is None:
            (flag,) = state["found_inf_per_device"].values()
            self._inspected[id(optimizer)] = CheckedOptimizer(optimizer, flag)
        else:
            known.checked = None
            state["found_inf_per_device"] = known.found_inf_per_device()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer or skip the step, as all ranks have decided.

        Raises:
            RuntimeError: Like torch's scaler; and if gradients of a registered optimizer changed
                after ranks had decided on them.
            TrainingError: The same on all ranks, if they call the scaler differently; on CUDA,
                where the host does not wait, at the second `update` at the latest. Also if another
                rank does not reach the decision.
            ConfigError: If the environment names several processes, but there is no process group;
                and if ranks outside of `group` hold shards of a gradient; and for a closure, unless
                the scaler is disabled.
        """
        if self._enabled:
            refuse_closure(args[0] if args else kwargs.pop("closure", None))
        self._record_call("step")
        if self._enabled:
            self._check_scale_growth_tracker("step")
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is not OptState.STEPPED:
                found_inf = self._decide_for(optimizer)
                starts_momentum = _starts_momentum(optimizer)
                if starts_momentum or not _skips_on_device(optimizer):
                    # The host waits for the flag here, so it can check that ranks do not differ.
                    self._check_decisions(self._calls.iteration)
                self._calls.steps(optimizer)
                if starts_momentum and found_inf.item():
                    state["stage"] = OptState.STEPPED
                    return None
                if state["stage"] is OptState.READY:
                    if not _skips_on_device(optimizer):
                        self._unscale(optimizer)
                    elif id(optimizer) in self._clips:
                        # torch's scaler multiplies this by the scale, and deletes it afterwards.
                        inverse = self._clips[id(optimizer)].reciprocal()
                        optimizer.grad_scale = inverse  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch's scaler leaves these, and would multiply the scale by `grad_scale` next time.
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
            raise

    def clip_grad_norm_(
        self,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        max_norm: float,
    ) -> Tensor:
        """Clip the norm of the gradient over all ranks; call it instead of `unscale_`.

        It reads the gradients once. `step` unscales and clips them in its own pass over memory;
        non-finite gradients are not clipped. A second call clips what the first one has left. Plain
        tensors and DTensors on different meshes can be mixed: plain tensors count as equal on all
        ranks of the group, and a DTensor as replicated outside of its mesh. If that is wrong, as
        with pipeline stages, use `unscale_` and clip the gradients yourself.

        Args:
            optimizers: An optimizer, or several whose common norm is clipped; not unscaled yet.
            max_norm: Largest norm of the unscaled gradient.

        Returns:
            The unscaled norm before clipping, 0-dim FP64 on the device; the host does not wait.

        Raises:
            RuntimeError: For an optimizer that was unscaled or stepped in this iteration.
            ValueError: If a gradient is a DTensor with the placement Partial, or a shard of FSDP1.
            TrainingError: Like `step`.
            ConfigError: Like `step`; and unless `max_norm` is above 0.
        """
        # Other values would turn the update around, or make the weights NaN.
        require(max_norm > 0, "max_norm", max_norm, "use a number above 0")
        self._record_call("clip_grad_norm_")
        members = _distinct(optimizers if isinstance(optimizers, Iterable) else [optimizers])
        for member in members if self._ranks.world_size > 1 else ():
            check_norm(member)
        if not self._enabled:
            return self._clip_at_once(members, max_norm)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        stages = {self._per_optimizer_states[id(member)]["stage"] for member in members}
        if OptState.STEPPED in stages:
            raise RuntimeError("clip_grad_norm_() after step(): call scaler.update() after step().")
        if OptState.UNSCALED in stages:
            raise RuntimeError(
                "call clip_grad_norm_() instead of unscale_(); after an iteration that raised an "
                "error, call scaler.update()"
            )
        total = self._decide("clip_grad_norm_", members, max_norm=max_norm)
        norm = total.square_sum.sqrt() / scale
        coefficient = clip_coefficient(norm, max_norm)
        if not divisor_fits(scale, coefficient):
            for member in members:
                self._inspected[id(member)].multiply(PRESCALE)
            coefficient = coefficient / PRESCALE
        coefficient = coefficient.to(torch.float32)
        for member in members:
            found_inf = self._inspected[id(member)].global_found_inf()
            clip = torch.where(found_inf > 0, 1.0, coefficient)
            before = self._clips.get(id(member))
            self._clips[id(member)] = clip if before is None else before * clip
        return norm

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, the same way on every rank.

        Args:
            new_scale: Sets the scale, clamped to `min_scale` and `max_scale`; a positive finite
                number, the same on every rank.

        Raises:
            TrainingError: The same on all ranks: for an overflow at `min_scale`, after
                `max_consecutive_skips` skipped steps, or if the scale or the calls of the scaler
                differ between ranks. On CUDA, where the host does not wait, one `update` later.
            ConfigError: If `new_scale` is not positive and finite.
        """
        if new_scale is not None and not isinstance(new_scale, Tensor):
            new_scale = float(new_scale)
        self._record_call("update")
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        self._check_decisions(self._calls.iteration - 1)
        without_step = not self._totals and new_scale is None
        if any(inspected.found_inf is None for inspected in self._inspected.values()) or (
            # An update without a step is an error. Join the others' decision, so that all raise it.
            without_step and self._ranks.others_decide(MISUSE_SECONDS)
        ):
            self._decide("update", [])
        if new_scale is not None:
            self._set_scale(new_scale)
        elif not self._totals:
            raise AssertionError("No inf checks were recorded prior to update.")
        flags = self._update_scale(dynamic=new_scale is None) if self._totals else None
        optimizers = [inspected.optimizer for inspected in self._inspected.values()]
        self._per_optimizer_states.clear()
        self._calls.updates(sets_scale=new_scale is not None)
        self._begin_iteration()
        if flags is not None:
            self._report(flags, optimizers)

    def step_scheduler(self, scheduler: Any, *args: Any) -> None:
        """Call `scheduler.step(*args)` unless its optimizer skipped; waits for the device.

        For a scheduler whose `optimizer` this scaler has not stepped, `step_skipped` decides.
        """
        flag = self._flags.get(id(getattr(scheduler, "optimizer", None)))
        if not (self.step_skipped if flag is None else flag):
            scheduler.step(*args)

    @property
    def step_skipped(self) -> bool:
        """Whether an optimizer skipped in this iteration or, after `update`, in the last one."""
        return self._latest_found_inf is not None and bool(self._latest_found_inf.item())

    @property
    def consecutive_skips(self) -> int:
        """Number of consecutive iterations with a skipped step, up to the last `update`."""
        return self._counts().consecutive_skips

    @property
    def total_skips(self) -> int:
        """Total number of iterations with a skipped step, up to the last `update`."""
        return self._counts().total_skips

    # The decision

    def _record_call(self, method: str) -> None:
        """Record a call for other ranks; with a new process group the log starts empty.

        Raises:
            ConfigError: If there are other ranks, but no process group.
        """
        if self._enabled or method == "clip_grad_norm_":
            _ = self._ranks.world_size
        current = rank_monitor.current()
        if current is not self._monitor:
            self._monitor, self._calls, self._unchecked = current, CallLog(), []
        if current is not None:
            current.record_call(method, self._calls.iteration)

    def _begin_iteration(self) -> None:
        self._inspected: dict[int, CheckedOptimizer] = {}
        self._totals: list[ReducedFlags] = []
        self._clips: dict[int, Tensor] = {}

    def _decide_for(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Make the decision for `optimizer` unless there is one; return its flag."""
        known = self._inspected.get(id(optimizer))
        if known is not None and known.found_inf is not None:
            known.check_unchanged()
        else:
            if known is None and not _skips_on_device(optimizer):
                self._unscale(optimizer)
            self._decide("step", [optimizer])
        return self._inspected[id(optimizer)].global_found_inf()

    def _decide(
        self,
        method: str,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
    ) -> ReducedFlags:
        """Check gradients that were not checked yet, and decide on all of them in one reduction.

        Args:
            method: Name of the method that was called.
            optimizers: The optimizers to decide on; undecided and registered ones may join.
            max_norm: The norm to clip to; None does not compute the norm.
        """
        scale, _ = self._check_scale_growth_tracker("step")
        undecided = [i.optimizer for i in self._inspected.values() if i.found_inf is None]
        members = _distinct([*optimizers, *undecided])
        if len(_distinct([*members, *self._registered])) < len(members) + len(self._registered):
            members = _distinct([*members, *self._registered])
        squares = []
        for member in optimizers if max_norm is not None else ():
            gradients = local_gradients(member, self._ranks.group)
            squares.append(square_sum(gradients, self._ranks.world_size, scale.device))
            if id(member) in self._clips:
                squares[-1] = squares[-1] * self._clips[id(member)].double().square()
            flag = not_finite(squares[-1]).to(torch.float32)
            checked = CheckedOptimizer(member, flag, GradientVersions(member, gradients))
            self._inspected.setdefault(id(member), checked)
        for member in members:
            if id(member) not in self._inspected:
                gradients = local_gradients(member, self._ranks.group)
                flag = unscale(gradients, None, scale.device)
                checked = CheckedOptimizer(member, flag, GradientVersions(member, gradients))
                self._inspected[id(member)] = checked
        waiting = [i for i in self._inspected.values() if i.found_inf is None]
        square = summed(squares, scale.device)
        reduced = self._reduce(method, optimizers, waiting, square, scale, max_norm)
        if max_norm is not None:
            reduced = reduced.skipping(divisor_overflows(reduced.square_sum.sqrt() / max_norm))
        if waiting:
            self._apply_decision(waiting, reduced)
        return reduced

    def _reduce(
        self,
        method: str,
        named: Sequence[torch.optim.Optimizer],
        waiting: Sequence[CheckedOptimizer],
        square: Tensor,
        scale: Tensor,
        max_norm: float | None,
    ) -> ReducedFlags:
        """Sum the flags and norms of all ranks, and compare their calls of the scaler.

        Raises:
            TrainingError: If the calls differ and the host knows it without waiting.
        """
        if self._ranks.world_size == 1:  # skip the identity of optimizers, which waits
            alone = Fingerprint(0, world_size=1)
            return reduce_flags(waiting, square, scale, self._ranks, alone, has_scaled=True)
        decision = self._calls.decide(
            method,
            named,
            _distinct([*named, *(member.optimizer for member in waiting)]),
            unscaled=[
                member.optimizer
                for member in waiting
                if member.checked is None and _skips_on_device(member.optimizer)
            ],
            max_norm=max_norm,
        )
        total = reduce_flags(
            waiting,
            square,
            scale,
            self._ranks,
            Fingerprint(decision.fingerprint, self._ranks.world_size),
            has_scaled=self._has_scaled or not self._enabled,
        )
        differ = HostCopy(total.calls_differ)
        self._unchecked.append((decision, self._ranks.latest_decision, differ))
        is_allowed = self._check_decisions(self._calls.iteration if decision.new else 0)
        return total if is_allowed else total.skipping(total.calls_differ)

    def _check_decisions(self, iteration: int) -> bool:
        """Check whether ranks called the scaler differently in recent decisions.

        Args:
            iteration: Wait for decisions up to this iteration; check later ones if their result has
                arrived on the host.

        Returns:
            Whether ranks differ in a way that is allowed.

        Raises:
            TrainingError: The same on all ranks, if they call the scaler differently.
        """
        differ = False
        while self._unchecked:
            decision, place, copied = self._unchecked[0]
            if decision.iteration > iteration and not copied.is_complete:
                break
            del self._unchecked[0]
            if copied.read():
                exchange = functools.partial(self._ranks.exchange, place)
                problem = difference(decision, self._ranks.world_size, exchange)
                if problem is not None:
                    raise TrainingError(problem)
                differ = True
        return differ

    @torch.no_grad()
    def _clip_at_once(self, optimizers: Sequence[torch.optim.Optimizer], max_norm: float) -> Tensor:
        """Clip gradients that were never scaled."""
        self._check_decisions(self._calls.iteration - 1)
        group = self._ranks.group
        gradients = [part for member in optimizers for part in local_gradients(member, group)]
        # Also where all of a rank's shards are empty: ranks have to reduce on one kind of device.
        groups = (group["params"] for member in optimizers for group in member.param_groups)
        device = next((p.device for group in groups for p in group), torch.device("cpu"))
        square = square_sum(gradients, self._ranks.world_size, device)
        scale = torch.ones((), device=device)
        total = self._reduce("clip_grad_norm_", optimizers, [], square, scale, max_norm)
        self._calls.iteration += 1
        norm = total.square_sum.sqrt()
        coefficient = torch.where(norm.isfinite(), clip_coefficient(norm, max_norm), 1.0)
        factors = [coefficient]
        if not divisor_fits(scale, coefficient):
            factors = [torch.full_like(norm, PRESCALE), coefficient / PRESCALE]
        for gradient in gradients:
            for factor in factors:
                gradient.tensor.mul_(factor.to(gradient.tensor.device))
        return norm

    def _apply_decision(self, members: Sequence[CheckedOptimizer], total: ReducedFlags) -> None:
        for member in members:
            member.found_inf = total.found_inf
            state = self._per_optimizer_states[id(member.optimizer)]
            state["found_inf_per_device"] = member.found_inf_per_device()
            self._flags[id(member.optimizer)] = total.found_inf
        self._totals.append(total)
        found = [total.found_inf for total in self._totals]
        self._latest_found_inf = functools.reduce(torch.maximum, found)

    # Methods that torch's scaler calls

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        if id(optimizer) in self._clips:
            inv_scale = inv_scale * self._clips[id(optimizer)]
        flag = unscale(local_gradients(optimizer, self._ranks.group), inv_scale, found_inf.device)
        return {flag.device: flag}

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return super()._found_inf_per_device(optimizer)  # `step` has decided

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if id(optimizer) in self._inspected:
            self._decide_for(optimizer)
        return super()._found_inf_per_device(optimizer)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None and self._ranks.world_size > 1:
            # A rank without data has no loss to scale, but takes part in the decision.
            self._make_scale(torch.device(self._device))
        if self._scale is None:
            raise AssertionError(f"call scaler.scale(loss).backward() before {funcname}().")
        return super()._check_scale_growth_tracker(funcname)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._has_scaled = True
        self._make_scale(dev)

    def _make_scale(self, dev: torch.device) -> None:
        if self._loss_scale is not None:
            return
        counts = self._init_counts
        loss_scale = LossScale(self._rules, dev)
        loss_scale.value.fill_(self._init_scale)
        loss_scale.clean_steps.fill_(self._init_growth_tracker)
        loss_scale.overflows_in_a_row.fill_(counts.overflows_in_a_row)
        self._skips = torch.tensor([counts.consecutive_skips, counts.total_skips], device=dev)
        self._loss_scale = loss_scale
        self._scale, self._growth_tracker = loss_scale.value, loss_scale.clean_steps

    # The scale

    def _update_scale(self, *, dynamic: bool) -> HostCopy:
        """Update the counts, and the scale if `dynamic`, after an iteration.

        Returns:
            What `_report` reads: whether there is no gradient, only some optimizers skipped, the
            scale is exhausted, scales differ and `scale` was never called, and the number of
            skipped iterations in a row.
        """
        assert self._loss_scale is not None
        assert self._skips is not None
        # Most iterations have one decision; each operation on a number launches a kernel.
        empty = functools.reduce(operator.and_, [total.empty for total in self._totals])
        found = [total.found_inf for total in self._totals]
        most = functools.reduce(torch.maximum, found)
        skipped, partial = most > 0, functools.reduce(torch.minimum, found) < most
        exhausted = torch.zeros_like(skipped)
        if dynamic:
            exhausted = self._loss_scale.update(skipped, empty)
            self._scale = self._loss_scale.value
            self._growth_tracker = self._loss_scale.clean_steps
        consecutive = torch.where(empty, self._skips[0], (self._skips[0] + 1) * skipped)
        self._skips = torch.stack([consecutive, self._skips[1] + skipped])
        differ = functools.reduce(operator.or_, [total.scales_differ for total in self._totals])
        unscaled = functools.reduce(
            operator.or_, [total.scale_never_called for total in self._totals]
        )
        return HostCopy(torch.stack([empty, partial, exhausted, differ, unscaled, consecutive]))

    def _report(self, flags: HostCopy, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warn or raise because of the last iteration; on CUDA because of the one before."""
        if flags.on_device:
            flags, self._unread = self._unread, flags  # type: ignore[assignment]
            if flags is None:
                return
        empty, partial, exhausted, scales_differ, never_scaled, consecutive_skips = flags.read()
        if empty:
            warnings.warn(
                "no rank has had a gradient, so nothing was updated; call scaler.step(optimizer) "
                "after backward and before optimizer.zero_grad()",
                RuntimeWarning,
                stacklevel=3,
            )
        if partial and not self._warned_of_partial_update:
            self._warned_of_partial_update = True
            logger.warning(
                "one optimizer stepped and another one skipped in the same iteration; if one "
                "backward pass computes the gradients of both, make them decide together: "
                "DistributedGradScaler(optimizers=[...])"
            )
        _check_scales(scales_differ)
        if never_scaled:
            warnings.warn(
                "no rank has ever called scale(), so gradients are divided by a loss scale that "
                "they were never multiplied by; call scaler.scale(loss).backward()",
                RuntimeWarning,
                stacklevel=3,
            )
        limit = self._max_consecutive_skips
        if exhausted:
            problem = f"gradients overflow at loss scale {self._rules.min_scale:g} (min_scale)"
        elif limit is not None and consecutive_skips >= limit:
            problem = f"{consecutive_skips} steps in a row were skipped (max_consecutive_skips)"
        else:
            return
        raise TrainingError(problem + _advice(optimizers))

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, float) or new_scale.numel() == 1:
            value = new_scale if isinstance(new_scale, float) else new_scale.detach().item()
            valid = math.isfinite(value) and value > 0
            require(valid, "new_scale", value, "use a positive finite number")
        super().update(new_scale)
        assert self._scale is not None
        self._scale.clamp_(self._rules.min_scale, self._rules.max_scale)

    def _set_rules(self, **changes: Any) -> None:
        try:
            self._rules = replace(self._rules, **changes)
        except ConfigError as error:
            name = error.setting.rpartition(".")[2]
            setting = "init_scale" if name == "init" else name
            raise ConfigError(setting, error.value, error.problem) from None
        if self._loss_scale is not None:
            self._loss_scale.config = self._rules

    def set_growth_factor(self, new_factor: float) -> None:
        """Set a new growth factor, above 1."""
        self._set_rules(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set a new backoff factor, between 0 and 1."""
        self._set_rules(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set a new growth interval, 1 or more."""
        self._set_rules(growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    # State

    def _counts(self) -> SkipCounts:
        if self._loss_scale is None or self._skips is None:
            return self._init_counts
        consecutive, total = self._skips.tolist()
        return SkipCounts(int(self._loss_scale.overflows_in_a_row.item()), consecutive, total)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, empty if disabled; torch's scaler can load it."""
        if not self._enabled:
            return {}
        return {**super().state_dict(), **self._counts()._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this scaler or of torch's scaler.

        The arguments of this scaler take precedence: a scale outside the limits is clamped, an
        invalid one (0, infinity, NaN) becomes `init_scale`, and growth and backoff stay as
        configured. Differences are logged. Load the same state on every rank.

        Raises:
            RuntimeError: If the state is empty.
            ConfigError: If it is not the state of a scaler.
            TrainingError: If ranks took the last step with different loss scales.
        """
        if not self._enabled:
            return
        if len(state_dict) == 0:
            super().load_state_dict(state_dict)  # raises torch's error
        missing = [name for name in ("scale", "_growth_tracker") if name not in state_dict]
        problem = f"is not the state of a scaler; {listed(missing)} is missing"
        require(not missing, "state_dict", listed([*map(str, state_dict)]), problem)
        # Of the last iteration, only the skips and the end of its scale belong to the former state.
        unread, self._unread = self._unread, None
        _check_scales(unread is not None and unread.read()[3])
        self._latest_found_inf = None
        self._flags.clear()
        stored = {name: state_dict.get(name, 0) for name in SkipCounts._fields}
        self._init_counts = SkipCounts(**stored)
        self._init_growth_tracker = int(state_dict["_growth_tracker"])
        self._init_scale = self._rules.restored(state_dict["scale"])
        self._report_differences(state_dict)
        if self._scale is not None:
            device = self._scale.device
            self._loss_scale = None
            self._lazy_init_scale_growth_tracker(device)

    def _report_differences(self, state_dict: Mapping[str, Any]) -> None:
        for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
            value = self._init_scale if name == "scale" else getattr(self._rules, name)
            if state_dict.get(name, value) != value:
                logger.warning(
                    "the loaded scaler had %s = %s; this one keeps %s, as configured",
                    name,
                    state_dict[name],
                    value,
                )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._ranks.group is not None:
            logger.warning("a pickled scaler loses its group; the copy will use all ranks")
        if self._registered:
            logger.warning("a copied scaler loses its optimizers; call register(...) on the copy")
        return {
            **state,
            "_init_counts": self._counts(),
            "_loss_scale": None,
            "_skips": None,
            "_latest_found_inf": None,
            "_flags": {},
            "_unread": None,
            "_unchecked": [],
            "_monitor": None,
            "_ranks": RankGroup(None),
            "_registered": [],
        }


class SkipCounts(NamedTuple):
    """Counts besides torch's growth tracker.

    Attributes:
        overflows_in_a_row: Number of consecutive overflows.
        consecutive_skips: Number of consecutive iterations with a skipped step.
        total_skips: Total number of iterations with a skipped step.
    """

    overflows_in_a_row: int
    consecutive_skips: int
    total_skips: int


def refuse_closure(closure: object) -> None:
    """Refuse a closure, whose gradients the optimizer would use while they are scaled.

    Raises:
        ConfigError: If there is one.
    """
    problem = (
        "the optimizer would step with its gradients while they are multiplied by the loss scale; "
        "call closure() yourself, and then step() without it. Optimizers that need it, such as "
        "LBFGS, cannot be used with a loss scale; use a bf16 policy, or a scaler with enabled=False"
    )
    require(closure is None, "closure", brief(closure), problem)


def _check_scales(differ: float) -> None:
    if differ:
        raise TrainingError(
            "the loss scale differs between ranks; use the same arguments, the same state and "
            "the same calls of DistributedGradScaler on every rank"
        )


def _distinct(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _starts_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether fused SGD has no momentum yet; skipping would leave it uninitialized."""
    return (
        isinstance(optimizer, torch.optim.SGD)
        and _skips_on_device(optimizer)
        and any(
            parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None
            for group in optimizer.param_groups
            if group["momentum"]
            for parameter in group["params"]
        )
    )


def _advice(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    names = non_finite_names(optimizers)
    # Under DDP these gradients are sums over ranks, so they do not show which rank is the cause.
    where = (
        f"; not finite on this rank: {listed(names)}. If they are reduced over ranks, as by DDP, "
        "test torch.isfinite(loss) before backward to find the rank"
        if names
        else ""
    )
    return (
        f"{where}. Backing off the scale does not help: look for inf or NaN in the loss and the "
        "input, lower the learning rate, or compute in bfloat16"
    )
