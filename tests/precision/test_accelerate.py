from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from distmp.errors import ConfigError
from distmp.precision import PRESETS, PrecisionPolicy, policy
from distmp.precision.accelerate import (
    autocast_kwargs,
    check_replicated,
    fsdp_plugin,
    mixed_precision,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# accelerate's word, whether autocast is on, type to which FSDP casts parameters.
WANTED: dict[str, tuple[str, bool, torch.dtype | None]] = {
    "fp32": ("no", False, None),
    "bf16": ("bf16", False, BF16),
    "bf16-autocast": ("bf16", True, None),
    "fp16": ("fp16", False, FP16),
    "fp16-autocast": ("fp16", True, None),
}


def test_every_preset_is_expected() -> None:
    assert PRESETS.keys() == WANTED.keys()


@pytest.mark.parametrize("name", WANTED)
def test_presets_field_by_field(name: str) -> None:
    word, autocast, cast = WANTED[name]
    assert mixed_precision(policy(name)) == word
    assert autocast_kwargs(policy(name)).enabled == autocast
    if cast is None:
        check_replicated(policy(name))
    else:
        with pytest.raises(ConfigError, match=f"use {name}-autocast, an fsdp_plugin"):
            check_replicated(policy(name))
    plugin = fsdp_plugin(policy(name), FullyShardedDataParallelPlugin(fsdp_version=2))
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(
        param_dtype=cast,
        reduce_dtype=FP32,
        output_dtype=None,
        cast_forward_inputs=cast is None,
    )
    plugin = fsdp_plugin(policy(name), FullyShardedDataParallelPlugin(fsdp_version=1))
    assert plugin.mixed_precision_policy == MixedPrecision(
        param_dtype=cast, reduce_dtype=FP32, buffer_dtype=cast
    )


def test_the_rest_of_the_plugin_stays() -> None:
    given = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=False, activation_checkpointing=True
    )
    plugin = fsdp_plugin(policy("bf16"), given)
    assert plugin is given
    assert (plugin.reshard_after_forward, plugin.activation_checkpointing) == (False, True)


@pytest.mark.parametrize("version", [1, 2])
def test_another_precision_in_the_plugin_is_refused(version: int) -> None:
    # accelerate's own default: everything in 16 bits.
    given = FullyShardedDataParallelPlugin(fsdp_version=version, mixed_precision_policy="bf16")
    with pytest.raises(ConfigError, match="leave it out") as caught:
        fsdp_plugin(policy("bf16"), given)
    assert caught.value.setting == "fsdp_plugin.mixed_precision_policy"
    again = fsdp_plugin(policy("bf16"), FullyShardedDataParallelPlugin(fsdp_version=version))
    assert fsdp_plugin(policy("bf16"), again) is again


def test_accumulation_in_16_bits_is_refused() -> None:
    def build(name: str, version: int) -> Any:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        return fsdp_plugin(policy(name), plugin, reduces_every_microbatch=False)

    with pytest.raises(ConfigError, match="add microbatches up in bfloat16") as caught:
        build("bf16", 1)
    assert caught.value.setting == "gradient_accumulation_plugin.sync_each_batch"
    for name, version in (("bf16", 2), ("bf16-autocast", 1), ("fp32", 1)):
        build(name, version)


def test_outputs_in_16_bits_are_refused() -> None:
    narrow = PrecisionPolicy("mine", compute_dtype=BF16, autocast=True, output_dtype=BF16)
    with pytest.raises(ConfigError, match="returns outputs in float32"):
        mixed_precision(narrow)
