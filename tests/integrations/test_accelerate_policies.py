from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from distmp.errors import ConfigError
from distmp.integrations.accelerate import (
    check_replicated,
    fsdp_plugin,
    mixed_precision,
    prepare_to_shard,
)
from distmp.precision import PRESETS, PrecisionPolicy, policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# accelerate's word, autocast, the dtype to which FSDP casts parameters, refused without FSDP.
WANTED: dict[str, tuple[str, bool, torch.dtype | None, str]] = {
    "fp32": ("no", False, None, ""),
    "tf32": ("no", False, None, ""),
    "bf16": ("bf16", False, BF16, "only with FSDP"),
    "bf16-autocast": ("bf16", True, None, ""),
    "bf16-pure,accumulate=bf16": ("no", False, BF16, ""),
    "fp16": ("fp16", False, FP16, "only with FSDP"),
    "fp16-autocast": ("fp16", True, None, ""),
    "fp16-static": ("fp16", False, FP16, "only with FSDP"),
}


def test_every_preset_is_expected() -> None:
    wide = {name for name, preset in PRESETS.items() if not preset.has_low_precision_matmuls}
    assert wide == {text.partition(",")[0] for text in WANTED}


@pytest.mark.parametrize(
    "name", [name for name in PRESETS if PRESETS[name].has_low_precision_matmuls]
)
@pytest.mark.parametrize(
    "build",
    [
        mixed_precision,
        fsdp_plugin,
    ],
)
def test_low_precision_matmuls_are_refused(
    build: Callable[[PrecisionPolicy], Any], name: str
) -> None:
    with pytest.raises(ConfigError, match="fewer than 16 bits, which only"):
        build(policy(name))


@pytest.mark.parametrize("text", WANTED)
def test_preset_fields_agree_with_plugin(text: str) -> None:
    word, autocast, cast, refused = WANTED[text]
    requested = policy(text)
    assert mixed_precision(requested) == word
    assert requested.autocast == autocast
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_replicated(requested)
    plugin = fsdp_plugin(requested, FullyShardedDataParallelPlugin(fsdp_version=2))
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(
        param_dtype=cast, reduce_dtype=FP32, output_dtype=None, cast_forward_inputs=False
    )
    plugin = fsdp_plugin(requested, FullyShardedDataParallelPlugin(fsdp_version=1))
    assert plugin.mixed_precision_policy == MixedPrecision(
        param_dtype=cast,
        reduce_dtype=FP32,
        buffer_dtype=None,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(),
    )


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_fields_are_passed_to_plugin(version: int) -> None:
    requested = policy("bf16,reduce=bf16,buffer=bf16")
    given = fsdp_plugin(requested, FullyShardedDataParallelPlugin(fsdp_version=version))
    assert given.mixed_precision_policy.reduce_dtype == BF16
    assert version == 2 or given.mixed_precision_policy.buffer_dtype == BF16


@pytest.mark.parametrize(
    ("text", "setting", "message"),
    [
        ("bf16-pure", "precision.policy", "use accumulate=bf16"),
        ("bf16,keep_fp32=norm", "precision.policy", "keeps norm in FP32 among bfloat16"),
    ],
)
def test_policies_unsupported_by_fsdp_are_refused(text: str, setting: str, message: str) -> None:
    def build(text: str, version: int) -> None:
        fsdp_plugin(policy(text), FullyShardedDataParallelPlugin(fsdp_version=version))
        module = nn.Sequential(OrderedDict(norm=nn.LayerNorm(2)))
        prepare_to_shard(module, policy(text), "cpu", mixed_dtypes=version == 2)

    for version in (1, 2):
        with pytest.raises(ConfigError, match=message) as caught:
            build(text, version)
        assert caught.value.setting == setting
        build("bf16-autocast,keep_fp32=norm", version)


def test_parameters_that_share_memory_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = nn.Parameter(module[0].weight.data)
    with pytest.raises(ConfigError, match=r"fsdp_plugin = .*'0\.weight' and '1\.weight'"):
        prepare_to_shard(module, policy("bf16"), "cpu", mixed_dtypes=True)


def test_batch_norms_among_16_bit_parameters_are_refused() -> None:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    with pytest.raises(ConfigError, match="keeps 1 in FP32"):
        prepare_to_shard(module(), policy("bf16"), "cpu", mixed_dtypes=True)
    for text in ("bf16,buffer=bf16", "bf16-autocast", "fp32"):
        prepare_to_shard(module(), policy(text), "cpu", mixed_dtypes=True)


def test_other_plugin_settings_are_kept() -> None:
    given = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=False, activation_checkpointing=True
    )
    plugin = fsdp_plugin(policy("bf16"), given)
    assert plugin is given
    assert (plugin.reshard_after_forward, plugin.activation_checkpointing) == (False, True)


@pytest.mark.parametrize("version", [1, 2])
def test_conflicting_plugin_precision_is_refused(version: int) -> None:
    # The default of accelerate: everything in 16 bits.
    given = FullyShardedDataParallelPlugin(fsdp_version=version, mixed_precision_policy="bf16")
    with pytest.raises(ConfigError, match="remove it") as caught:
        fsdp_plugin(policy("bf16"), given)
    assert caught.value.setting == "fsdp_plugin.mixed_precision_policy"
    again = fsdp_plugin(policy("bf16"), FullyShardedDataParallelPlugin(fsdp_version=version))
    assert fsdp_plugin(policy("bf16"), again) is again


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16-autocast,output=bf16", "returns outputs in float32"),
        ("fp32,reduce=fp16,loss_scale=dynamic", "unscales gradients only for float16"),
        ("bf16-pure,stochastic_rounding=true", "remove it, and pass stochastic_rounding=True"),
    ],
)
def test_policies_without_accelerate_equivalent_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed_precision(policy(text))
