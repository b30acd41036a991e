"""Arguments of `Engine.step` and `Engine.evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.adversary.mistakes import add, mistake
from tests.adversary.script import SHARDED, WHOLE, Script, batches_of, samples, summed


def in_place_of_the_list(name: str, wrong: Callable[[list[Any]], Any], ends: Any) -> None:
    def change(script: Script) -> None:
        step = script.random.randrange(len(script.batches))
        script.batches[step] = wrong(script.batches[step])

    add(f"microbatches are {name}", change, "batches", ends)


in_place_of_the_list("a tensor", lambda batches: batches[0].inputs, "error")
in_place_of_the_list("one named tuple", lambda batches: batches[0], "error")
in_place_of_the_list("one tuple", lambda batches: tuple(batches[0]), "error")
in_place_of_the_list("one list", lambda batches: list(batches[0]), "error")
in_place_of_the_list("one dict", lambda batches: batches[0]._asdict(), "error")
in_place_of_the_list("a generator", lambda batches: (batch for batch in batches), "error")
in_place_of_the_list("an iterator", iter, "error")
in_place_of_the_list("a tuple", tuple, "right")
in_place_of_the_list("lists in a list", lambda batches: [list(b) for b in batches], "right")
in_place_of_the_list("in a list too many", lambda batches: [batches], "error")
in_place_of_the_list("numpy", lambda batches: batches[0].inputs.numpy(), "error")
in_place_of_the_list("a set", set, "error")
in_place_of_the_list("text", lambda batches: "batch", "error")
in_place_of_the_list("a number", lambda batches: 3, "error")
in_place_of_the_list("None", lambda batches: None, "error")
in_place_of_the_list("no microbatch", lambda batches: [], "error")
in_place_of_the_list("None in a list", lambda batches: [None], "error")
in_place_of_the_list("numbers in a list", lambda batches: [1, 2], "error")
in_place_of_the_list("tensors in a list", lambda batches: [b.inputs for b in batches], "error")
in_place_of_the_list(
    "numpy in a list", lambda batches: [tuple(t.numpy() for t in b) for b in batches], "error"
)
in_place_of_the_list("dicts in a list", lambda batches: [b._asdict() for b in batches], "error")
in_place_of_the_list(
    "a DataLoader",
    lambda batches: DataLoader(list(zip(*batches[0], strict=True)), batch_size=2),
    "error",
)
in_place_of_the_list(
    "a dataset", lambda batches: torch.utils.data.TensorDataset(*batches[0]), "error"
)


@mistake("batches", "right")
def inputs_are_float64(script: Script) -> None:
    # Converted if the policy casts inputs, otherwise refused by torch.
    if script.case.policy in ("fp32", "fp16-autocast", "bf16-autocast"):
        script.compared = True
    script.batches = [
        [batch._replace(inputs=batch.inputs.double()) for batch in batches]
        for batches in script.batches
    ]


@mistake("batches", "right")
def inputs_are_16_bit(script: Script) -> None:
    def round_(batch: Any) -> Any:
        return batch._replace(inputs=batch.inputs.bfloat16())

    script.batches = [[round_(batch) for batch in batches] for batches in script.batches]
    script.truth.batches = [
        [[round_(batch) for batch in batches] for batches in ranks]
        for ranks in script.truth.batches
    ]


@mistake("batches", "right")
def inputs_want_gradients(script: Script) -> None:
    for batches in script.batches:
        for batch in batches:
            batch.inputs.requires_grad_()


@mistake("batches", "right")
def inputs_are_expanded_views(script: Script) -> None:
    # Samples differ: the statistics of equal ones have no variance, which magnifies rounding.
    for ranks in [[batches] for batches in script.batches] + script.truth.batches:
        for batches in ranks:
            batches[:] = [b._replace(inputs=b.inputs[:, :1].expand_as(b.inputs)) for b in batches]


@mistake("batches", "right")
def one_list_is_used_for_every_step(script: Script) -> None:
    script.batches = [script.batches[0]] * len(script.batches)
    script.truth.batches = [script.truth.batches[0]] * len(script.truth.batches)


@mistake("batches", "error")
def labels_are_out_of_range(script: Script) -> None:
    script.batches[1][0].labels[0] = 17


@mistake("batches", "error")
def inputs_have_another_width(script: Script) -> None:
    batch = script.batches[0][1]
    script.batches[0][1] = batch._replace(inputs=batch.inputs[:, 1:])


@mistake("batches", "error", ranks=(2,))
def inputs_have_another_width_on_one_rank(script: Script) -> None:
    if script.rank == 1:
        inputs_have_another_width(script)


@mistake("batches", "right")
def a_nan_in_the_inputs(script: Script) -> None:
    script.options["on_nonfinite"] = "skip_step"
    for batches in (script.batches[1], script.truth.batches[1][script.case.world_size - 1]):
        if batches is not script.batches[1] or script.rank == script.case.world_size - 1:
            batches[0].inputs[0, 0] = float("nan")


def more(script: Script, step: int, ranks: Any, count: int) -> None:
    """Give some ranks more microbatches."""
    for rank in ranks:
        extra = [samples(step, rank, 50 + index, 0, count=4) for index in range(count)]
        script.truth.batches[step][rank] = [*script.truth.batches[step][rank], *extra]
        if script.rank == rank:
            script.batches[step] = [*script.batches[step], *extra]


@mistake("batches", "right", ranks=(2,), strategies=WHOLE)
def one_rank_has_more_microbatches(script: Script) -> None:
    script.options.pop("reproducible", None)
    more(script, script.random.randrange(3), [1], 2)


@mistake("batches", "error", ranks=(2,), strategies=SHARDED)
def one_rank_has_more_microbatches_of_shards(script: Script) -> None:
    more(script, script.random.randrange(3), [script.random.randrange(2)], 1)


@mistake("batches", "error", ranks=(2,), strategies=("ddp",))
def one_rank_has_more_microbatches_of_a_tree(script: Script) -> None:
    script.options |= {"reproducible": True, "shard_optimizer": False, "policy": "fp32"}
    script.options["on_nonfinite"] = "skip_step"
    more(script, script.random.randrange(3), [1], 2)


@mistake("batches", "right")
def the_number_of_microbatches_changes(script: Script) -> None:
    more(script, 1, range(script.case.world_size), 2)


@mistake("batches", "error", ranks=(2,))
def one_rank_has_no_microbatch(script: Script) -> None:
    if script.rank == 1:
        script.batches[1] = []


@mistake("batches", "error", ranks=(2,))
def one_rank_takes_a_step_more(script: Script) -> None:
    if script.rank == 0:
        script.batches.append(batches_of(script.case, 3, 0))


@mistake("batches", "error", ranks=(2,))
def one_rank_stops_early(script: Script) -> None:
    if script.rank == 1:
        script.on("after 1", lambda: exit_at_once(script))


def exit_at_once(script: Script) -> None:
    raise SystemExit(0)


# Arguments of evaluate


def in_place_of_the_evaluated(name: str, wrong: Callable[[list[Any]], Any], ends: Any) -> None:
    def change(script: Script) -> None:
        script.evaluated = wrong(script.evaluated)

    add(f"evaluated are {name}", change, "evaluated", ends)


in_place_of_the_evaluated("a tensor", lambda batches: batches[0].inputs, "error")
in_place_of_the_evaluated("one pair", lambda batches: batches[0], "error")
in_place_of_the_evaluated("one dict", lambda batches: batches[0]._asdict(), "error")
in_place_of_the_evaluated("a generator", lambda batches: (batch for batch in batches), "right")
in_place_of_the_evaluated("a tuple", tuple, "right")
in_place_of_the_evaluated(
    "a DataLoader",
    lambda batches: DataLoader(list(zip(*batches[0], strict=True)), batch_size=4),
    "right",
)


@mistake("evaluated", "error")
def nothing_is_evaluated(script: Script) -> None:
    script.evaluated = []


@mistake("evaluated", "either", ranks=(2,), strategies=WHOLE)
def one_rank_evaluates_nothing(script: Script) -> None:
    script.truth.evaluated[1] = []
    script.evaluated = script.truth.evaluated[script.rank]


@mistake("evaluated", "error", ranks=(2,), strategies=SHARDED)
def one_rank_evaluates_no_shards(script: Script) -> None:
    one_rank_evaluates_nothing(script)


@mistake("evaluated", "error", ranks=(2,))
def only_rank_0_evaluates(script: Script) -> None:
    if script.rank == 0:
        script.on("after 0", lambda: script.engine.evaluate(script.evaluated))


@mistake("evaluated", "right")
def evaluates_before_the_first_step(script: Script) -> None:
    script.on("built", lambda: script.engine.evaluate(script.evaluated))


@mistake("evaluated", "error")
def the_loss_of_an_evaluation_fails(script: Script) -> None:
    script.evaluated = [samples(1, count=3)._replace(inputs=torch.zeros(3, 1))]


@mistake("evaluated", "right")
def evaluates_in_training_mode_of_parts(script: Script) -> None:
    script.on("built", lambda: script.engine.module.eval())
    script.on("built", lambda: script.engine.module.train())
    assert summed
