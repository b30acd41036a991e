from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.config import PrecisionConfig, RunConfig, load
from distmp.errors import ConfigError
from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.notation import as_text
from distmp.precision.policy import FIELDS, dtype_word
from distmp.utils.settings import from_mapping
from distmp.utils.settings.yaml_files import read_yaml, write_yaml

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("param=fp32,compute=bf16,reduce=fp32", {"compute_dtype": BF16}),
        ("compute=bfloat16", {"compute_dtype": BF16}),
        ("bf16,reduce=bf16", {"compute_dtype": BF16, "reduce_dtype": BF16}),
        (" bf16 , keep_fp32 = norm|head ", {"compute_dtype": BF16, "keep_fp32": ("norm", "head")}),
        ("fp16,loss_scale=2e3", {"compute_dtype": FP16, "loss_scale": 2000.0}),
        ("fp16-static,loss_scale=dynamic", {"compute_dtype": FP16, "loss_scale": "dynamic"}),
        ("preset=tf32,tf32=false", {}),
        ("bf16,buffer=none,cast_inputs=false", {"compute_dtype": BF16, "cast_inputs": False}),
        ("bf16,cast_inputs=False", {"compute_dtype": BF16, "cast_inputs": False}),
        ("bf16-autocast,autocast=false", {"compute_dtype": BF16}),
        (
            "bf16-pure,stochastic_rounding=true",
            {"compute_dtype": BF16, "param_dtype": BF16, "stochastic_rounding": True},
        ),
    ],
)
def test_policy_text_sets_fields(text: str, fields: dict[str, Any]) -> None:
    assert policy(text) == PrecisionPolicy(name=text.strip(), **fields)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"preset": "bf16"}, "bf16"),
        ({"compute": "bf16"}, "bf16"),  # it gets the name of the equal preset
        ({"preset": "bf16", "reduce": "bf16"}, "compute=bf16,reduce=bf16"),
        (
            {"preset": "fp16", "loss_scale": 8, "name": "mine"},
            "name=mine,compute=fp16,loss_scale=8",
        ),
        ({"preset": "bf16", "keep_fp32": ["norm"]}, "compute=bf16,keep_fp32=norm"),
        ({"preset": "bf16", "keep_fp32": "norm|head"}, "compute=bf16,keep_fp32=norm|head"),
    ],
)
def test_policy_mapping_sets_fields(mapping: dict[str, Any], expected: str) -> None:
    assert as_text(policy(mapping)) == expected
    assert policy(expected) == policy(mapping)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("bf61", r"^precision\.policy = 'bf61': did you mean 'bf16'\?"),
        ("fp16-autocats", "did you mean 'fp16-autocast'"),
        ("fp16-mixed", "use 'fp16-autocast', which trains FP32 weights$"),
        ("16-true", "use 'fp16-autocast', which trains FP32 weights$"),
        ("int4x", "choose one of auto, bf16, bf16-autocast, bf16-pure, fp16, fp16-autocast, "),
        ("", r"^precision\.policy = '': choose one of"),
        ("auto", r"^precision\.policy = 'auto': is resolved for a device by distmp\.resolve"),
        ("auto,reduce=bf16", r"'auto': .* name a preset to change something in it"),
        ("bf16,fp16", r"'bf16,fp16': 'fp16' lacks a value"),
        ("bf16,", r"'bf16,': '' lacks a value; write key=\.\.\."),
        ("bf16,reduce=bf16,reduce=fp32", "gives reduce twice"),
        ("bf16,preset=fp16", "gives preset twice"),
        ("bf16,reduec=bf16", r"policy\.reduec = 'bf16': unknown key; did you mean 'reduce'\?"),
        ("bf16,reduce_dtype=bf16", "did you mean 'reduce'"),
        ("bf16,reduce=bf61", r"policy\.reduce = 'bf61': did you mean 'bf16'\?"),
        ("bf16,compute=int8", r"policy\.compute = 'int8': choose one of bf16, fp16, fp32"),
        ("bf16,compute=none", r"policy\.compute = 'none': choose one of"),
        ("bf16,tf32=maybe", r"policy\.tf32 = 'maybe': use True or False"),
        ("fp16,loss_scale=lots", r"policy\.loss_scale = 'lots'"),
        ("fp16,loss_scale=inf", r"policy\.loss_scale = inf: use a number from"),
        ("bf16,keep_fp32=a b", r"policy\.keep_fp32 = 'a b': use a pattern without spaces"),
        ("bf16,keep_fp32=a||b", r"policy\.keep_fp32 = ''"),
        ("bf16,name=", r"policy\.name = ''"),
        ({}, r"^precision\.policy = \{\}: use the name of a preset"),
        ({"preset": ["bf16"]}, r"^precision\.policy = \['bf16'\]"),
        ({"preset": "bf16", "reduce": 16}, r"policy\.reduce = 16: did you mean 'fp16'"),
        ({"preset": "bf16", "reduce": torch.bfloat16}, r"policy\.reduce = torch\.bfloat16"),
        ({"preset": "bf16", "keep_fp32": 3}, r"policy\.keep_fp32 = 3: use a tuple"),
        ({"preset": "bf16", 3: 4}, r"policy\.3 = 4: unknown key"),
        (None, r"^precision\.policy = None: use the name of a preset"),
        (torch.bfloat16, r"^precision\.policy = torch\.bfloat16: use the name of a preset, a text"),
        (
            "bf16-mixed",
            r"^precision\.policy = 'bf16-mixed': use 'bf16-autocast', which trains",
        ),
        ("16-mixed", "use 'fp16-autocast', which trains FP32 weights$"),
        ("32-true", "use 'fp32', which trains FP32 weights$"),
        ("bf16-mixed,reduce=bf16", "'bf16-mixed': use 'bf16-autocast', which trains FP32 weights$"),
    ],
)
def test_invalid_policy_description_is_one_message(description: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        policy(description)
    assert "\n" not in str(caught.value)


_PATTERN = st.text(
    st.characters(exclude_characters=",|=", categories=["L", "N", "P", "S"]), min_size=1
)
_CHANGES = {
    "name": st.sampled_from(["own", "bf16", "two words", "ü"]),
    "reduce_dtype": st.sampled_from([FP32, BF16, FP16]),
    "buffer_dtype": st.sampled_from([None, FP32, BF16, FP16]),
    "output_dtype": st.sampled_from([FP32, BF16, FP16]),
    "accumulate_dtype": st.sampled_from([FP32, BF16]),
    "loss_scale": st.just("dynamic") | st.floats(2.0**-126, 2.0**126) | st.integers(1, 2**40),
    "keep_fp32": st.lists(_PATTERN, max_size=3, unique=True).map(tuple),
    "cast_inputs": st.booleans(),
}


@st.composite
def policies(draw: st.DrawFn) -> PrecisionPolicy:
    """Draw a preset and change some of its fields."""
    drawn = draw(st.sampled_from(list(PRESETS.values())))
    for field in sorted(draw(st.sets(st.sampled_from(sorted(_CHANGES))))):
        with contextlib.suppress(ConfigError):
            drawn = replace(drawn, **{field: draw(_CHANGES[field])})
    return drawn


def as_mapping(described: PrecisionPolicy) -> dict[str, Any]:
    """Return all fields by their keys, as values that YAML and JSON can represent."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return dtype_word(value)
        return list(value) if isinstance(value, tuple) else value

    return {key: plain(getattr(described, name)) for key, name in FIELDS.items()}


@settings(max_examples=150, deadline=None)
@given(described=policies())
def test_round_trips(described: PrecisionPolicy) -> None:
    text, mapping = as_text(described), as_mapping(described)
    assert policy(text) == described
    assert policy(mapping) == described
    assert as_text(policy(mapping)) == text
    assert as_mapping(policy(text)) == mapping
    assert json.loads(json.dumps(mapping)) == mapping


@settings(max_examples=300, deadline=None)
@given(
    text=st.text()
    | st.lists(
        st.sampled_from(
            [
                "bf16",
                "fp16",
                "=",
                ",",
                "reduce",
                "keep_fp32",
                "|",
                "norm",
                "loss_scale",
                "1",
                "none",
                " ",
            ]
        )
    ).map("".join)
)
def test_any_text_round_trips_or_is_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        described = policy(text)
        assert policy(as_text(described)) == described


def test_name_that_reads_as_other_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="is the text of another policy"):
        as_text(PrecisionPolicy("compute=bf16"))


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_are_written_by_name(preset: PrecisionPolicy) -> None:
    assert as_text(preset) == preset.name
    assert policy(preset.name) == policy(as_mapping(preset)) == preset


@pytest.mark.parametrize("preset", [*PRESETS.values(), policy("bf16,keep_fp32=norm|head")])
def test_policy_from_yaml_and_command_line(tmp_path: Path, preset: PrecisionPolicy) -> None:
    path = tmp_path / "config.yaml"
    for form in (as_text(preset), as_mapping(preset)):
        config = RunConfig(precision=PrecisionConfig(policy=form))
        write_yaml(config, path)
        assert from_mapping(RunConfig, read_yaml(path)) == config
        loaded = load(["--config", str(path), "--steps", "3"]).precision.policy
        assert policy(loaded) == preset
    assert policy(load(["--precision.policy", as_text(preset)]).precision.policy) == preset
    line = json.dumps(as_mapping(preset))
    assert policy(load(["--precision.policy", line]).precision.policy) == preset


@pytest.mark.parametrize("described", [{"name": "fp8"}, "name=bf16"])
def test_preset_name_as_custom_name_is_refused(described: Any) -> None:
    with pytest.raises(ConfigError, match=r"is only a label of an FP32 policy; use preset="):
        policy(described)
