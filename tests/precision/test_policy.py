from __future__ import annotations

import json
import logging
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.report import RESULTS
from distmp.errors import ConfigError
from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.builders import autocast_context, prepare
from distmp.precision.policy import COSTS, costs
from distmp.quantization.layers import low_precision_layers
from tests.reference import make_engine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# Formats of forward, grad and wgrad, the scales, and the wide layers.
LOW_PRECISION = {
    "fp8": ("e4m3", "e5m2", "e5m2", "tensor", ("head", "embedding")),
    "fp8-rowwise": ("e4m3", "e4m3", "e4m3", "row", ("head", "embedding")),
    "mxfp8": ("e4m3", "e4m3", "e4m3", "block32", ("head", "embedding")),
    "nvfp4": ("e2m1", "e2m1", "e2m1", "block16", ("head", "embedding", "last15%")),
}


@pytest.mark.parametrize(
    ("name", "param", "compute", "autocast", "loss_scale", "casts_parameters", "has_masters"),
    [
        ("fp32", FP32, FP32, False, None, False, False),
        ("tf32", FP32, FP32, False, None, False, False),
        ("bf16", FP32, BF16, False, None, True, True),
        ("bf16-autocast", FP32, BF16, True, None, False, False),
        ("bf16-pure", BF16, BF16, False, None, True, False),
        ("fp16", FP32, FP16, False, "dynamic", True, True),
        ("fp16-autocast", FP32, FP16, True, "dynamic", False, False),
        ("fp16-static", FP32, FP16, False, 1024.0, True, True),
    ],
)
def test_presets(
    name: str,
    param: torch.dtype,
    compute: torch.dtype,
    autocast: bool,
    loss_scale: Literal["dynamic"] | float | None,
    casts_parameters: bool,
    has_masters: bool,
) -> None:
    preset = policy(name)
    assert preset == PrecisionPolicy(
        name=name,
        param_dtype=param,
        compute_dtype=compute,
        autocast=autocast,
        reduce_dtype=FP32,
        accumulate_dtype=FP32,
        buffer_dtype=None,
        output_dtype=FP32,
        loss_scale=loss_scale,
        keep_fp32=(),
        cast_inputs=True,
        tf32=name == "tf32",
    )
    assert preset.casts_parameters == casts_parameters
    assert preset.has_masters == has_masters
    assert preset.module_dtype == (compute if casts_parameters else FP32)


def test_all_presets_are_tested() -> None:
    assert list(PRESETS) == [
        *("fp32", "tf32", "bf16", "bf16-autocast", "bf16-pure"),
        *("fp16", "fp16-autocast", "fp16-static"),
        *LOW_PRECISION,
    ]


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_presets_have_expected_fields(name: str) -> None:
    forward, grad, wgrad, scaling, hp = LOW_PRECISION[name]
    expected = PrecisionPolicy(
        name,
        compute_dtype=BF16,
        forward_format=forward,
        grad_format=grad,
        wgrad_format=wgrad,
        scaling=scaling,
        hp=hp,
    )
    assert policy(name) == expected
    assert expected.has_low_precision_matmuls
    # Everything else is as in bf16.
    assert replace(expected.high_precision, name="bf16") == policy("bf16")
    assert policy("bf16").high_precision is policy("bf16")


def test_refused_dtype_is_printed_as_written() -> None:
    with pytest.raises(ConfigError, match=r"^precision\.policy\.compute = 'fp32': results"):
        policy("fp32,forward=e4m3")


B, H = {"compute_dtype": BF16}, {"compute_dtype": FP16, "loss_scale": "dynamic"}
PURE = {"param_dtype": BF16, "compute_dtype": BF16}


@pytest.mark.parametrize(
    ("bad", "setting", "problem"),
    [
        # Not a floating-point dtype for training.
        ({"compute_dtype": torch.int8}, "compute", "choose one of float32, bfloat16, float16"),
        ({"param_dtype": torch.float64}, "param", "choose one of float32"),
        ({"reduce_dtype": torch.complex64}, "reduce", "choose one of float32"),
        ({"accumulate_dtype": 32}, "accumulate", "choose one of float32"),
        ({"output_dtype": torch.float8_e4m3fn}, "output", "choose one of float32"),
        ({"buffer_dtype": torch.bool}, "buffer", "choose one of float32"),
        # Weights.
        ({**PURE, "param_dtype": FP16, "compute_dtype": FP16}, "param", "with param=fp32"),
        ({**B, "param_dtype": FP16}, "param", "Adam's epsilon of 1e-8 becomes zero"),
        ({"param_dtype": BF16}, "param", "is not the compute dtype float32"),
        ({**PURE, "autocast": True}, "param", "autocast casts from FP32 weights"),
        # Autocast.
        ({"autocast": True}, "autocast", "FP32 compute needs no autocast"),
        ({"autocast": 1}, "autocast", "use True or False"),
        # Gradients.
        ({**H, "reduce_dtype": BF16}, "reduce", "use reduce=fp16 or reduce=fp32"),
        ({**B, "reduce_dtype": FP16}, "reduce", "use reduce=bf16 or reduce=fp32"),
        ({**B, "accumulate_dtype": BF16}, "accumulate", "need sums in float32"),
        ({"accumulate_dtype": FP16}, "accumulate", "need sums in float32"),
        ({**PURE, "accumulate_dtype": FP16}, "accumulate", "use fp32 or bf16"),
        # Loss scale.
        ({"compute_dtype": FP16}, "loss_scale", "become zero without a loss scale"),
        ({"reduce_dtype": FP16}, "loss_scale", "use 'dynamic'"),
        ({**B, "loss_scale": -1.0}, "loss_scale", r"from 2\^-126 to 2\^126"),
        ({**H, "loss_scale": "static"}, "loss_scale", 'use "dynamic", a number, or None'),
        ({**H, "loss_scale": True}, "loss_scale", 'use "dynamic", a number, or None'),
        ({**H, "loss_scale": 0}, "loss_scale", r"from 2\^-126 to 2\^126"),
        ({**H, "loss_scale": float("nan")}, "loss_scale", r"from 2\^-126 to 2\^126"),
        ({**H, "loss_scale": 10**400}, "loss_scale", r"from 2\^-126 to 2\^126"),
        # Outputs, buffers and kept modules.
        ({"output_dtype": BF16}, "output", r"is not the compute dtype float32"),
        ({**H, "output_dtype": BF16}, "output", "use fp32 or fp16"),
        ({"buffer_dtype": BF16}, "buffer", "held in float32"),
        ({**B, "autocast": True, "buffer_dtype": BF16}, "buffer", "held in float32"),
        ({"keep_fp32": ("norm",)}, "keep_fp32", "in FP32 already"),
        ({"tf32": True, "keep_fp32": ("norm",)}, "keep_fp32", "set for the process"),
        ({**B, "keep_fp32": "norm"}, "keep_fp32", "use a tuple of patterns"),
        ({**B, "keep_fp32": ("norm", "norm")}, "keep_fp32", "names a pattern twice"),
        ({**B, "keep_fp32": ("a|b",)}, "keep_fp32", "use a pattern without"),
        ({**B, "keep_fp32": (nn.LayerNorm,)}, "keep_fp32", "use a pattern without"),
        ({**B, "tf32": True}, "tf32", "applies only to FP32"),
        ({**B, "stochastic_rounding": True}, "stochastic_rounding", "this policy has FP32 weights"),
        ({"stochastic_rounding": "yes"}, "stochastic_rounding", "use True or False"),
        ({"cast_inputs": None}, "cast_inputs", "use True or False"),
        ({"name": ""}, "name", "a word or two"),
        ({"name": "two\nlines"}, "name", "a word or two"),
    ],
)
def test_invalid_policies_are_one_message(bad: dict[str, Any], setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        PrecisionPolicy(**{"name": "custom", **bad})
    assert caught.value.setting == f"precision.policy.{setting}"
    assert str(caught.value).startswith(f"precision.policy.{setting} = ")
    assert "\n" not in str(caught.value)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return self.head(self.norm(torch.relu(self.first(x))))


_CHANGES = {
    "param_dtype": st.sampled_from([FP32, BF16, FP16]),
    "compute_dtype": st.sampled_from([FP32, BF16, FP16, torch.int8, "bf16"]),
    "autocast": st.booleans(),
    "reduce_dtype": st.sampled_from([FP32, BF16, FP16, None]),
    "accumulate_dtype": st.sampled_from([FP32, BF16, FP16]),
    "buffer_dtype": st.sampled_from([None, FP32, BF16, FP16, torch.int64]),
    "output_dtype": st.sampled_from([FP32, BF16, FP16]),
    "loss_scale": st.sampled_from([None, "dynamic", 8.0, 0.0]),
    "keep_fp32": st.sampled_from([(), ("norm",), ("head",), ("norm", "first"), ("hea",), ["norm"]]),
    "cast_inputs": st.booleans(),
    "tf32": st.booleans(),
    "stochastic_rounding": st.booleans(),
    "forward_format": st.sampled_from([None, "e4m3", "e5m2", "e2m1", "e3m4"]),
    "grad_format": st.sampled_from([None, "e4m3", "e5m2", "e2m1"]),
    "wgrad_format": st.sampled_from([None, "e4m3", "e5m2", "e2m1"]),
    "scaling": st.sampled_from(["tensor", "row", "block32", "block16", "block"]),
    "hp": st.sampled_from([(), ("head",), ("first", "head"), ("hea",), ["head"], ("first1",)]),
}


@st.composite
def changed_presets(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a preset with some of them changed, valid or not."""
    preset = draw(st.sampled_from(list(PRESETS.values())))
    changed = draw(st.sets(st.sampled_from(sorted(_CHANGES)), max_size=4))
    return vars(preset) | {field: draw(_CHANGES[field]) for field in sorted(changed)}


@settings(max_examples=400, deadline=None)
@given(fields=changed_presets())
def test_any_policy_is_refused_or_has_its_dtypes(fields: dict[str, Any]) -> None:
    model = Model()
    try:
        built = PrecisionPolicy(**fields)
        # As the engine does, which alone computes low-precision matmuls.
        low_precision = low_precision_layers(model, built, [], torch.device("cpu"))
        prepare(model, built.high_precision, "cpu")
    except ConfigError as refused:
        message = str(refused)
    else:
        message = ""
    if message:
        event("refused")
        assert re.match(r"precision\.policy[. ]", message)
        assert "\n" not in message
        return
    event("runs")
    assert {field: getattr(built, field) for field in fields} == fields
    held = built.module_dtype
    seen: dict[str, torch.dtype] = {}
    for name in ("first", "head"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda _, x, y, name=name: seen.update({name: y.dtype}))
    x = torch.ones(3, 32, dtype=FP32 if built.cast_inputs else held)
    with autocast_context(built.high_precision, torch.device("cpu")):
        output = model(x)
    output.sum().backward()
    assert model.seen == held
    assert output.dtype == built.output_dtype
    patterns = built.keep_fp32
    kept = {name for name in ("first", "norm", "head") if name in patterns}
    if built.buffer_dtype in (None, FP32):
        kept.add("norm")
    assert (low_precision is not None) == built.has_low_precision_matmuls
    if low_precision is not None:
        assert {*low_precision.modules} == {"first", "head"} - kept - {*built.hp}
    for name, parameter in model.named_parameters():
        expected = FP32 if name.partition(".")[0] in kept else held
        assert parameter.dtype == expected, name
        assert parameter.grad is not None
        assert parameter.grad.dtype == expected
    statistics = model.norm.running_mean
    assert statistics is not None
    assert statistics.dtype == (FP32 if "norm" in kept else built.buffer_dtype)
    computed = built.compute_dtype
    assert seen["head"] == (FP32 if "head" in kept else computed)
    assert seen["first"] == (FP32 if "first" in kept and built.autocast else computed)


def test_random_policies_cover_every_field() -> None:
    assert {field.name for field in fields(PrecisionPolicy)} == {"name", *_CHANGES}


def test_policy_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        policy("bf16").autocast = True  # type: ignore[misc]


def test_precision_costs_agree_with_benchmark() -> None:
    measured = json.loads((RESULTS / "precision-errors-cpu.json").read_text())["errors"]
    assert COSTS["param"].endswith(f" {measured['param lost']:.0%} of the weights unchanged")
    named = {
        "accumulate": ["accumulate 8", "accumulate 512"],
        "reduce": ["reduce once", "reduce machines", "reduce ring"],
        "buffer": ["buffer mean"],
        "output": ["output"],
    }
    for key, figures in named.items():
        assert re.findall(r"0\.\d+", COSTS[key]) == [f"{measured[each]:.2g}" for each in figures]


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        *((name, ["param"] if name == "bf16-pure" else []) for name in PRESETS),
        ("bf16,keep_fp32=norm|head", []),
        ("bf16,reduce=bf16", ["reduce"]),
        ("fp32,reduce=fp16,loss_scale=8", ["reduce"]),
        ("bf16,buffer=bf16,output=bf16", ["buffer", "output"]),
        ("bf16-pure,accumulate=bf16", ["param", "accumulate"]),
        ("bf16-pure,stochastic_rounding=true", []),
    ],
)
def test_every_precision_cost_has_a_figure(text: str, saved: list[str]) -> None:
    found = costs(policy(text))
    assert [cost.partition("=")[0] for cost in found] == saved
    assert all(any(char.isdigit() for char in cost.partition(":")[2]) for cost in found)


def test_engine_warns_of_accuracy_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "distmp"):
        make_engine(policy="bf16")
        assert caplog.messages == []
        make_engine(policy="bf16-pure,name=cheap")
    (message,) = caplog.messages
    assert message.startswith(
        "precision cheap reduces accuracy: param=bfloat16: without FP32 master"
    )
