"""`audit`: checks the gradient of a few steps of a running training script.

Around the steps it records what enters `forward`, which collectives run, what gradients are clipped
to, and what `optimizer.step` sees. Afterwards it computes the same gradients from the same weights,
inputs and random numbers in float64, and compares them as `check_gradient` does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from distmp.distributed.ranks import Ranks
from distmp.errors import ConfigError, listed, rank_names, ranks_by_value
from distmp.testing import classify
from distmp.testing.check import WANTED, in_no_optimizer
from distmp.testing.gradients import full_gradients, full_state, innermost, named_parameters, unseen
from distmp.testing.reference import Reference, measured, recorded_forwards
from distmp.testing.samples import DefaultLoss, LossSum
from distmp.utils.dtypes import dtype_name
from distmp.utils.tensor_trees import checksum, map_tensors

# Reductions of more than 16 elements.
_IN_16_BITS = re.compile(r".*reduce.*float16, (?!\d bytes|[12]\d bytes|3[0-2] bytes)")


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
    collectives: Mapping[str, int]

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


@dataclass
class _Step:
    """What was seen of one step on this rank, up to the optimizer's."""

    state: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    max_norm: float | None = None
    is_clipped_apart: bool = False


class Audit:
    """Records the steps of a training script.

    Attributes:
        report: The result, after the context has ended.
    """

    report: AuditReport

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._steps: list[_Step] = []
        self._current = _Step()
        self._skips = 0
        self._rates_of_skip: list[float] | None = None
        self._scheduled: list[classify.GradientMismatch] = []
        self._unseen = unseen(model, optimizer)
        self._collectives: Counter[str] = Counter()
        # Parameters without a gradient in any step, neither here nor when computed again.
        self._without_gradient: set[str] = set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Install what records steps, and remove it at the end."""
        if self._unseen is not None:
            yield
            return
        # What all names of `clip_grad_norm_` call.
        clip, scaled_step = clip_grad._clip_grads_with_norm_, torch.amp.GradScaler.step

        def clipped(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
            step, model = self._current, named_parameters(self._model).values()
            part = sum(p.grad is not None for p in parameters)
            apart = part < sum(p.grad is not None for p in model)
            step.is_clipped_apart |= apart or step.max_norm is not None
            step.max_norm = float(max_norm)
            clip(parameters, max_norm, *args, **kwargs)

        def step_or_skip(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = len(self._steps), self._skips
            result = scaled_step(scaler, optimizer, *args, **kwargs)
            if optimizer is self._optimizer and (len(self._steps), self._skips) == before:
                self._skip()
            return result

        with ExitStack() as stack:
            if isinstance(self._optimizer, torch.optim.Optimizer):
                stack.callback(self._optimizer.register_step_pre_hook(self._before_step).remove)
            else:
                watched = self._zero_step(self._optimizer.step)
                stack.enter_context(patch.object(self._optimizer, "step", watched))
            stack.enter_context(patch.object(clip_grad, "_clip_grads_with_norm_", clipped))
            stack.enter_context(patch.object(torch.amp.GradScaler, "step", step_or_skip))
            self._record = stack.enter_context(recorded_forwards(self._model, self._forward))
            stack.enter_context(_Collectives(self._collectives))
            yield

    def _zero_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Watch the step of a ZeRO optimizer, which calls the one in it once per group."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                gradients = full_gradients(self._model)
            scale = getattr(self._optimizer, "loss_scale", None)
            result = step(*args, **kwargs)
            if self._optimizer.overflow:
                self._skip()
            else:
                self._update(gradients, scale)
            return result

        return watched

    def _forward(self, args: Any, kwargs: Any) -> None:
        step = self._current
        if not step.inputs:
            with _disable_current_modes():  # its collectives are not the script's
                step.state = full_state(self._model)
            step.generators = self._record.generators = []
        batch = kwargs if not args else args if len(args) > 1 or kwargs else args[0]
        step.inputs.append(map_tensors(lambda t: t.detach().to("cpu", copy=True), batch))

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

    def _skip(self) -> None:
        self._skips += 1
        self._rates_of_skip = self._compare_rates()
        self._current = _Step()

    def _compare_rates(self) -> list[float]:
        """Return learning rates; report those that a skipped step did not leave as they were."""
        now = [float(group.get("lr", 0)) for group in self._optimizer.param_groups]
        before, self._rates_of_skip = self._rates_of_skip, None
        if before not in (None, now) and not self._scheduled:
            text = f"{classify.CLASSES['scheduler']}: {before} at it, then {now}"
            mismatch = classify.GradientMismatch("scheduler", ("learning rate",), text)
            self._scheduled.append(mismatch)
        return now

    def _before_update(self) -> None:
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and found_inf:  # a fused optimizer skips the step itself
            self._skip()
            return
        engine: Any = self._model
        if hasattr(engine, "clip_fp32_gradients"):  # DeepSpeed's without ZeRO
            self._current.max_norm = engine.gradient_clipping() or None
        gradients = {name: p.grad for name, p in named_parameters(self._model).items()}
        self._update(gradients, getattr(self._optimizer, "grad_scale", None))

    def _update(self, gradients: Mapping[str, Tensor | None], scale: Any) -> None:
        self._compare_rates()
        self._current.gradients = {
            name: None if each is None else each.detach() / (1.0 if scale is None else scale)
            for name, each in gradients.items()
        }
        self._steps.append(self._current)
        self._current = _Step()

    def finish(self, loss_sum: LossSum, wanted: str) -> None:
        """Compare the recorded steps; every rank has to call it."""
        counts = Ranks(None).gather((len(self._steps), self._skips))
        found, undecided = [], []
        if self._unseen is None:
            self._compare_rates()
            found = [*self._scheduled, *in_no_optimizer(self._model, self._optimizer)]
        if len(set(counts)) > 1:
            text = f"{classify.CLASSES['skipped']}: updates and skips by rank are {counts}"
            found.append(classify.GradientMismatch("skipped", ("optimizer",), text))
        elif self._unseen is not None or not self._steps:
            undecided.append(self._unseen or "the optimizer has not been called")
        else:
            try:
                found += self._compared(loss_sum, wanted)
                found += self._same_inputs()
                found += self._different_weights()
                found += self._reduced_in_16_bits(found)
                if self._without_gradient:
                    names = listed(sorted(self._without_gradient))
                    undecided.append(f"{names}: no gradient: unused, or cut off from the loss")
            except Exception as error:  # noqa: BLE001  (training continues after an audit)
                undecided.append(f"gradients could not be computed again: {error}")
        # Why mismatches of a kind may be right.
        doubts = {"clipped": "by a function that was not seen"}
        if getattr(loss_sum, "is_guess", False):
            doubt = "unless the loss is another than the cross entropy over labels: pass loss_sum="
            doubts |= {"unexplained": doubt, "miscounted": doubt}
        if any(step.is_clipped_apart for step in self._steps):
            doubts["unexplained"] = "parts of the gradient are clipped separately"
        of_ranks = Ranks(None).gather((found, undecided, doubts))
        combined = classify.over_ranks([each for each, *_ in of_ranks])
        undecided = [*dict.fromkeys(text for _, texts, _ in of_ranks for text in texts)]
        doubts = {kind: text for *_, each in of_ranks for kind, text in each.items()}
        undecided += [f"{each}; {doubts[each.kind]}" for each in combined if each.kind in doubts]
        named = tuple((each.kind, str(each)) for each in combined if each.kind not in doubts)
        steps, collectives = min(updates for updates, _ in counts), dict(self._collectives)
        self.report = AuditReport(len(counts), steps, named, tuple(undecided), collectives)

    def _same_inputs(self) -> Iterator[classify.GradientMismatch]:
        """Report ranks with the same inputs in every step, as without a distributed sampler."""
        every = Ranks(None).gather(checksum([step.inputs for step in self._steps]))
        by_inputs = ranks_by_value(dict(enumerate(every)))
        for ranks in by_inputs.values():
            if len(ranks) > 1:
                text = f"{rank_names(ranks)} have the same inputs in every step"
                yield classify.GradientMismatch("same_data", ("inputs",), text)

    def _different_weights(self) -> Iterator[classify.GradientMismatch]:
        """Report parameters that were not those of rank 0 before a step."""
        trained = {n for n, p in named_parameters(self._model).items() if p.requires_grad}
        sums = [{n: checksum(t) for n, t in s.state.items() if n in trained} for s in self._steps]
        pairs = zip(Ranks(None).gather(sums)[0], sums, strict=True)
        differ = {name: None for one, other in pairs for name in one if one[name] != other[name]}
        if differ:
            kind = "different_weights"
            yield classify.GradientMismatch(kind, tuple(differ), classify.CLASSES[kind])

    def _reduced_in_16_bits(self, found: Any) -> Iterator[classify.GradientMismatch]:
        """Report reductions in 16 bits whose results were summed in FP32, which hides them."""
        calls = [*filter(_IN_16_BITS.match, self._collectives)]
        if calls and not any("in_16_bits" in each.kind for each in found):
            kind = "reduced_in_16_bits"
            text = f"{classify.CLASSES[kind]}: {calls[0]}"
            yield classify.GradientMismatch(kind, ("gradients",), text)

    def _compared(self, loss_sum: LossSum, wanted: str) -> list[classify.GradientMismatch]:
        found = [*self._replayed(loss_sum, wanted)]
        mismatches = classify.diagnose([split for split, _ in found], wanted)
        without_former = [split for _, split in found if split is not None]
        unclipped = sum(step.max_norm is None for step in self._steps[1:])
        unclear = {"weighted", "unexplained", "miscounted"}
        if (
            len(without_former) == unclipped > 0
            and mismatches
            and unclear.issuperset(each.kind for each in mismatches)
            and not classify.diagnose(without_former, wanted)
        ):
            names = tuple(without_former[0].parameters)
            text = "the gradient of the step before was not removed"
            return [classify.GradientMismatch("accumulated_twice", names, text)]
        return mismatches

    def _replayed(
        self, loss_sum: LossSum, wanted: str
    ) -> Iterator[tuple[classify.SplitResult, classify.SplitResult | None]]:
        """Yield what was measured of each step.

        If it is wrong and was not clipped, what is left of it without the gradient of the step
        before follows.
        """
        reference, ranks = Reference(self._model, loss_sum), Ranks(None)
        former: Mapping[str, Tensor | None] = {}
        reference.set_modes(self._model)
        for number, step in enumerate(self._steps):
            reference.state = step.state
            # In FP32, errors hardly differ from step to step.
            exact = None if self._record.in_16_bits else int(not number)
            record = replace(self._record, generators=step.generators)
            own = reference.replay(step.inputs, record, exact=exact)
            weights = np.array(own.weights).reshape(ranks.world_size, -1)
            empty = partial(
                classify.SplitResult, f"step {number}", ranks.rank, weights, step.max_norm
            )
            gradients = full_gradients(self._model, step.gradients)
            nowhere = {n for n, g in gradients.items() if g is None and not own.ideal[n].any()}
            self._without_gradient = nowhere & (self._without_gradient if number else nowhere)
            split, rest = measured(empty(), gradients, own, {}), None
            if former and step.max_norm is None and classify.diagnose([split], wanted):
                differences = {n: _difference(g, former.get(n)) for n, g in gradients.items()}
                rest = measured(empty(), differences, own, {})
            former = gradients
            yield split, rest


def _difference(gradient: Tensor | None, former: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or former is None else gradient - former


class _Collectives(TorchDispatchMode):
    """Counts collectives, those of DDP and FSDP included."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            found: list[Tensor] = []
            map_tensors(found.append, args[:2])
            dtypes = ", ".join(sorted({dtype_name(tensor.dtype) for tensor in found}))
            name = func._schema.name.rpartition("::")[2].strip("_")
            self._counts[f"{name}, {dtypes}, {sum(each.nbytes for each in found)} bytes"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: str = "tokens",
    *,
    loss_sum: LossSum | None = None,
) -> Iterator[Audit]:
    """Check the gradients of a few steps of a running training script.

    Enter it for one to three updates, on every rank. At the end, gradients are computed again in
    float64 from the weights, inputs and random numbers of each step, and compared with what the
    optimizer has seen. Nothing stays installed.

    Args:
        model: The model, plain or wrapped.
        optimizer: Its optimizer.
        weights: As in `distmp.testing.check_gradient`: `tokens` or `sum`.
        loss_sum: Returns the sum of the losses of a microbatch, and its weight. It is called with a
            plain model, and with what the model was called with: keywords as a dict, or positional
            arguments. By default, the cross entropy over `labels` among the keywords.

    Yields:
        An object whose `report` is set when the context ends.

    Raises:
        ConfigError: For weights of another kind, or something else than an optimizer.

    Example:
        >>> import torch, distmp
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> squares = lambda model, batch: (model(batch).square().sum(), len(batch))
        >>> with distmp.audit(model, optimizer, loss_sum=squares) as audit:
        ...     for batch in (torch.ones(3, 4), 2 * torch.ones(5, 4)):
        ...         (model(batch).square().mean() / 2).backward()
        ...     optimizer.step()
        >>> audit.report.mismatches[0][0]
        'microbatch_means'
    """
    if weights not in ("tokens", "sum"):
        raise ConfigError("weights", weights, "use 'tokens' or 'sum'")
    if not hasattr(optimizer, "param_groups"):
        problem = "pass one optimizer of torch; audit each of several in a context of its own"
        raise ConfigError("optimizer", type(optimizer).__name__, problem)
    running = Audit(model, innermost(model, optimizer))
    with running.recorded():
        yield running
    running.finish(loss_sum or DefaultLoss(), WANTED[weights])
