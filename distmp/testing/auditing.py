"""`audit`: checks the gradient of a few steps of a running training script.

Around the steps it records what enters `forward`, which collectives run, what gradients are clipped
to, and what `optimizer.step` sees. Afterwards it computes the same gradients from the same weights,
inputs and random numbers, and compares them as `check_gradient` does.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from distmp.distributed.failing_together import Ranks
from distmp.errors import keys_by_value, rank_names, require
from distmp.scaling.grad_scaler import DistributedGradScaler
from distmp.testing import gradients
from distmp.testing.classify import GradientMismatch, diagnose, mismatch, over_ranks
from distmp.testing.recording import Forward, Step, recorded_steps
from distmp.testing.reference import LossSum, Reference, different_weights
from distmp.utils.tensor_trees import checksum, described

# Classes that penalties, other models or clipping can look like.
_VAGUE = ("unexplained", "clipped", "constant", "shard_clipped", "weighted", "miscounted")
# Classes that sums of mean losses can look like.
_MEANS = ("microbatch_means", "microbatches_never", "pass_means", "reduced_again")


@dataclass(frozen=True)
class AuditReport:
    """What an audit has found; the same on every rank, except for collectives.

    Attributes:
        ranks: Number of ranks.
        steps: Number of updates that were compared.
        mismatches: What is wrong, as text by class.
        undecided: What could not be decided, and why.
        collectives: Number of calls by name, dtype and bytes, on this rank.

    Example:
        >>> from distmp.testing import AuditReport
        >>> wrong = ("rank_means", "agrees with the mean of rank means")
        >>> report = AuditReport(2, 1, (wrong,), (), {})
        >>> print(report)
        gradient wrong: 1 steps on 2 ranks
        - rank_means: agrees with the mean of rank means
        >>> report.exit_code
        1
    """

    ranks: int
    steps: int
    mismatches: tuple[tuple[str, str], ...]
    undecided: tuple[str, ...]
    collectives: dict[str, int]

    @property
    def exit_code(self) -> int:
        """0 if the gradient is right, 1 if it is wrong, 2 if this is not decided."""
        return 1 if self.mismatches else 2 * bool(self.undecided)

    def to_json(self) -> str:
        """Return the report as JSON, which `python -m distmp.testing FILE` prints."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        state = ("right", "wrong", "not decided")[self.exit_code]
        lines = [f"gradient {state}: {self.steps} steps on {self.ranks} ranks"]
        lines += [f"- {kind}: {text}" for kind, text in self.mismatches]
        lines += [f"- not decided: {text}" for text in self.undecided]
        lines += [f"  {count} x {name}" for name, count in self.collectives.items()]
        return "\n".join(lines)


class Audit:
    """Records the steps of a training script.

    Attributes:
        report: The result, after the context has ended.
    """

    report: AuditReport

    def __init__(self, model: nn.Module, optimizer: Any, loss_sum: LossSum | None) -> None:
        self._model, self._optimizer, self._loss_sum = model, optimizer, loss_sum
        self._collectives: Counter[str] = Counter()
        self._current = Step(self._collectives)
        self._steps: list[Step] = []
        # Of each update: whether it was skipped, and the learning rates at it.
        self._rates: list[tuple[bool, list[float]]] = []
        self._found: list[GradientMismatch] = []
        self._scales: set[str] = set()  # of losses at updates

    def record(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield what records steps, which the caller enters; nothing without gradients to see."""
        if problem := gradients.unseen(self._model, self._optimizer):
            self._not_decided("model", problem)
            return
        if isinstance(self._optimizer, Optimizer):
            yield self._optimizer.register_step_pre_hook(self._before_step)
        else:
            step = functools.partial(self._zero_step, self._optimizer.step)
            yield patch.object(self._optimizer, "step", step)
        for scaler in (torch.amp.GradScaler, DistributedGradScaler):
            yield patch.object(scaler, "step", self._scaled_step(scaler.step))
        yield from self._watched_clipping()
        yield recorded_steps(self._model, self._recorded_step, self._collectives)

    def _watched_clipping(self) -> Iterator[AbstractContextManager[Any]]:
        # What all names of torch's `clip_grad_norm_` call.
        clip, clip_scaled = clip_grad._clip_grads_with_norm_, DistributedGradScaler.clip_grad_norm_

        def clipped(parameters: Any, max_norm: float, total_norm: Any, foreach: Any = None) -> None:
            with _disable_current_modes():
                norm = clip_grad._get_total_norm([p.grad for p in parameters if p.grad is not None])
                norm, other = (gradients.full(each) for each in (norm, total_norm))
            # Another norm clips as the 2-norm does with another limit. Both norms may be 0.
            self._clip(parameters, max_norm * float((norm / other).nan_to_num(1.0)), norm)
            with torch._C.DisableTorchFunction():  # it writes to gradients one by one
                clip(parameters, max_norm, total_norm, foreach)

        def clipped_by_scaler(scaler: Any, optimizers: Any, max_norm: float) -> Tensor:
            optimizers = [*optimizers] if isinstance(optimizers, Iterable) else [optimizers]
            norm = clip_scaled(scaler, optimizers, max_norm)
            self._clip(gradients.held_parameters(self._model, *optimizers), max_norm, norm)
            return norm

        yield patch.object(clip_grad, "_clip_grads_with_norm_", clipped)
        yield patch.object(DistributedGradScaler, "clip_grad_norm_", clipped_by_scaler)

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        step = self._current
        clipped = {p for p in parameters if p.grad is not None}
        own = {p for p in self._model.parameters() if p.grad is not None}
        if clipped & own:
            step.is_clipped_apart |= clipped != own or step.max_norm is not None
            step.max_norm = float(max_norm)
            step.norm = None if step.is_clipped_apart else float(norm)

    def _scaled_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Watch the step of a scaler, which may skip that of the optimizer."""

        def step_or_skip(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = len(self._rates)
            result = step(scaler, optimizer, *args, **kwargs)
            if optimizer is self._optimizer and len(self._rates) == before:
                self._update({}, skipped=True)
            return result

        return step_or_skip

    def _zero_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Watch the step of a ZeRO optimizer, which calls the one in it once per group."""
        with _disable_current_modes():
            found = gradients.full_gradients(self._model)
        scale = getattr(self._optimizer, "loss_scale", None)
        result = step(*args, **kwargs)
        self._update(found, scale, skipped=self._optimizer.overflow)
        return result

    def _gradients(self) -> gradients.ByName:
        return {name: p.grad for name, p in gradients.named_parameters(self._model).items()}

    def _recorded_step(self) -> Step:
        if not self._current.state:
            with _disable_current_modes():  # its collectives are not the script's
                self._current.state = gradients.full_state(self._model)
            self._current.former = _copied(self._gradients())
            self._versions = {p: p._version for p in self._model.parameters()}
        # Weights change within a step of SAM. FSDP2 may have other tensors in later forwards.
        kept = self._versions.keys() & {*self._model.parameters()}
        self._current.has_other_terms |= any(self._versions[p] != p._version for p in kept)
        return self._current

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_update()
            return None

        def watched() -> Any:  # Lightning runs the last microbatch in it
            result = closure()
            self._before_update()
            return result

        return (optimizer,), {**kwargs, "closure": watched}

    def _before_update(self) -> None:
        engine: Any = self._model
        if hasattr(engine, "clip_fp32_gradients"):  # DeepSpeed's without ZeRO
            self._current.max_norm = engine.gradient_clipping() or None
        # A fused optimizer divides by the scale, or skips the step, itself.
        scale, found_inf = (getattr(self._optimizer, n, None) for n in ("grad_scale", "found_inf"))
        self._update(self._gradients(), scale, skipped=bool(found_inf))

    def _update(self, found: gradients.ByName, scale: Any = None, *, skipped: bool) -> None:
        self._rates.append((skipped, self._learning_rates()))
        step, self._current = self._current, Step(self._collectives)
        scalers = (each for each in _alive(torch.amp.GradScaler) if hasattr(each, "_scale"))
        scales = float(scale or 1.0), *(each.get_scale() for each in scalers)
        self._scales |= {f"2 ** {math.log2(each):g}" for each in scales if each > 0}
        if not skipped:
            step.gradients = _copied(found, scale or 1.0)
            self._steps.append(step)

    def _learning_rates(self) -> list[float]:
        return [float(group.get("lr", 0)) for group in self._optimizer.param_groups]

    def _compare_rates(self) -> None:
        """Report learning rates that a skipped step did not leave as they were."""
        updates = [*self._rates, (False, self._learning_rates())]
        for (skipped, before), (_, now) in itertools.pairwise(updates):
            if skipped and before != now:
                detail = f": {before} at it, then {now}"
                self._found.append(mismatch("scheduler", ["learning rate"], detail))
                break

    def finish(self) -> None:
        """Compare the recorded steps; every rank has to call it."""
        if not self._found:  # the model can be seen
            self._found += _in_no_optimizer(self._model, self._optimizer)
        self._compare_rates()
        if self._steps and any(step.state for step in self._steps):
            idle = [step for step in self._steps if not step.state]
            self._steps = [step for step in self._steps if step.state]
            if idle:
                problem = f"{len(idle)} updates without a forward of the model before them"
                self._not_decided("optimizer", problem)
        unused = sum(step.end(joins=self._loss_sum is None) for step in self._steps)
        counts = Ranks(None).gather((len(self._steps), len(self._rates) - len(self._steps)))
        if len(set(counts)) > 1:
            detail = f": updates and skips by rank are {counts}"
            self._found.append(mismatch("skipped", ["optimizer"], detail))
        elif self._steps:
            try:
                self._compare()
            except Exception as error:  # noqa: BLE001  (training continues after an audit)
                problem = f"could not be computed again: {error}"
                if self._loss_sum is not None and self._steps[0].forwards:
                    batch = described(self._steps[0].forwards[0].batch)
                    problem += "; loss_sum gets the arguments of forward, so pass labels to it; "
                    problem += f"it got {batch}"
                self._not_decided("gradients", problem)
        elif not self._found:
            skipped = f"has skipped all {len(self._rates)} steps: gradients overflow; audit more"
            self._not_decided("optimizer", skipped if self._rates else "has not been called")
        if unused:
            self._not_decided("model", f"{unused} forwards without backward; use torch.no_grad()")
        found = over_ranks(Ranks(None).gather([*map(self._doubted, self._found)]))
        named = tuple((each.kind, str(each)) for each in found if each.kind)
        undecided = tuple(str(each) for each in found if not each.kind)
        steps, _ = min(counts)
        self.report = AuditReport(len(counts), steps, named, undecided, {**self._collectives})

    def _not_decided(self, name: str, text: str) -> None:
        self._found.append(GradientMismatch("", (name,), text))

    def _doubted(self, found: GradientMismatch) -> GradientMismatch:
        """Return a mismatch as one that is not decided, if it may be right."""
        steps, doubts = self._steps, {}
        if not any(step.max_norm for step in steps):
            doubts["clipped"] = "by a function that was not seen"
        if self._loss_sum is None:
            on_purpose = "unless the loss has this weight on purpose: pass loss_sum="
            doubts["constant"] = on_purpose
            number, *_ = found.text.replace("-", "").split(";")
            if not number.endswith(tuple(self._scales)):
                doubts["loss_scale"] = on_purpose
            usual = itertools.chain(*map(_usual_weights, steps))
            if any(found.text.startswith(f"{weight:.3g} times ") for weight in usual):
                doubts[found.kind] = on_purpose
            if _is_weight_of_losses(found.text, steps):
                if found.kind == "accumulated_twice":  # nothing was
                    doubts[found.kind] = on_purpose
                else:
                    found = replace(found, text=f"{found.text}; {on_purpose}")
            if any(len(each.losses) > 1 for step in steps for each in step.forwards):
                doubts["miscounted"] = on_purpose
            # Weights of losses relative to each other vary, see `_compare`.
            if any(each.parameters == ("losses",) for each in self._found):
                doubts["weighted"] = on_purpose
            # Class weights count otherwise than 0 or 1.
            if any(loss.counted.ne(loss.counted.bool()).any() for s in steps for loss in s.losses):
                doubts["miscounted"] = "unless class weights should not count: pass loss_sum="
            pairs = itertools.chain(*(itertools.combinations(s.forwards, 2) for s in steps))
            if any(_may_be_terms(*pair) for pair in pairs):
                terms = "unless these forwards are terms of a loss: pass loss_sum="
                doubts |= dict.fromkeys((*_MEANS, "weighted", "miscounted"), terms)
            if any(step.has_other_terms for step in steps):
                others = "penalties, gradients of inputs or other models may be a part of the step"
                doubts |= dict.fromkeys((*_VAGUE, "last_microbatch"), others)
        if any(p._backward_hooks for p in gradients.trained_parameters(self._model).values()):
            doubts |= dict.fromkeys(_VAGUE, "hooks of parameters may change it")
        if any(step.is_clipped_apart for step in steps):
            doubts |= dict.fromkeys(_VAGUE, "it is clipped in parts, by value or with others")
        if not hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            doubts["scheduler"] = "unless it depends on the number of the iteration on purpose"
        if doubt := doubts.get(found.kind):
            return replace(found, kind="", text=f"{found.text}; {doubt}")
        return found

    def _compare(self) -> None:
        ranks, reference = Ranks(None), Reference(self._model, self._loss_sum)
        compared = functools.partial(reference.compared, extra="accumulated_twice")
        trained = gradients.trained_parameters(self._model)
        held = gradients.held_parameters(self._model, self._optimizer)
        if held.isdisjoint(trained.values()):
            self._not_decided("optimizer", "holds no trained parameter of this model")
            return
        for step in self._steps:
            full = gradients.full_gradients(self._model, step.gradients)
            step.gradients = {name: full[name] for name, p in trained.items() if p in held}
            step.former = gradients.full_gradients(self._model, step.former)
        # Float64 takes long, and only shows which differences are rounding errors.
        for exact in (False, True):
            splits = [compared(f"step {n}", s, exact=exact) for n, s in enumerate(self._steps)]
            found = diagnose(splits, "token_mean")
            if not any(ranks.gather(bool(found))):
                break
        self._found += found
        if any(split.is_unlike for split in splits):
            text = "several, whose weights relative to the first one differ between microbatches"
            self._not_decided("losses", f"{text}; pass loss_sum=")
        unseen = {each for step in self._steps for each in step.unseen}
        for each in sorted(unseen if self._loss_sum is None else ()):
            self._not_decided("loss", f"depends on {each}; pass loss_sum=")
        wrong = {name for each in found for name in each.parameters}
        for name in sorted(step.gradients.keys() - wrong):
            if all(step.gradients[name] is None for step in self._steps):
                self._not_decided(name, "no gradient: unused, or cut off from the loss")
        inputs = [part.batch for s in self._steps for each in s.forwards for part in each.parts]
        checked = functools.partial(checksum, first=None)
        of_ranks = ranks.gather(checked(inputs))
        for same in keys_by_value(dict(enumerate(of_ranks))).values():
            if len(same) > 1:
                text = f"{rank_names(same)} have the same inputs in every step"
                self._found.append(GradientMismatch("same_data", ("inputs",), text))
        sums = {n: checked([step.state[n] for step in self._steps]) for n in trained}
        self._found += different_weights(sums)


def _copied(found: gradients.ByName, scale: Any = 1.0) -> gradients.ByName:
    return {name: None if g is None else g.detach() / scale for name, g in found.items()}


def _may_be_terms(one: Forward, other: Forward) -> bool:
    """Return whether two forwards share a backward, or have different loss functions."""
    functions = {each.losses[0].function for each in (one, other) if each.losses}
    return bool(one.backwards & other.backwards) or len(functions) > 1


def _usual_weights(step: Step) -> Iterator[float]:
    """Yield what people multiply losses by on purpose."""
    for forward in step.forwards:
        terms = sum(bool(each.backwards & forward.backwards) for each in step.forwards) or 1
        yield from (terms, 1 / terms)
        for loss in forward.losses:
            # Half of a square, or of the sum of two.
            if loss.function in ("mse_loss", "mean") or len(forward.losses) > 1:
                yield 0.5
            # Sums over the features of each sample.
            features = loss.counted.shape[1:] if loss.is_sum else ()
            yield from (math.prod(features), *features[-1:])


def _is_weight_of_losses(text: str, steps: list[Step]) -> bool:
    """Return whether gradients have the factor by which one backward has multiplied losses."""
    if " times the" not in text:
        return False
    for step in steps:
        numbers = [(*f.weight_and_scales(), len(f.losses[0].backwards)) for f in step.forwards]
        total = sum(weight * scale / backwards for weight, scale, _, backwards in numbers)
        if not text.startswith(f"{total:.3g} times the"):
            return False
    return True


def _alive(kind: type[Any]) -> list[Any]:
    """Return all objects of a class in this process."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _in_no_optimizer(model: nn.Module, optimizer: Any) -> Iterator[GradientMismatch]:
    """Yield the trained parameters that no optimizer of this process has, if there are any."""
    held, trained = gradients.held_parameters(model, optimizer), gradients.trained_parameters(model)
    if not held.issuperset(trained.values()):
        held |= gradients.held_parameters(model, *_alive(Optimizer))
    if absent := [name for name, p in trained.items() if p not in held]:
        yield mismatch("in_no_optimizer", absent)


@contextmanager
def audit(
    model: nn.Module, optimizer: Optimizer, *, loss_sum: LossSum | None = None
) -> Iterator[Audit]:
    """Check the gradients of a few steps of a running training script.

    Enter it for one to three updates, on every rank. At the end, gradients are computed again from
    the weights, inputs and random numbers of each step, in float64 too if they differ from what the
    optimizer has seen. Nothing stays installed.

    Args:
        model: The model, plain or wrapped.
        optimizer: Its optimizer, or one of several; gradients of its parameters are compared.
        loss_sum: Returns the sum of the losses of a microbatch, and its weight. It is called with a
            plain model, and with what the model was called with: the only positional argument,
            keywords as a dict, or a tuple of positional arguments and that dict. By
            default, the sum of the first loss function of torch that is called.

    Yields:
        An object whose `report` is set when the context ends.

    Raises:
        ConfigError: For something else than an optimizer.

    Example:
        >>> import torch, distmp
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with distmp.audit(model, optimizer) as audit:
        ...     for batch in (torch.ones(3, 4), 2 * torch.ones(5, 4)):
        ...         (model(batch).square().mean() / 2).backward()
        ...     optimizer.step()
        >>> audit.report.mismatches[0][0]
        'microbatch_means'
    """
    problem = "is not a torch.nn.Module; of an engine, pass engine.module and engine.optimizer"
    require(isinstance(model, nn.Module), "model", type(model).__name__, problem)
    problem = "pass one optimizer of torch; audit each of several in a context of its own"
    if optimizer is None:
        problem = "pass one; call trainer.create_optimizer() before, with a Trainer of Transformers"
    require(hasattr(optimizer, "param_groups"), "optimizer", type(optimizer).__name__, problem)
    running = Audit(model, gradients.innermost(model, optimizer), loss_sum)
    with ExitStack() as stack:
        for recorder in running.record():
            stack.enter_context(recorder)
        yield running
    running.finish()
