from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from distmp.errors import ConfigError
from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.policy import dtype_name

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "compute_dtype", "autocast", "loss_scale", "casts_parameters"),
    [
        ("fp32", FP32, False, None, False),
        ("bf16", BF16, False, None, True),
        ("bf16-autocast", BF16, True, None, False),
        ("fp16", FP16, False, "dynamic", True),
        ("fp16-autocast", FP16, True, "dynamic", False),
    ],
)
def test_presets(
    name: str,
    compute_dtype: torch.dtype,
    autocast: bool,
    loss_scale: str | None,
    casts_parameters: bool,
) -> None:
    preset = policy(name)
    assert preset.name == name
    assert preset.compute_dtype == compute_dtype
    assert preset.autocast == autocast
    assert preset.loss_scale == loss_scale
    assert preset.casts_parameters == casts_parameters
    assert preset.output_dtype == FP32


def test_no_preset_is_left_untested() -> None:
    assert set(PRESETS) == {"fp32", "bf16", "bf16-autocast", "fp16", "fp16-autocast"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bf61", r"precision\.policy = 'bf61': did you mean 'bf16'\?"),
        ("fp16-autocats", "did you mean 'fp16-autocast'"),
        ("int4x", "choose one of auto, bf16, bf16-autocast, fp16, fp16-autocast, fp32"),
        ("auto", r"precision\.policy = 'auto'"),
    ],
)
def test_unknown_presets_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"compute_dtype": torch.int8},
            r"precision\.compute_dtype = torch\.int8: choose one of float32",
        ),
        ({"compute_dtype": "bf16"}, r"precision\.compute_dtype = 'bf16'"),
        ({"compute_dtype": torch.float64}, r"precision\.compute_dtype"),
        ({"output_dtype": torch.float8_e4m3fn}, r"precision\.output_dtype"),
        ({"autocast": True}, r"precision\.autocast = True: FP32 compute needs no autocast"),
        ({"compute_dtype": FP16}, r"precision\.loss_scale = None: .* use 'dynamic'"),
        ({"compute_dtype": FP16, "autocast": True}, r"precision\.loss_scale = None"),
        ({"loss_scale": "static"}, r"precision\.loss_scale = 'static'"),
        ({"loss_scale": 1024.0}, r"precision\.loss_scale = 1024\.0"),
    ],
)
def test_combinations_that_cannot_run_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionPolicy("custom", **fields)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        policy("bf16").autocast = True  # type: ignore[misc]


def test_dtype_name() -> None:
    assert [dtype_name(dtype) for dtype in (FP32, BF16, torch.int64)] == [
        "float32",
        "bfloat16",
        "int64",
    ]
