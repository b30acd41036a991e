from __future__ import annotations

import pytest
import torch
from torch import nn

from distmp.commands.explain.observe import expected_groups, group_name
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.precision import policy

FP32, BF16 = torch.float32, torch.bfloat16


def model(*, tied: bool = False) -> Transformer:
    return Transformer(
        TransformerConfig(
            vocabulary_size=8,
            sequence_length=4,
            layers=3,
            dimension=8,
            heads=1,
            hidden=16,
            tied_head=tied,
        )
    )


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blocks.0.attention", "blocks.*.attention"),
        ("blocks.11.parts.2", "blocks.*.parts.*"),
        ("0.weight", "*.weight"),
        ("conv1.norm2d", "conv1.norm2d"),
        ("", ""),
    ],
)
def test_group_name_replaces_numbers(name: str, group: str) -> None:
    assert group_name(name) == group


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(tied: bool) -> None:
    full = model(tied=tied)
    groups = expected_groups(full, policy("bf16"), "ddp")
    assert sum(group.parameters for group in groups) == sum(p.numel() for p in full.parameters())
    counts = {group.name: len(group.modules) for group in groups}
    assert counts["blocks.*.attention.output"] == 3
    assert ("head" in counts) is not tied


def test_kept_modules_use_fp32_for_all_roles() -> None:
    groups = expected_groups(model(), policy("bf16,keep_fp32=norm|head,reduce=bf16"), "fsdp")
    for group in groups:
        kept = "norm" in group.name or group.name == "head"
        assert group.kept is kept
        assert group.computed == (FP32 if kept else BF16)
        assert group.reduced == (FP32 if kept else BF16)
        assert group.stored == FP32  # the optimizer steps the shards
    assert {group.stored for group in expected_groups(model(), policy("bf16"), "ddp")} == {BF16}


def test_autocast_selects_per_operation() -> None:
    groups = {
        group.name: group.computed
        for group in expected_groups(model(), policy("bf16-autocast"), "ddp")
    }
    assert groups["head"] == groups["blocks.*.feed_forward.down"] == BF16
    assert groups["embedding"] is groups["norm"] is None


def test_kept_module_is_separated_from_equal_ones() -> None:
    sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    groups = expected_groups(sequence, policy("bf16,keep_fp32=2"), "single")
    assert [(group.name, group.kept, group.modules) for group in groups] == [
        ("* [0]", False, ("0",)),
        ("* [2]", True, ("2",)),
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_kept_module_without_parameters_is_a_group(strategy: str) -> None:
    sequence = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1), nn.ReLU())
    groups = expected_groups(sequence, policy("bf16,keep_fp32=Softmax"), strategy)
    found = [(group.name, group.kept, group.parameters) for group in groups]
    assert found == [("* [0]", False, 6), ("* [1]", True, 0)]


def test_groups_are_split_by_matmul_format() -> None:
    sequence = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    groups = expected_groups(sequence, policy("nvfp4,hp=2"), "single")
    found = [(group.name, group.low_precision) for group in groups]
    assert found == [("* [0]", ("e2m1",)), ("* [2]", ())]
