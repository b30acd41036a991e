"""Wrong optimizers and schedules, and later changes of them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.adversary.mistakes import add, mistake
from tests.adversary.script import WHOLE, Script, sgd
from tests.adversary.trial import UserError

CASTING = ("bf16", "fp16", "fp16-static")


def builds(name: str, factory: Any, ends: Any, **limits: Any) -> None:
    def change(script: Script) -> None:
        script.optimizer = factory

    add(f"the optimizer is {name}", change, "optimizer", ends, **limits)


builds("None", None, "error")
builds("its name", "adamw", "error")
builds("a dict", {"name": "sgd", "lr": 0.1}, "error")
builds("a function of nothing", lambda: sgd([nn.Parameter(torch.ones(1))]), "error")
builds("a function of two", lambda named, rate: sgd(named, lr=rate), "error")
builds("nothing that was returned", lambda named: None, "error")
builds("a list that was returned", lambda named: [sgd(named)], "error")
builds("returned with a schedule", lambda named: (sgd(named), None), "error")
builds("a class", torch.optim.LBFGS, "error")
builds("of a subset", lambda named: sgd(named[1:]), "error")
builds("of the first only", lambda named: sgd(named[:1]), "error")
builds("of nothing", lambda named: sgd([nn.Parameter(torch.ones(1))]), "error")
builds(
    "of clones", lambda named: sgd([nn.Parameter(t.detach().clone()) for _, t in named]), "error"
)
builds("of more", lambda named: sgd([*(t for _, t in named), nn.Parameter(torch.ones(1))]), "error")
builds("of names", lambda named: sgd([name for name, _ in named]), "error")
builds("of a dict", lambda named: sgd(dict(named)), "error")
builds(
    "of groups in the wrong form",
    lambda named: sgd([{"params": named[:2], "lr": 0.1}, *(t for _, t in named[2:])]),
    "error",
)
builds("with a negative rate", lambda named: sgd(named, lr=-1.0), "error")
builds("with text for a rate", lambda named: sgd(named, lr="0.1"), "error")
builds("with an unknown argument", lambda named: sgd(named, beta=1), "error")
builds("SparseAdam", lambda named: torch.optim.SparseAdam([t for _, t in named]), "error")
builds("LBFGS", lambda named: torch.optim.LBFGS([t for _, t in named]), "error")
builds("fused and foreach", lambda named: sgd(named, fused=True, foreach=True), "error")
builds("differentiable", lambda named: sgd(named, differentiable=True), "either")
builds(
    "fused with dampening", lambda named: sgd(named, fused=True, dampening=0.5), "error", ranks=(1,)
)


def taken_as(name: str, factory: Any, truth: Any = sgd, ends: Any = "right", **limits: Any) -> None:
    def change(script: Script) -> None:
        script.optimizer, script.truth.build = factory, truth

    add(f"the optimizer is {name}", change, "optimizer", ends, **limits)


taken_as("a partial", functools.partial(torch.optim.SGD, lr=0.1), lambda n: sgd(n, momentum=0))
taken_as("of tensors", lambda named: sgd([tensor for _, tensor in named]))
taken_as("of a generator", lambda named: sgd(entry for entry in named))
taken_as("of reversed tensors", lambda named: sgd(named[::-1]))
taken_as("with rate 0", lambda named: sgd(named, lr=0.0), lambda named: sgd(named, lr=0.0))
taken_as("with a tensor for a rate", lambda named: sgd(named, lr=torch.tensor(0.1)))
taken_as("maximizing", lambda n: sgd(n, maximize=True), lambda n: sgd(n, maximize=True))
taken_as(
    "of two groups",
    lambda named: sgd([{"params": named[:2], "lr": 0.02}, {"params": named[2:]}]),
    lambda named: sgd(
        [
            {"params": [p for n, p in named if n in ("first.weight", "first.bias")], "lr": 0.02},
            {"params": [p for n, p in named if n not in ("first.weight", "first.bias")]},
        ]
    ),
    "either",  # the order of the parameters differs
)


@mistake("optimizer", "error")
def the_optimizer_is_built_already(script: Script) -> None:
    script.optimizer = sgd(script.model.parameters())


@mistake("optimizer", "right", policies=("fp32", "bf16-autocast", "fp16-autocast"), ranks=(1,))
def the_optimizer_is_of_the_model_in_FP32(script: Script) -> None:  # noqa: N802
    model = script.model
    script.options.pop("shard_optimizer", None)
    script.optimizer, script.truth.build = lambda named: sgd(model.parameters()), sgd


@mistake("optimizer", "error", policies=CASTING, strategies=WHOLE)
def the_optimizer_is_of_the_model(script: Script) -> None:
    model = script.model
    script.optimizer = lambda named: sgd(model.parameters())


@mistake("optimizer", "error")
def the_optimizer_is_of_a_copy_of_the_model(script: Script) -> None:
    other = copy.deepcopy(script.model)
    script.optimizer = lambda named: sgd(other.parameters())


@mistake("optimizer", "error")
def the_optimizer_is_always_the_same(script: Script) -> None:
    built = sgd(copy.deepcopy(script.model).parameters())
    script.optimizer = lambda named: built


@mistake("optimizer", "error")
def building_the_optimizer_fails(script: Script) -> None:
    def fail(named: Any) -> Any:
        raise UserError

    script.optimizer = fail


@mistake("optimizer", "error", ranks=(2,))
def building_the_optimizer_fails_on_one_rank(script: Script) -> None:
    if script.rank == 1:
        building_the_optimizer_fails(script)


# Later changes


def later(
    name: str, act: Any, ends: Any, truth: Any = None, part: str = "later", **limits: Any
) -> None:
    """A change of a built engine between two steps."""

    def change(script: Script) -> None:
        place = script.random.choice(["built", "before 1", "after 1", "before 2"])
        script.on(place, lambda: act(script))
        if truth is not None:
            script.truth.on(place, lambda: truth(script))

    add(name, change, part, ends, **limits)


def has_stepped(script: Script) -> bool:
    return bool(script.outcomes)


@mistake("later", "error")
def the_user_steps_the_optimizer_too(script: Script) -> None:
    script.on("after 0", lambda: script.engine.optimizer.step())


@mistake("later", "either")
def the_user_steps_the_optimizer_first(script: Script) -> None:
    script.on("built", lambda: script.engine.optimizer.step())


@mistake("later", "error", ranks=(2,))
def one_rank_steps_the_optimizer_too(script: Script) -> None:
    if script.rank == 1:
        script.on("after 0", lambda: script.engine.optimizer.step())


@mistake("later", "error")
def the_user_trains_by_hand_with_the_optimizer(script: Script) -> None:
    def train() -> None:
        engine = script.engine
        loss, weight = script.loss(engine.module, script.batches[0][0])
        (loss / weight).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    script.on("after 0", train)


later("gradients are zeroed", lambda script: script.engine.optimizer.zero_grad(), "right")
later("gradients of the model are zeroed", lambda s: s.engine.module.zero_grad(), "right")
later(
    "gradients are zeroed in place",
    lambda s: s.engine.optimizer.zero_grad(set_to_none=False),
    "right",
)


def set_rate(script: Script, value: Any, group: int = 0) -> None:
    script.engine.optimizer.param_groups[group]["lr"] = value


def set_true_rate(script: Script, value: float) -> None:
    script.truth.optimizer.param_groups[0]["lr"] = value


def no_schedule(script: Script) -> None:
    script.options.pop("schedule", None)
    script.truth.schedule = None


def rates(name: str, value: Any, ends: Any = "right") -> None:
    def change(script: Script) -> None:
        no_schedule(script)
        for step in (1, 2):
            script.on(f"before {step}", lambda: set_rate(script, value))
            script.truth.on(f"before {step}", lambda: set_true_rate(script, float(value)))

    add(f"the rate is set to {name}", change, "rate", ends)


rates("a number", 0.03)
rates("0", 0.0)
rates("an integer", 1)
rates("a tensor", torch.tensor(0.03))


def bad_rate(name: str, value: Any) -> None:
    def change(script: Script) -> None:
        no_schedule(script)
        script.on("before 1", lambda: set_rate(script, value))

    add(f"the rate is set to {name}", change, "rate", "error")


bad_rate("text", "0.03")
bad_rate("None", None)
bad_rate("a negative number", -0.1)
bad_rate("NaN", float("nan"))
bad_rate("infinity", float("inf"))
bad_rate("a function", lambda step: 0.1)
bad_rate("a list", [0.1])


@mistake("rate", "error")
def the_rate_is_set_besides_a_schedule(script: Script) -> None:
    script.options["schedule"] = lambda opt: lr_scheduler.StepLR(opt, 1)
    script.on("before 1", lambda: set_rate(script, 0.02))


@mistake("rate", "error", ranks=(2,))
def the_rate_is_set_on_one_rank(script: Script) -> None:
    no_schedule(script)
    if script.rank == 1:
        script.on("before 1", lambda: set_rate(script, 0.02))


@mistake("rate", "error", ranks=(2,))
def the_decay_is_set_on_one_rank(script: Script) -> None:
    if script.rank == 0:
        script.on(
            "before 1", lambda: script.engine.optimizer.param_groups[0].update(weight_decay=0.5)
        )


def torch_schedule(name: str, build: Any, ends: Any = "right", *, own: bool = False) -> None:
    """A torch scheduler that the user steps after each step."""

    def change(script: Script) -> None:
        script.options.pop("schedule", None)
        script.truth.schedule = None
        if own:
            script.options["schedule"] = build
        schedulers: dict[str, Any] = {}
        for key, of in (("script", script), ("truth", script.truth)):
            holder: Any = script if key == "script" else script.truth
            of.on(
                "built",
                lambda key=key, holder=holder: schedulers.update(
                    {key: build(holder.engine.optimizer if key == "script" else holder.optimizer)}
                ),
            )
            for step in range(3):
                of.on(f"after {step}", lambda key=key: schedulers[key].step())

    add(f"the user steps {name}", change, "rate", ends)


torch_schedule("StepLR", lambda opt: lr_scheduler.StepLR(opt, 1, 0.5))
torch_schedule("LambdaLR", lambda opt: lr_scheduler.LambdaLR(opt, lambda n: 1 / (1 + n)))
torch_schedule(
    "OneCycleLR", lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10), "either"
)
torch_schedule("CosineAnnealingLR", lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10))
torch_schedule(
    "StepLR besides its schedule", lambda opt: lr_scheduler.StepLR(opt, 1, 0.5), "error", own=True
)


def schedule(name: str, build: Any, ends: Any = "error") -> None:
    def change(script: Script) -> None:
        script.options["schedule"] = build
        script.truth.schedule = None

    add(f"the schedule is {name}", change, "rate", ends)


schedule("text", "cosine")
schedule("a number", 0.1)
schedule("a class", lr_scheduler.StepLR)
schedule("nothing that was returned", lambda opt: None)
schedule("a rate that was returned", lambda opt: 0.1)
schedule("a function of the step", lambda step: 0.1 * step)
schedule("a function of nothing", lambda: None)
schedule("ReduceLROnPlateau", lambda opt: lr_scheduler.ReduceLROnPlateau(opt))
schedule("OneCycleLR", lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10))
schedule(
    "of another optimizer", lambda opt: lr_scheduler.StepLR(sgd([nn.Parameter(torch.ones(1))]), 1)
)
schedule(
    "too short", lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=1, cycle_momentum=False)
)


@mistake("rate", "error")
def the_schedule_is_an_instance(script: Script) -> None:
    script.options["schedule"] = lr_scheduler.StepLR(sgd(script.model.parameters()), 1)


@mistake("rate", "error")
def building_the_schedule_fails(script: Script) -> None:
    def fail(optimizer: Any) -> Any:
        raise UserError

    script.options["schedule"] = fail


later(
    "a group is added",
    lambda s: s.engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "error",
)
later(
    "a group is removed",
    lambda script: script.engine.optimizer.param_groups.clear(),
    "error",
)
later(
    "a parameter is removed from the optimizer",
    lambda script: script.engine.optimizer.param_groups[0]["params"].pop(),
    "error",
)


def replace_optimizer(script: Script) -> None:
    script.engine.optimizer = sgd(script.engine.module.parameters())


later("the optimizer is replaced", replace_optimizer, "error")


def hyper(script: Script, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.3


later(
    "weight decay is set",
    lambda script: hyper(script, script.engine.optimizer),
    "right",
    lambda script: hyper(script, script.truth.optimizer),
)


def reload_optimizer(script: Script) -> None:
    optimizer = script.engine.optimizer
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


later("the optimizer loads its own state", reload_optimizer, "right")


@mistake("rate", "right")
def the_optimizer_loads_a_state_with_a_rate(script: Script) -> None:
    no_schedule(script)

    def load(optimizer: torch.optim.Optimizer) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["lr"] = 0.02
        optimizer.load_state_dict(state)

    script.on("before 1", lambda: load(script.engine.optimizer))
    script.truth.on("before 1", lambda: load(script.truth.optimizer))


@mistake("rate", "either")
def the_optimizer_loads_a_state_with_a_rate_besides_a_schedule(script: Script) -> None:
    build = lambda opt: lr_scheduler.LambdaLR(opt, lambda n: 0.5**n)  # noqa: E731
    script.options["schedule"] = script.truth.schedule = build
    script.on("before 1", lambda: reload_optimizer(script))


later(
    "the optimizer loads nothing",
    lambda script: script.engine.optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "error",
)
later(
    "optimizer state is cleared",
    lambda script: script.engine.optimizer.state.clear(),
    "either",
    lambda script: script.truth.optimizer.state.clear(),
)
