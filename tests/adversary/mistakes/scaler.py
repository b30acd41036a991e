"""`DistributedGradScaler` in a custom loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.adversary.mistakes import Ends, add, in_lines
from tests.adversary.parts import ScalerScript
from tests.adversary.script import sgd


def scaler(name: str, change: Any, ends: Ends, **limits: Any) -> None:
    add(f"scaler: {name}", change, "scaler", ends, kind="scaler", **limits)


def lines(name: str, text: str, ends: Ends, truth: tuple[str, ...] | None = None) -> None:
    scaler(name, in_lines(text, truth), ends)


NO_SCALE = ["zero", "backward without scale", "reduce", "step", "update"]
CLIPS = ("zero", "backward", "clip", "step")
lines("correct", "zero, backward, reduce, step, update", "right")
scaler("no scale", lambda script: setattr(script, "lines", NO_SCALE), "error", ranks=(1,))
scaler(
    "no scale on two ranks",
    lambda script: setattr(script, "lines", NO_SCALE),
    "warning",
    ranks=(2,),
)
lines("no step", "zero, backward, reduce, update", "error")
lines("no update", "zero, backward, reduce, step", "error")
lines("no backward", "zero, step, update", "either", ("zero", "step"))
lines("step twice", "zero, backward, reduce, step, step, update", "error")
lines("update twice", "zero, backward, reduce, step, update, update", "error")
lines("update first", "zero, backward, reduce, update, step", "error")
lines("unscale twice", "zero, backward, reduce, unscale, unscale, step, update", "error")
lines("unscale after step", "zero, backward, reduce, step, unscale, update", "error")
lines("unscale", "zero, backward, reduce, unscale, step, update", "right")
lines("clip", "zero, backward, reduce, clip, step, update", "right", CLIPS)
lines("clip twice", "zero, backward, reduce, clip, clip, step, update", "either", CLIPS)
lines("clip after unscale", "zero, backward, reduce, unscale, clip, step, update", "error")
lines("unscale after clip", "zero, backward, reduce, clip, unscale, step, update", "either", CLIPS)
lines(
    "clip as in torch",
    "zero, backward, reduce, unscale, clip as in torch, step, update",
    "right",
    CLIPS,
)
lines("clip after step", "zero, backward, reduce, step, clip, update", "error")
lines("steps by itself", "zero, backward, reduce, unscale, step of the optimizer, update", "either")
lines("backward after clip", "zero, backward, reduce, clip, backward, step, update", "error")


def on_one_rank(name: str, text: str, other: str = "", rank: int = 1) -> None:
    """Use these lines on one rank, and the correct lines on the others."""

    def change(script: ScalerScript) -> None:
        if script.rank == rank:
            script.lines = text.split(", ")
        elif other:
            script.lines = other.split(", ")

    scaler(f"{name} on one rank", change, "error", ranks=(2,))


on_one_rank("no step", "zero, backward, reduce, update")
on_one_rank("clip", "zero, backward, reduce, clip, step, update")
on_one_rank("step twice", "zero, backward, reduce, step, step, update")
on_one_rank("no update", "zero, backward, reduce, step")


def one_option(name: str, value: Any, ends: Ends = "error") -> None:
    def change(script: ScalerScript) -> None:
        script.options[name] = value

    scaler(f"{name} = {value!r}", change, ends)


for _name, _values in {
    "init_scale": (0.0, -1.0, math.inf, math.nan),
    "growth_factor": (1.0, 0.5, math.inf),
    "backoff_factor": (1.0, 2.0, 0.0),
    "growth_interval": (0, -1, "2000"),
    "hysteresis": (0, -1, "1"),
    "min_scale": (0.0, -1.0, 2.0**20, "1"),
    "max_scale": (0.0, 1.0, "1"),
    "max_consecutive_skips": (0, -1),
    "group": (0,),
}.items():
    for _value in _values:
        one_option(_name, _value)


def scale_of(name: str, wrong: Any, ends: Ends = "error") -> None:
    def change(script: ScalerScript) -> None:
        script.code["backward"] = lambda: script.scaler.scale(wrong)

    scaler(f"scale of {name}", change, ends)


scale_of("a number", 1.0)
scale_of("None", None)


def no_gradients(script: ScalerScript) -> None:
    script.model.requires_grad_(False)
    script.build_optimizer = lambda parameters: sgd([nn.Parameter(torch.ones(2))])


scaler("a model without gradients", no_gradients, "error")


def update_to(value: Any, ends: Ends = "error") -> None:
    def change(script: ScalerScript) -> None:
        script.code["update"] = lambda: script.scaler.update(value)

    scaler(f"update to {value!r}", change, ends)


for _scale in (0.0, -1.0, math.inf, math.nan):
    update_to(_scale)


def load(value: Any, ends: Ends = "error") -> None:
    def change(script: ScalerScript) -> None:
        script.code["zero"] = lambda: script.scaler.load_state_dict(value)

    scaler(f"loads {value!r}", change, ends)


load({})


def other_scales(script: ScalerScript) -> None:
    if script.rank == 1:
        script.options["init_scale"] = 2.0**12


scaler("ranks have other scales", other_scales, "error", ranks=(2,))


def no_reduce_overflow(script: ScalerScript) -> None:
    if script.rank == 1:
        script.in_step[1] = ["zero", "backward", "reduce", "overflow", "step", "update"]
    script.truth_in_step[1] = ()


scaler("one rank overflows", no_reduce_overflow, "right", ranks=(2,))
