"""Calls at the wrong time, and changes of the model without the engine's knowledge."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distmp.engine.engine import Engine
from tests.adversary.mistakes import mistake
from tests.adversary.mistakes.optimizers import CASTING, later
from tests.adversary.script import SHARDED, WHOLE, Script, samples, sgd, summed
from tests.adversary.trial import UserError


def inner(script: Script) -> Any:
    """Return the model as the user has it."""
    module = script.engine.module
    return module.module if hasattr(module, "module") else module


# Explain and check


@mistake("explain", "right")
def explains_a_good_step(script: Script) -> None:
    for step in range(3):
        script.on(f"after {step}", lambda: script.engine.explain(script.outcomes[-1]))


@mistake("explain", "right")
def explains_an_old_step(script: Script) -> None:
    script.on("end", lambda: script.engine.explain(script.outcomes[0]))


@mistake("explain", "right", ranks=(2,))
def one_rank_explains_a_good_step(script: Script) -> None:
    if script.rank == 0:
        explains_a_good_step(script)


@mistake("explain", "right", ranks=(2,))
def one_rank_checks_a_good_step(script: Script) -> None:
    if script.rank == 0:
        script.on("after 1", lambda: script.engine.check(script.outcomes[-1]))


@mistake("explain", "error", ranks=(2,))
def one_rank_explains_an_overflow(script: Script) -> None:
    script.options |= {"on_nonfinite": "skip_step", "attribution": True}
    script.batches[1][0].inputs[0, 0] = float("inf")
    if script.rank == 0:
        script.on("after 1", lambda: script.engine.explain(script.outcomes[-1]))


# Steps at the wrong time


@mistake("mode", "error")
def steps_without_gradients(script: Script) -> None:
    inside(script, torch.no_grad)


@mistake("mode", "error")
def steps_in_inference_mode(script: Script) -> None:
    inside(script, torch.inference_mode)


@mistake("mode", "either", policies=("fp32",))
def steps_inside_autocast(script: Script) -> None:
    inside(script, lambda: torch.autocast("cpu", torch.bfloat16))


@mistake("mode", "either", policies=("fp32",))
def builds_inside_autocast(script: Script) -> None:
    context = torch.autocast("cpu", torch.bfloat16)
    context.__enter__()
    script.on("built", lambda: context.__exit__(None, None, None))


@mistake("mode", "right")
def steps_with_a_default_dtype(script: Script) -> None:
    script.on("before 1", lambda: torch.set_default_dtype(torch.float64))
    script.truth.on("before 1", lambda: torch.set_default_dtype(torch.float32))


@mistake("evaluated", "right")
def evaluates_without_gradients(script: Script) -> None:
    evaluate = lambda: script.engine.evaluate(script.evaluated)  # noqa: E731

    def act() -> None:
        with torch.inference_mode():
            evaluate()

    script.on("after 0", act)


def inside(script: Script, context: Any) -> None:
    take = script.take_step

    def take_step(batches: Any) -> None:
        with context():
            take(batches)

    script.take_step = take_step  # type: ignore[method-assign]


@mistake("mode", "error")
def passes_stop_by_place(script: Script) -> None:
    script.on("after 0", lambda: script.engine.step(script.batches[0], True))


# Steps that fail


def failing_step(script: Script, *, rank: int | None, place: int) -> None:
    """Run a step whose loss fails, and continue."""
    armed = {"left": -1}
    correct = script.loss

    def loss(module: nn.Module, batch: Any) -> Any:
        result = correct(module, batch)
        if armed["left"] == 0 and rank in (None, script.rank):
            armed["left"] = -1
            raise UserError
        armed["left"] -= armed["left"] > 0
        return result

    def act() -> None:
        armed["left"] = place
        try:
            script.engine.step([b._replace(inputs=b.inputs * 100) for b in script.batches[0]])
        except UserError:
            armed["left"] = -1

    script.loss = loss
    script.on("after 0", act)


@mistake("loss", "either")
def goes_on_after_a_step_that_failed(script: Script) -> None:
    failing_step(script, rank=None, place=1)


@mistake("loss", "either")
def goes_on_after_a_step_that_failed_at_once(script: Script) -> None:
    failing_step(script, rank=None, place=0)


@mistake("loss", "error", ranks=(2,))
def one_rank_goes_on_after_a_step_that_failed(script: Script) -> None:
    failing_step(script, rank=1, place=1)


@mistake("loss", "error", ranks=(2,))
def one_rank_goes_on_after_a_step_that_failed_at_once(script: Script) -> None:
    failing_step(script, rank=0, place=0)


@mistake("later", "either")
def backward_outside_of_the_engine(script: Script) -> None:
    def act() -> None:
        summed(script.engine.module, script.batches[0][0])[0].backward()

    script.on("after 0", act)


@mistake("later", "error", ranks=(2,), strategies=SHARDED)
def one_rank_runs_backward_outside_of_the_engine(script: Script) -> None:
    if script.rank == 1:
        backward_outside_of_the_engine(script)


@mistake("later", "right", ranks=(2,), strategies=("ddp",))
def one_rank_runs_a_whole_model_outside_of_the_engine(script: Script) -> None:
    if script.rank == 1:
        backward_outside_of_the_engine(script)


@mistake("later", "error", ranks=(2,), strategies=SHARDED)
def one_rank_runs_the_model(script: Script) -> None:
    def act() -> None:
        with torch.no_grad():
            script.engine.module(samples(1, count=3).inputs)

    if script.rank == 0:
        script.on("after 0", act)


# More engines


@mistake("later", "right", strategies=WHOLE)
def a_second_engine_takes_over(script: Script) -> None:
    def act() -> None:
        script.engine = Engine(script.model, script.loss, script.optimizer, **script.options)

    script.on("built", act)


@mistake("later", "error", ranks=(2,), strategies=SHARDED)
def a_second_engine_takes_over_shards(script: Script) -> None:
    a_second_engine_takes_over(script)


@mistake("later", "error", policies=(*CASTING, "bf16-pure"))
def a_second_engine_is_not_used(script: Script) -> None:
    kept: list[Engine] = []
    script.on(
        "built",
        lambda: kept.append(Engine(script.model, script.loss, script.optimizer, **script.options)),
    )


@mistake("later", "either", policies=("fp32",), strategies=WHOLE)
def a_second_engine_in_FP32_is_not_used(script: Script) -> None:  # noqa: N802
    a_second_engine_is_not_used(script)


@mistake("later", "either")
def two_engines_of_two_models(script: Script) -> None:
    kept: list[Engine] = []

    def act() -> None:
        model = copy.deepcopy(script.truth.model).float()
        kept.append(Engine(model, summed, sgd, **script.options))
        kept[0].step(script.batches[0])

    script.on("before 1", act)


@mistake("later", "either", ranks=(1,))
def the_engine_is_copied(script: Script) -> None:
    def act() -> None:
        script.engine = copy.deepcopy(script.engine)

    script.options.pop("reproducible", None)
    script.on("after 0", act)


@mistake("later", "error")
def the_engine_is_pickled(script: Script) -> None:
    def act() -> None:
        script.engine = pickle.loads(pickle.dumps(script.engine))

    script.optimizer = sgd
    script.on("after 0", act)


# The model


@mistake("model", "right")
def the_model_is_moved_to_where_it_is(script: Script) -> None:
    script.on("built", lambda: script.model.to("cpu"))


for _dtype in (torch.float64, torch.float16, torch.bfloat16):
    later(
        f"the model is cast to {_dtype}",
        lambda script, dtype=_dtype: script.model.to(dtype),
        "either",
        part="model",
    )
later("the model is moved to meta", lambda s: s.model.to("meta"), "error", part="model")


@mistake("model", "right")
def the_model_is_copied_aside(script: Script) -> None:
    kept: list[Any] = []
    if script.case.strategy in SHARDED:  # torch refuses it
        return
    script.on("before 1", lambda: kept.append(copy.deepcopy(script.model)))


@mistake("model", "error")
def a_copy_of_the_model_is_trained(script: Script) -> None:
    copies: list[Any] = []

    def loss(module: nn.Module, batch: Any) -> Any:
        return summed(copies[0] if copies else module, batch)

    script.loss = loss
    script.on("before 0", lambda: copies.append(copy.deepcopy(inner(script))))


@mistake("model", "right", strategies=WHOLE)
def the_model_is_compiled_later(script: Script) -> None:
    compiled: list[Any] = []
    of_module = script.loss

    def loss(module: nn.Module, batch: Any) -> Any:
        return of_module(compiled[0] if compiled else module, batch)

    script.loss = loss
    script.on(
        "built", lambda: compiled.append(torch.compile(script.engine.module, backend="eager"))
    )


@mistake("model", "right", ranks=(1,))
def the_model_is_compiled_before(script: Script) -> None:
    script.model = torch.compile(script.model, backend="eager")


def replace_weight(script: Script) -> None:
    model = inner(script)
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))


later("a parameter is replaced", replace_weight, "error", part="model")


def replace_head(script: Script) -> None:
    model = inner(script)
    model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)


later("a module is replaced", replace_head, "error", part="model")


def add_module(script: Script) -> None:
    inner(script).blocks.append(nn.Linear(8, 8))


later("a module is added", add_module, "error", part="model")


def remove_module(script: Script) -> None:
    del inner(script).blocks[1]


later("a module is removed", remove_module, "error", part="model")


def tie(script: Script) -> None:
    model = inner(script)
    model.blocks[0].weight = model.blocks[1].weight


later("weights are tied", tie, "error", part="model")


def untie(script: Script) -> None:
    model = inner(script)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


later("a weight is cloned", untie, "error", part="model")


def load_state(script: Script, **options: Any) -> None:
    state = {name: value.detach() * 0.5 for name, value in inner(script).state_dict().items()}
    inner(script).load_state_dict(state, **options)


def load_truth(script: Script) -> None:
    state = script.truth.model.state_dict()
    script.truth.model.load_state_dict(
        {n: v * 0.5 if v.is_floating_point() else (v * 0.5).long() for n, v in state.items()}
    )


later("the model loads a state", load_state, "either", load_truth, part="model")
later(
    "the model loads a state by assignment",
    lambda script: load_state(script, assign=True),
    "either",
    load_truth,
    part="model",
)


def load_on_one_rank(script: Script) -> None:
    if script.rank == 0:
        load_state(script)


later(
    "the model loads a state on one rank",
    load_on_one_rank,
    "error",
    part="model",
    ranks=(2,),
)


@torch.no_grad()
def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


later(
    "weights are written to",
    lambda script: halve(script.model),
    "either",
    lambda script: halve(script.truth.model),
    part="model",
)


def halve_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


@mistake("model", "either")
def the_data_of_weights_is_written_to(script: Script) -> None:
    script.options.pop("first_step_checks", None)  # which detect it under 16-bit policies
    place = script.random.choice(["built", "before 1", "after 1", "before 2"])
    script.on(place, lambda: halve_data(script.model))
    script.truth.on(place, lambda: halve_data(script.truth.model))


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.dim() > 1:
            nn.init.constant_(parameter, 0.05)


later(
    "weights are initialized late",
    lambda script: initialize(script.model),
    "either",
    lambda script: initialize(script.truth.model),
    part="model",
)


def freeze(model: nn.Module, names: Any = ("head.weight",)) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(names)):
            parameter.requires_grad_(False)


@mistake("model", "right", strategies=WHOLE)
def a_parameter_is_frozen_later(script: Script) -> None:
    script.on("before 1", lambda: freeze(inner(script)))
    script.truth.on("before 1", lambda: freeze(script.truth.model))


@mistake("model", "either", strategies=SHARDED, ranks=(2,))
def a_sharded_parameter_is_frozen_later(script: Script) -> None:
    a_parameter_is_frozen_later(script)


@mistake("model", "error", ranks=(2,), strategies=WHOLE)
def a_parameter_is_frozen_on_one_rank(script: Script) -> None:
    if script.rank == 1:
        script.on("before 1", lambda: freeze(inner(script)))


@mistake("model", "error", ranks=(2,), strategies=SHARDED)
def a_sharded_parameter_is_frozen_on_one_rank(script: Script) -> None:
    a_parameter_is_frozen_on_one_rank(script)


@mistake("model", "error")
def a_parameter_is_unfrozen_later(script: Script) -> None:
    freeze(script.model)
    script.on("before 2", lambda: [p.requires_grad_() for p in inner(script).parameters()])


@mistake("model", "error", ranks=(2,))
def a_parameter_is_unfrozen_on_one_rank(script: Script) -> None:
    freeze(script.model)
    if script.rank == 1:
        script.on("before 1", lambda: [p.requires_grad_() for p in inner(script).parameters()])


@mistake("model", "error")
def everything_is_frozen_later(script: Script) -> None:
    script.on("before 1", lambda: inner(script).requires_grad_(False))


@mistake("model", "right")
def the_model_is_in_evaluation_mode(script: Script) -> None:
    script.on("before 1", lambda: script.engine.module.eval())
    script.truth.on("before 1", lambda: script.truth.model.eval())


@mistake("model", "right")
def the_model_is_evaluated_by_hand(script: Script) -> None:
    def act() -> None:
        script.engine.module.eval()
        with torch.no_grad():
            script.engine.module(samples(1, count=3).inputs)
        script.engine.module.train()

    script.on("before 1", act)


@mistake("model", "either", ranks=(2,))
def the_model_is_wrapped_in_DDP_later(script: Script) -> None:  # noqa: N802
    wrapped: list[Any] = []
    correct = script.loss
    script.loss = lambda module, batch: correct(wrapped[0] if wrapped else module, batch)
    script.on("built", lambda: wrapped.append(DistributedDataParallel(inner(script))))


# States


later(
    "the engine loads its own state",
    lambda script: script.engine.load_state_dict(script.engine.state_dict()),
    "right",
    part="state",
)
later(
    "the engine loads a copy of its state",
    lambda script: script.engine.load_state_dict(copy.deepcopy(script.engine.state_dict())),
    "right",
    part="state",
)
later("the engine loads nothing", lambda s: s.engine.load_state_dict({}), "error", part="state")
later("the engine loads None", lambda s: s.engine.load_state_dict(None), "error", part="state")
later("the engine loads a path", lambda s: s.engine.load_state_dict("a.pt"), "error", part="state")
later(
    "the engine loads a list",
    lambda script: script.engine.load_state_dict(list(script.engine.state_dict().items())),
    "error",
    part="state",
)
later(
    "the engine loads the state of its model",
    lambda script: script.engine.load_state_dict(inner(script).state_dict()),
    "error",
    part="state",
)
later(
    "the engine loads the state of its optimizer",
    lambda script: script.engine.load_state_dict(script.engine.optimizer.state_dict()),
    "error",
    part="state",
)


def changed_state(script: Script, change: Any) -> None:
    state = copy.deepcopy(script.engine.state_dict())
    change(state)
    script.engine.load_state_dict(state)


def changing(name: str, change: Any, ends: Any, **limits: Any) -> None:
    later(
        f"the engine loads a state {name}",
        lambda script: changed_state(script, change),
        ends,
        part="state",
        **limits,
    )


def of_head(value: Any) -> Any:
    return lambda state: state.update({"model/head.weight": value(state["model/head.weight"])})


changing("with an unknown name", lambda state: state.update(other=torch.ones(1)), "either")
changing("with more weights", lambda state: state.update({"model/more": torch.ones(1)}), "either")
changing("without a weight", lambda state: state.pop("model/head.weight"), "error")
changing("without counts", lambda state: state.pop("engine/counts"), "error")
changing("with numbers for tensors", of_head(lambda value: 0.5), "error")
changing("with lists for tensors", of_head(lambda value: value.tolist()), "error", ranks=(1,))
changing("with a weight of one row", of_head(lambda value: value[:1]), "error", ranks=(1,))
changing("with a weight of one number", of_head(lambda v: torch.ones(())), "error", ranks=(1,))
changing("with a weight turned round", of_head(lambda value: value.T), "error", ranks=(1,))
changing("with a weight in float64", of_head(lambda value: value.double()), "right", ranks=(1,))


@mistake("state", "error", ranks=(2,))
def one_rank_loads_another_state(script: Script) -> None:
    def act() -> None:
        state = {
            name: value * 0.5 if name.startswith("model/") and value.is_floating_point() else value
            for name, value in script.engine.state_dict().items()
        }
        if script.rank == 1:
            script.engine.load_state_dict(state)

    script.on("before 1", act)


@mistake("state", "right")
def the_engine_goes_back(script: Script) -> None:
    kept: dict[str, Any] = {}
    true: dict[str, Any] = {}
    script.on("before 1", lambda: kept.update(copy.deepcopy(script.engine.state_dict())))
    script.on("before 2", lambda: script.engine.load_state_dict(kept))
    truth = script.truth

    def remember() -> None:
        true["model"] = copy.deepcopy(truth.model.state_dict())
        true["optimizer"] = copy.deepcopy(truth.optimizer.state_dict())

    def go_back() -> None:
        truth.model.load_state_dict(true["model"])
        truth.optimizer.load_state_dict(true["optimizer"])

    no_schedule(script)
    truth.on("before 1", remember)
    truth.on("before 2", go_back)


def no_schedule(script: Script) -> None:
    script.options.pop("schedule", None)
    script.truth.schedule = None
