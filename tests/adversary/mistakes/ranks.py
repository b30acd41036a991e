"""Settings that differ between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from distmp.engine.divergence_guard import DivergenceConfig
from distmp.parallel import ParallelConfig
from distmp.parallel.settings import ShardingConfig
from distmp.scaling.settings import LossScaleConfig
from tests.adversary.mistakes import add, mistake
from tests.adversary.script import SHARDED, Script, adamw, make_model, sgd


def on_rank_1(name: str, values: dict[str, Any], ends: Any = "error", **limits: Any) -> None:
    def change(script: Script) -> None:
        if script.rank == 1:
            script.options |= values
        else:  # the case may have these settings
            script.options = {
                name: value
                for name, value in script.options.items()
                if (name, value) not in values.items()
            }

    part = next(iter(values))
    add(f"only rank 1 has {name}", change, part, ends, ranks=(2,), **limits)


on_rank_1("another policy", {"policy": "bf16,reduce=bf16"})
on_rank_1("a loss scale", {"policy": "fp16"}, policies=("fp32", "bf16"))
on_rank_1(
    "a policy of the same name", {"policy": {"name": "fp32", "compute": "bf16"}}, policies=("fp32",)
)
on_rank_1("clipping", {"max_norm": 0.1})
on_rank_1(
    "other rules of the scale",
    {"loss_scale": LossScaleConfig(growth_interval=7, init=2.0**8)},
    policies=("fp16", "fp16-autocast"),
)
on_rank_1("a nominal weight", {"nominal_weight": 64.0})
on_rank_1("fsdp", {"strategy": "fsdp"}, strategies=("ddp", "hsdp"))
on_rank_1("a sharded optimizer", {"shard_optimizer": True}, strategies=("ddp",))
on_rank_1("dropping of microbatches", {"on_nonfinite": "drop_microbatch"}, strategies=("ddp",))
on_rank_1("reproducible sums", {"reproducible": True}, strategies=("ddp",))
on_rank_1("a schedule", {"schedule": lambda opt: lr_scheduler.StepLR(opt, 1)})
on_rank_1("a divergence guard", {"divergence": DivergenceConfig(on_spike="skip")})
on_rank_1("no first step checks", {"first_step_checks": False})
on_rank_1("no attribution", {"attribution": False}, "either")
on_rank_1("another limit of skips", {"max_consecutive_skips": 3}, "either")
on_rank_1(
    "recomputation",
    {"parallel": ParallelConfig(activation_checkpointing="blocks")},
    "either",
)
on_rank_1(
    "another place of sums",
    {"parallel": ParallelConfig(sharding=ShardingConfig(accumulate="sharded"))},
    strategies=("fsdp", "hsdp"),
)
on_rank_1(
    "other blocks",
    {"parallel": ParallelConfig(sharding=ShardingConfig(wrap=("Linear",)))},
    strategies=SHARDED,
)


def optimizer_on_rank_1(name: str, factory: Any) -> None:
    def change(script: Script) -> None:
        script.optimizer = factory if script.rank == 1 else sgd

    add(f"only rank 1 has {name}", change, "optimizer", "error", ranks=(2,))


optimizer_on_rank_1("another rate", lambda named: sgd(named, lr=0.2))
optimizer_on_rank_1("another momentum", lambda named: sgd(named, momentum=0.5))
optimizer_on_rank_1("another decay", lambda named: sgd(named, weight_decay=0.1))
optimizer_on_rank_1("another optimizer", adamw)
optimizer_on_rank_1("a rate as a tensor", lambda named: sgd(named, lr=torch.tensor(0.3)))
optimizer_on_rank_1("a fused optimizer of another rate", lambda n: sgd(n, fused=True, lr=0.3))
optimizer_on_rank_1(
    "two groups", lambda named: sgd([{"params": named[:1], "lr": 0.3}, {"params": named[1:]}])
)


@mistake("optimizer", "either", ranks=(2,))
def only_rank_1_has_a_fused_optimizer(script: Script) -> None:
    script.truth.build = sgd
    script.optimizer = (lambda named: sgd(named, fused=True)) if script.rank == 1 else sgd


@mistake("optimizer", "either", ranks=(2,))
def optimizers_list_tensors_in_another_order(script: Script) -> None:
    script.truth.build = sgd
    script.optimizer = (lambda named: sgd(named[::-1])) if script.rank == 1 else sgd


def model_on_rank_1(name: str, change_it: Any, ends: Any = "error", **limits: Any) -> None:
    def change(script: Script) -> None:
        if script.rank == 1:
            change_it(script.model)

    add(f"only the model of rank 1 has {name}", change, "model", ends, ranks=(2,), **limits)


def rename(model: Any) -> None:
    model.tail = model.head
    forward = model.forward
    del model.head
    model.forward = lambda x: forward(x)


model_on_rank_1("a module more", lambda m: m.blocks.append(nn.Linear(8, 8)))
model_on_rank_1("a module less", lambda model: model.blocks.__delitem__(1))
model_on_rank_1("another shape", lambda m: m.blocks.__setitem__(0, nn.Linear(8, 8, bias=False)))
model_on_rank_1("a wider block", lambda m: setattr(m, "head", nn.Linear(8, 5, bias=False)))
model_on_rank_1("a frozen parameter", lambda m: m.head.weight.requires_grad_(False))
model_on_rank_1("another dtype", lambda model: model.bfloat16())
model_on_rank_1("a buffer", lambda model: model.register_buffer("table", torch.ones(3)))
model_on_rank_1("an unused parameter", lambda m: setattr(m, "more", nn.Parameter(torch.ones(2))))
model_on_rank_1("another name", lambda model: setattr(model, "tail", nn.Linear(8, 8)))
model_on_rank_1("another norm", lambda model: setattr(model, "norm", nn.GroupNorm(2, 8)))
model_on_rank_1(
    "a statistic less",
    lambda model: setattr(model, "norm", nn.BatchNorm1d(8, track_running_stats=False)),
)
model_on_rank_1(
    "its modules in another order",
    lambda model: setattr(model, "norm", model._modules.pop("norm")),
)


@mistake("model", "right", ranks=(2,))
def ranks_start_from_other_weights(script: Script) -> None:
    if script.rank == 1:
        script.model = make_model(script.case.model, 1234)


@mistake("model", "either", ranks=(2,))
def ranks_start_in_other_modes(script: Script) -> None:
    if script.rank == 1:
        script.model.eval()
    if script.case.model == "batchnorm":
        script.compared = False


@mistake("later", "error", ranks=(2,))
def clipping_changes_on_one_rank(script: Script) -> None:
    if script.rank == 1:
        script.on("before 1", lambda: setattr(script.engine, "max_norm", 0.05))


@mistake("later", "right")
def clipping_changes(script: Script) -> None:
    script.on("before 1", lambda: setattr(script.engine, "max_norm", 0.05))
    script.truth.on("before 1", lambda: setattr(script.truth, "max_norm", 0.05))


@mistake("later", "error")
def clipping_changes_to_nonsense(script: Script) -> None:
    script.on("before 1", lambda: setattr(script.engine, "max_norm", "1.0"))


@mistake("later", "error", ranks=(2,))
def the_nominal_weight_changes_on_one_rank(script: Script) -> None:
    if script.rank == 0:
        script.on("before 1", lambda: setattr(script.engine, "nominal_weight", 1024.0))


@mistake("batches", "either", ranks=(2,))
def inputs_of_one_rank_are_float64(script: Script) -> None:
    if script.rank == 1:
        script.batches = [
            [batch._replace(inputs=batch.inputs.double()) for batch in batches]
            for batches in script.batches
        ]


@mistake("batches", "right", ranks=(2,))
def ranks_have_other_seeds(script: Script) -> None:
    torch.manual_seed(script.rank)
