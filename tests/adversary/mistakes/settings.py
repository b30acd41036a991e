"""Invalid or unusual values of arguments."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import distmp
from distmp.engine.divergence_guard import DivergenceConfig
from distmp.parallel import ParallelConfig
from distmp.parallel.settings import ShardingConfig
from distmp.scaling.settings import LossScaleConfig
from tests.adversary.mistakes import add, mistake, setting
from tests.adversary.script import Script

setting("max_norm", "error", ["1", "inf", 0, -1, math.nan, -math.inf, True, [1.0], {}, (1,)])


def clip_to(norm: float, script: Script) -> None:
    script.options["max_norm"] = norm
    script.truth.max_norm = norm


for _norm in (math.inf, 1e9):
    add(f"max_norm = {_norm}", functools.partial(clip_to, _norm), "max_norm", "right")
setting("nominal_weight", "error", [0, -1, math.nan, math.inf, "8", True, [8]])
setting("nominal_weight", "right", [8, 5.5, 2**20])
setting("max_consecutive_skips", "error", [0, -1, "50", None, 1.5, math.nan, [3]])
setting("max_consecutive_skips", "right", [1])
for _flag in ("attribution", "shard_optimizer", "reproducible", "first_step_checks"):
    setting(_flag, "error", ["yes", "no", None, 2, []])
setting("on_nonfinite", "error", ["skip", "drop", None, True, 3, "Skip_step", ["skip_step"]])
setting(
    "policy",
    "error",
    [
        "bfloat16", "half", "float16", "mixed", "16-mixed", "bf16-mixed", "FP32", "", "bf16,", "O1",
        None, 16, True, torch.bfloat16, torch.float32, {}, ["bf16"], {"compute": torch.bfloat16},
        {"preset": "bf17"}, {"dtype": "bf16"}, LossScaleConfig(), "fp16,loss_scale=big",
        "fp16,loss_scale=0", "bf16,keep_fp32=nothing", distmp.PrecisionPolicy,
    ],
)  # fmt: skip
setting(
    "strategy",
    "error",
    [
        "DDP",
        "fsdp2",
        "zero",
        "deepspeed",
        "",
        " ddp",
        None,
        2,
        True,
        ["ddp"],
        "ddp_torch",
        nn.Linear,
    ],
)
setting("strategy", "error", ["single"], name="strategy of two", ranks=(2,))
setting("strategy", "error", ["ddp", "fsdp", "hsdp"], name="strategy of one", ranks=(1,))
setting(
    "device",
    "error",
    ["gpu", "cuda:x", "cuda", "cuda:7", 0, 3, -1, "mps", "tpu", "xpu", "meta", "", 1.5, ["cpu"]],
)
setting("device", "right", ["cpu", "cpu:0", torch.device("cpu")])
setting(
    "loss_scale",
    "error",
    [1024.0, "dynamic", True, {"init": 8.0}, {}, LossScaleConfig, distmp.DistributedGradScaler],
)
setting("divergence", "error", [True, "skip", {"on_spike": "skip"}, 3.0, DivergenceConfig])
setting(
    "parallel",
    "error",
    ["fsdp", True, {}, {"compile": "none"}, ShardingConfig(), 2, ParallelConfig],
)


def value(
    name: str, make: Any, ends: Any = "error", argument: str = "parallel", **limits: Any
) -> None:
    """Builds a configuration together with the engine, so that its errors count."""

    def change(script: Script) -> None:
        script.options[argument] = make()

    add(f"{argument}: {name}", change, argument, ends, **limits)


value("compile yes", lambda: ParallelConfig(compile="yes"))
value("compile True", lambda: ParallelConfig(compile=True))
value("recompute all", lambda: ParallelConfig(activation_checkpointing="all"))
value("recompute True", lambda: ParallelConfig(activation_checkpointing=True))
value("microbatches as text", lambda: ParallelConfig(microbatches="8"))
value("no microbatches", lambda: ParallelConfig(microbatches=0))
value("sharding as text", lambda: ParallelConfig(sharding="blocks"))
value("sharding as dict", lambda: ParallelConfig(sharding={"wrap": ["Block"]}))
for _wrap in ("Linear", ["Linear"], None, (1,), ("",), ("NoSuchClass",), (nn.Linear,)):
    value(
        f"wrap {_wrap!r}",
        lambda wrap=_wrap: ParallelConfig(sharding=ShardingConfig(wrap=wrap)),
        "either",
    )
for _size in (0, -1, 1.5, "2", True, 3):
    value(
        f"shard_size {_size!r}",
        lambda size=_size: ParallelConfig(sharding=ShardingConfig(shard_size=size)),
        ranks=(2,),
    )
for _place in ("hybrid", "shards", None, True):
    value(
        f"accumulate {_place!r}",
        lambda place=_place: ParallelConfig(sharding=ShardingConfig(accumulate=place)),
        strategies=("ddp", "fsdp"),
    )
value(
    "reshard text",
    lambda: ParallelConfig(sharding=ShardingConfig(reshard_after_forward="no")),
)
for _name, _values in {
    "init": ("65536", 0, -1.0, math.inf, math.nan, None, 2.0**200, True),
    "growth_factor": (1, 0.5, math.inf, "2", None),
    "backoff_factor": (0, 1, 2.0, -0.5, "0.5", math.nan),
    "growth_interval": (0, -1, "2000", None, 1.5, math.nan),
    "hysteresis": (0, -1, "1", None, 1.5),
    "min_scale": (0, -1, "1", None, 2.0**30, math.nan),
    "max_scale": (0, 1.0, "1", None, math.inf),
    "dynamic": ("no", None, 2),
}.items():
    for _value in _values:
        value(
            f"{_name} = {_value!r}",
            lambda name=_name, given=_value: LossScaleConfig(**{name: given}),
            argument="loss_scale",
        )
for _name, _values in {
    "threshold": (0, -1, "3", math.nan, None),
    "on_spike": ("stop", True, None),
}.items():
    for _value in _values:
        value(
            f"{_name} = {_value!r}",
            lambda name=_name, given=_value: DivergenceConfig(**{name: given}),
            argument="divergence",
        )


# The model


def model(name: str, make: Any, ends: Any = "error", **limits: Any) -> None:
    def change(script: Script) -> None:
        script.model = make(script.model)

    add(f"the model is {name}", change, "model", ends, **limits)


model("None", lambda model: None)
model("a function", lambda model: lambda x: model(x))
model("its class", lambda model: type(model))
model("its parameters", lambda model: list(model.parameters()))
model("its state", lambda model: model.state_dict())
model("a list", lambda model: [model])
model("empty", lambda model: nn.Sequential())
model("an identity", lambda model: nn.Identity())
model("frozen", lambda model: model.requires_grad_(False))
model("in float64", lambda model: model.double())
model("complex", lambda model: model.to(torch.complex64))
model("lazy", lambda model: nn.Sequential(nn.LazyLinear(4)))
model("in DataParallel", DataParallel, "either")
model("in DDP", lambda model: DistributedDataParallel(model), "either", ranks=(2,))
model("in inference mode", lambda model: in_inference_mode(model), "either")


def in_inference_mode(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return copy.deepcopy(model)


@mistake("model", "either")
def the_model_has_an_integer_parameter(script: Script) -> None:
    script.model.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)


@mistake("model", "either")
def the_model_has_an_empty_parameter(script: Script) -> None:
    for model in (script.model, script.truth.model):
        model.nothing = nn.Parameter(torch.zeros(0, 3, dtype=next(model.parameters()).dtype))


@mistake("model", "either")
def the_model_has_a_scalar_parameter(script: Script) -> None:
    for model in (script.model, script.truth.model):
        model.scalar = nn.Parameter(torch.ones((), dtype=next(model.parameters()).dtype))


@mistake("model", "error")
def the_model_has_a_meta_buffer(script: Script) -> None:
    script.model.register_buffer("table", torch.ones(3, device="meta"))


@mistake("model", "either")
def a_parameter_overlaps_another(script: Script) -> None:
    for model in (script.model, script.truth.model):
        model.blocks[1].weight.data = model.blocks[0].weight.data


# torch raises an error for batch norm with 16-bit statistics.
@mistake("model", "either")
def the_model_is_in_bfloat16(script: Script) -> None:
    script.model.bfloat16()
    script.truth.model.load_state_dict(script.model.state_dict())


@mistake("model", "right")
def the_model_is_in_a_sequence(script: Script) -> None:
    script.model, script.truth.model = (
        nn.Sequential(script.model),
        nn.Sequential(script.truth.model),
    )


# Single function calls


def call(name: str, function: Any, ends: Any = "error") -> None:
    def change(script: Any) -> None:
        script.call = function

    add(f"calls {name}", change, "call", ends, kind="call", ranks=(1,))


CPU = torch.device("cpu")
for _policy in (None, 3, "", "auto", "bf17", "bf16,", {}, {"a": 1}, ["bf16"], torch.bfloat16, True):
    call(f"policy({_policy!r})", lambda wanted=_policy: distmp.policy(wanted))
for _policy in (None, 3, "", "bf17", {}, ["bf16"], torch.bfloat16):
    call(f"resolve({_policy!r})", lambda wanted=_policy: distmp.resolve(wanted, CPU))
for _device in ("cpu", None, 0, "gpu", ["cpu"]):
    call(
        f"resolve on {_device!r}",
        lambda device=_device: distmp.resolve("bf16", device),
        "either",
    )
call("PrecisionPolicy without a name", lambda: distmp.PrecisionPolicy(None))
call("PrecisionPolicy with text", lambda: distmp.PrecisionPolicy("mine", compute_dtype="bf16"))
call("PrecisionPolicy with int8", lambda: distmp.PrecisionPolicy("mine", param_dtype=torch.int8))
call("PrecisionPolicy with a list", lambda: distmp.PrecisionPolicy("mine", keep_fp32=["norm"]))
call("PrecisionPolicy with a scale", lambda: distmp.PrecisionPolicy("mine", loss_scale=-1))
call("PrecisionPolicy with a word", lambda: distmp.PrecisionPolicy("mine", loss_scale="static"))
call("PrecisionPolicy with truth as text", lambda: distmp.PrecisionPolicy("mine", autocast="yes"))


# Unknown arguments


@mistake("arguments", "error")
def loss_and_optimizer_change_places(script: Script) -> None:
    script.loss, script.optimizer = script.optimizer, script.loss


@mistake("arguments", "error")
def model_and_loss_change_places(script: Script) -> None:
    script.model, script.loss = script.loss, script.model


@mistake("arguments", "error", ranks=(1,))
def WORLD_SIZE_is_set_alone(script: Script) -> None:  # noqa: N802
    environment(script, WORLD_SIZE="2")


@mistake("arguments", "error", ranks=(1,))
def RANK_is_beyond_WORLD_SIZE(script: Script) -> None:  # noqa: N802
    environment(script, RANK="3", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


@mistake("arguments", "error", ranks=(1,))
def WORLD_SIZE_is_no_number(script: Script) -> None:  # noqa: N802
    environment(script, RANK="0", WORLD_SIZE="two", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


@mistake("arguments", "error", ranks=(1,))
def MASTER_PORT_is_no_number(script: Script) -> None:  # noqa: N802
    environment(script, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="http")


@mistake("arguments", "error", ranks=(1,))
def MASTER_ADDR_is_nowhere(script: Script) -> None:  # noqa: N802
    environment(
        script, RANK="1", WORLD_SIZE="2", MASTER_ADDR="no.such.host.invalid", MASTER_PORT="29511"
    )


@mistake("arguments", "either", ranks=(2,))
def WORLD_SIZE_says_more_than_there_are(script: Script) -> None:  # noqa: N802
    environment(script, WORLD_SIZE="4")


@mistake("arguments", "either", ranks=(1,))
def WORLD_SIZE_of_one_without_an_address(script: Script) -> None:  # noqa: N802
    environment(script, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def environment(script: Script, **variables: str) -> None:
    import os

    os.environ.update(variables)
