"""Results and side effects of the loss function."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adversary.mistakes import add, mistake
from tests.adversary.script import SHARDED, Script, summed
from tests.adversary.trial import UserError

FP32 = ("fp32",)


def returns(name: str, wrong: Callable[[Tensor, int], Any], ends: Any, **limits: Any) -> None:
    def change(script: Script) -> None:
        script.loss = lambda module, batch: wrong(*summed(module, batch))

    add(f"loss returns {name}", change, "loss", ends, **limits)


@mistake("loss", "warning")
def loss_returns_a_mean(script: Script) -> None:
    script.options.pop("first_step_checks", None)  # which detect it

    def loss(module: nn.Module, batch: Any) -> Any:
        total, weight = summed(module, batch)
        return total / weight, weight

    script.loss = loss


returns("no weight", lambda loss, n: loss, "error")
returns("a number", lambda loss, n: (loss.item(), n), "error")
returns("a detached tensor", lambda loss, n: (loss.detach(), n), "error")
returns("a numpy number", lambda loss, n: (loss.detach().numpy(), n), "error")
returns("nothing", lambda loss, n: None, "error")
returns("nothing as weight", lambda loss, n: (loss, None), "error")
returns("three things", lambda loss, n: (loss, n, loss), "error")
returns("a dict", lambda loss, n: {"loss": loss, "weight": n}, "error")
returns("a list", lambda loss, n: [loss, n], "right")
returns("weight and loss", lambda loss, n: (n, loss), "error")
returns("many losses", lambda loss, n: (loss.expand(n), n), "error")
returns("a loss of shape (1,)", lambda loss, n: (loss.reshape(1), n), "right")
returns("a loss of shape (1, 1)", lambda loss, n: (loss.reshape(1, 1), n), "right")
returns("an empty loss", lambda loss, n: (loss.expand(1)[:0], n), "error")
returns("a loss in float64", lambda loss, n: (loss.double(), n), "right")
returns("a loss in float16", lambda loss, n: (loss.half(), n), "either", policies=("fp16",))
returns("an integer loss", lambda loss, n: (loss.long(), n), "error")
returns("a complex loss", lambda loss, n: (loss * 1j, n), "error")
returns("a negative weight", lambda loss, n: (loss, -n), "error")
returns("an imaginary weight", lambda loss, n: (loss, 1j * n), "error")
returns("text as weight", lambda loss, n: (loss, str(n)), "error")
returns("a fraction as weight", lambda loss, n: (loss, Fraction(n)), "either")
returns("a decimal as weight", lambda loss, n: (loss, Decimal(n)), "either")
returns("a weight of shape (1,)", lambda loss, n: (loss, torch.tensor([n])), "right")
returns("a weight of integers", lambda loss, n: (loss, torch.tensor(n)), "right")
returns("a weight of 8 bits", lambda loss, n: (loss, torch.tensor(n, dtype=torch.uint8)), "right")
returns("a weight of 16 bits", lambda loss, n: (loss, torch.tensor(n).bfloat16()), "right")
returns("a weight of numpy", lambda loss, n: (loss, np.int64(n)), "right")
returns("a weight as array", lambda loss, n: (loss, np.array(n)), "either")
returns("a weight of each sample", lambda loss, n: (loss, torch.ones(n)), "error")
returns(
    "a weight with a graph", lambda loss, n: (loss, torch.ones((), requires_grad=True) * n), "right"
)
returns("a weight from the loss", lambda loss, n: (loss, loss * 0 + n), "right")


@mistake("loss", "error")
def loss_returns_a_negative_tensor_as_weight(script: Script) -> None:
    # Without them every step is skipped, because the host does not wait for weights.
    script.options.pop("first_step_checks", None)
    script.loss = lambda module, batch: (summed(module, batch)[0], torch.tensor(-len(batch[0])))


returns("a truth value as loss", lambda loss, n: (loss > 0, n), "error")


def weighs(name: str, weight: Any, truth: Any, ends: Any = "right", **limits: Any) -> None:
    """Register a mistake that changes the weight of one microbatch (see `marked`)."""

    def change(script: Script) -> None:
        marked(script, lambda loss, n: (loss, weight(n)), lambda loss, n: (loss, truth(n)))

    add(f"a weight is {name}", change, "loss", ends, **limits)


def marked(script: Script, wrong: Any, truth: Any, step: int = 1) -> None:
    """Replace the loss for the last microbatch of one step on the last rank."""
    mark = script.truth.batches[step][-1][-1].inputs[0, 0].item()

    def loss_with(other: Any) -> Any:
        def loss(module: nn.Module, batch: Any) -> Any:
            result = summed(module, batch)
            found = float(batch.inputs[0, 0])
            return other(*result) if found == mark else result

        return loss

    script.loss, script.truth.loss = loss_with(wrong), loss_with(truth)


def skip_step(script: Script) -> None:
    script.options.pop("on_nonfinite", None)


weighs("infinite", lambda n: math.inf, lambda n: math.inf)
weighs("NaN", lambda n: math.nan, lambda n: math.nan)
weighs("0", lambda n: 0, lambda n: 0)
weighs("negative", lambda n: -n, lambda n: -n, "error")
weighs("huge", lambda n: 1e30, lambda n: 1e30, "either")


@mistake("loss", "right")
def every_weight_is_0(script: Script) -> None:
    script.loss = lambda module, batch: (summed(module, batch)[0] * 0, 0)
    script.truth.loss = script.loss


@mistake("loss", "right")
def every_weight_is_infinite(script: Script) -> None:
    script.loss = lambda module, batch: (summed(module, batch)[0], math.inf)
    script.truth.loss = script.loss


@mistake("loss", "right")
def the_first_weight_is_0(script: Script) -> None:
    marked(script, lambda loss, n: (loss * 0, 0), lambda loss, n: (loss * 0, 0), step=0)


@mistake("loss", "right")
def a_loss_is_nan(script: Script) -> None:
    script.options.pop("on_nonfinite", None)
    wrong = lambda loss, n: (loss * math.nan, n)  # noqa: E731
    marked(script, wrong, wrong)


# Side effects


@mistake("loss", "error")
def the_loss_calls_backward(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        total, weight = summed(module, batch)
        total.backward()
        return total, weight

    script.loss = loss


@mistake("loss", "error")
def the_loss_calls_backward_and_keeps_the_graph(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        total, weight = summed(module, batch)
        total.backward(retain_graph=True)
        return total, weight

    script.loss = loss


@mistake("loss", "error")
def the_loss_calls_backward_and_returns_no_graph(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        total, weight = summed(module, batch)
        total.backward()
        return total.detach(), weight

    script.loss = loss


@mistake("loss", "right", strategies=("ddp",), policies=FP32)
def the_loss_has_a_gradient_penalty(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        inputs = batch.inputs.detach().requires_grad_()
        total, weight = summed(module, batch._replace(inputs=inputs))
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
            total = total + 0.1 * slope.square().sum()
        return total, weight

    script.loss = script.truth.loss = loss


@mistake("loss", "either", ranks=(2,), strategies=SHARDED, policies=FP32)
def the_loss_of_a_sharded_model_has_a_gradient_penalty(script: Script) -> None:
    the_loss_has_a_gradient_penalty(script)


@mistake("loss", "error")
def the_loss_returns_that_of_an_earlier_batch(script: Script) -> None:
    kept: list[Any] = []

    def loss(module: nn.Module, batch: Any) -> Any:
        if not kept:
            kept.append(summed(module, batch))
        return kept[0]

    script.loss = loss
    script.options["first_step_checks"] = False


@mistake("loss", "error")
def the_loss_carries_a_state_with_its_graph(script: Script) -> None:
    state: list[Tensor] = [torch.zeros(())]

    def loss(module: nn.Module, batch: Any) -> Any:
        total, weight = summed(module, batch)
        state[0] = total + 0.1 * state[0]
        return state[0], weight

    script.loss = loss
    script.options["first_step_checks"] = False


@mistake("loss", "error")
def the_loss_is_of_another_model(script: Script) -> None:
    other = copy.deepcopy(script.model)
    script.loss = lambda module, batch: summed(other, batch)


@mistake("loss", "error")
def the_loss_is_of_a_parameter_of_its_own(script: Script) -> None:
    factor = nn.Parameter(torch.ones(()))
    script.loss = lambda module, batch: (summed(module, batch)[0].detach() * factor, 4)


@mistake("loss", "right")
def the_loss_uses_the_model_of_the_script(script: Script) -> None:
    script.loss = lambda module, batch: summed(script.model, batch)


@mistake("loss", "warning", strategies=("ddp",))
def the_loss_has_a_criterion_with_parameters(script: Script) -> None:
    scale = nn.Parameter(torch.ones(()))
    script.loss = lambda module, batch: (summed(module, batch)[0] * scale, len(batch.labels))


@mistake("loss", "error")
def the_model_runs_without_gradients(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            total, weight = summed(module, batch)
        return total, weight

    script.loss = loss


@mistake("loss", "error")
def the_model_runs_in_inference_mode(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        with torch.inference_mode():
            return summed(module, batch)

    script.loss = loss


@mistake("loss", "error")
def the_loss_wants_gradients_of_its_own(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            total, weight = summed(module, batch)
        return total.requires_grad_(), weight

    script.loss = loss


def part_of(module: nn.Module, batch: Any) -> Any:
    """Skip the first block."""
    inner = module.module if hasattr(module, "module") else module
    inputs, labels = batch
    hidden = inner.norm(inner.first(inputs))
    return F.cross_entropy(inner.head(hidden), labels, reduction="sum"), len(labels)


@mistake("loss", "right", ranks=(1,), policies=FP32)
def the_loss_uses_parts_of_the_model(script: Script) -> None:
    script.loss = script.truth.loss = part_of


@mistake("loss", "either", ranks=(2,))
def the_loss_goes_around_the_forward_of_the_model(script: Script) -> None:
    script.loss = script.truth.loss = part_of


@mistake("loss", "right", ranks=(2,), strategies=("ddp",))
def one_rank_uses_parts_of_the_model(script: Script) -> None:
    skip_block(script, lambda step, rank: rank == 1)


@mistake("loss", "error", ranks=(2,), strategies=SHARDED)
def one_rank_uses_parts_of_a_sharded_model(script: Script) -> None:
    skip_block(script, lambda step, rank: rank == 1, bypass=True)


@mistake("loss", "right")
def no_rank_uses_a_part_of_the_model(script: Script) -> None:
    skip_block(script, lambda step, rank: True)


def skip_block(script: Script, skips: Any, *, bypass: bool = False) -> None:
    """Skip the last block in forward, on the ranks for which `skips` returns True."""

    def loss_at(rank: int) -> Any:
        def loss(module: nn.Module, batch: Any) -> Any:
            if not skips(0, rank):
                return summed(module, batch)
            inner = module
            while hasattr(inner, "module"):
                inner = inner.module
            blocks = inner.blocks
            inner.blocks = nn.ModuleList(list(blocks)[:-1])
            try:
                return summed(module, batch)
            finally:
                inner.blocks = blocks

        return loss

    script.loss = loss_at(script.rank)
    by_batch = {
        batch.inputs[0, 0].item(): rank
        for ranks in [*script.truth.batches, script.truth.evaluated]
        for rank, batches in enumerate(ranks)
        for batch in batches
    }
    script.truth.loss = lambda module, batch: loss_at(by_batch[batch.inputs[0, 0].item()])(
        module, batch
    )


def fails(script: Script, error: BaseException, *, rank: int | None, place: str) -> None:
    calls = 0
    nth = {"first": 1, "middle": 4, "last": 6}[place]

    def loss(module: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        result = summed(module, batch)
        if calls == nth and rank in (None, script.rank):
            raise error
        return result

    script.options["first_step_checks"] = False
    script.loss = loss


for _place in ("first", "middle", "last"):
    add(
        f"the loss fails in the {_place} microbatch",
        lambda script, place=_place: fails(script, UserError(), rank=None, place=place),
        "loss",
        "error",
    )
    add(
        f"the loss of one rank fails in the {_place} microbatch",
        lambda script, place=_place: fails(script, UserError(), rank=1, place=place),
        "loss",
        "error",
        ranks=(2,),
    )
for _error in (KeyboardInterrupt(), StopIteration(), KeyError("labels"), IndexError(), OSError()):
    add(
        f"the loss of one rank raises {type(_error).__name__}",
        lambda script, error=_error: fails(script, error, rank=1, place="middle"),
        "loss",
        "error",
        ranks=(2,),
    )


@mistake("loss", "right")
def the_loss_recomputes_reentrantly(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        inputs = batch.inputs.detach().requires_grad_()
        outputs = checkpoint(module, inputs, use_reentrant=True)
        return F.cross_entropy(outputs, batch.labels, reduction="sum"), len(batch.labels)

    script.loss = script.truth.loss = loss


@mistake("loss", "either")
def the_loss_runs_the_model_twice(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        first, weight = summed(module, batch)
        second, _ = summed(module, batch)
        return (first + second) / 2, weight

    script.loss = script.truth.loss = loss


@mistake("loss", "error")
def the_loss_steps_the_optimizer(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        result = summed(module, batch)
        script.engine.optimizer.step()
        return result

    script.loss = loss


@mistake("loss", "right", strategies=("ddp",))
def the_loss_zeroes_gradients(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled():
            script.engine.optimizer.zero_grad()
            module.zero_grad()
        return summed(module, batch)

    script.loss = loss


@mistake("loss", "either", ranks=(2,), strategies=SHARDED)
def the_loss_zeroes_gradients_of_shards(script: Script) -> None:
    the_loss_zeroes_gradients(script)


@mistake("loss", "error")
def the_loss_takes_a_step(script: Script) -> None:
    calls = 0

    def loss(module: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            script.engine.step([batch])
        return summed(module, batch)

    script.options["first_step_checks"] = False
    script.loss = loss


@mistake("loss", "right")
def the_loss_evaluates_on_the_way(script: Script) -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            summed(module, batch)
        return summed(module, batch)

    script.loss = loss
    script.truth.loss = loss  # the extra forward updates running statistics, too


@mistake("loss", "right", policies=FP32)
def the_loss_is_divided_by_the_number_of_microbatches(script: Script) -> None:
    # A common pattern for accumulation. The weight is divided too, so it has no effect.
    script.loss = lambda module, batch: tuple(value / 2 for value in summed(module, batch))
    script.truth.loss = script.loss


@mistake("loss", "error")
def the_loss_is_a_criterion(script: Script) -> None:
    script.loss = nn.CrossEntropyLoss(reduction="sum")


@mistake("loss", "error")
def the_loss_is_None(script: Script) -> None:  # noqa: N802
    script.loss = None


@mistake("loss", "error")
def the_loss_is_text(script: Script) -> None:
    script.loss = "cross_entropy"
