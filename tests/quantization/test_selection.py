"""Which linear layers of a model are low_precision."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.precision import policy
from distmp.quantization.selection import select


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 64)})
            for _ in range(blocks)
        )
        self.attention = nn.MultiheadAttention(32, 2)
        self.own = OwnForward(32, 32)
        self.router = nn.Linear(32, 8)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.embedding.weight
        self.lm_head = nn.Linear(32, 32)


BLOCKS = [f"blocks.{index}" for index in range(5)]


def selected(text: str, model: nn.Module | None = None, **changes: Any) -> Any:
    return select(model or Model(), policy(text), changes.get("blocks", BLOCKS))


def test_preset_keeps_heads_and_unsuitable_layers_full_precision() -> None:
    low_precision, wide = selected("fp8")
    assert list(low_precision) == [f"{block}.up" for block in BLOCKS]
    assert wide == {
        "attention.out_proj": "nn.MultiheadAttention, which uses its weights without calling it",
        "own": "a forward of its own (OwnForward)",
        "router": "its features, 32 -> 8, which are not multiples of 16",
        "tied": "hp=embedding",
        "lm_head": "hp=head",
    }


@pytest.mark.parametrize(
    ("pattern", "wide"),
    [
        ("first2", {0, 1}),
        ("last1", {4}),
        ("last15%", {4}),
        ("last21%", {3, 4}),
        ("first100%", {0, 1, 2, 3, 4}),
        ("blocks.3.*", {3}),
        ("blocks.1.up|blocks.2", {1, 2}),
        ("first1|last1", {0, 4}),
    ],
)
def test_patterns_select_blocks_and_names(pattern: str, wide: set[int]) -> None:
    low_precision = selected(f"fp8,hp={pattern}").low_precision
    assert {name for name in low_precision if name.startswith("blocks")} == {
        f"blocks.{index}.up" for index in range(5) if index not in wide
    }


def test_mxfp8_requires_whole_blocks() -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 32))
    assert list(selected("fp8", model).low_precision) == ["0", "1"]
    assert list(selected("mxfp8", model).low_precision) == ["1"]


def test_fp32_layers_use_full_precision_matmuls() -> None:
    wide = selected("fp8,keep_fp32=lm_head|blocks.0").high_precision
    assert wide["blocks.0.up"] == wide["lm_head"] == "keep_fp32"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fp8,hp=hed", "matches no module of the model"),
        ("fp8,hp=first9", "the model has 5 blocks"),
        ("fp8,hp=last0", "selects no block; use 1 or more"),
        ("fp8,hp=*", r"hp = '\*': keeps the whole model"),
        ("fp8,hp=blocks*|head|embedding", "gives no linear layer low-precision matmuls"),
        ("fp8,hp=Model", "hp = 'Model': keeps the whole model"),
    ],
)
def test_errors(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        selected(text)


def test_model_without_blocks_or_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="its blocks are unknown"):
        selected("fp8,hp=first1", nn.Sequential(nn.Linear(32, 32)), blocks=[])
    with pytest.raises(ConfigError, match=r"the model has no nn\.Linear"):
        selected("fp8", nn.Sequential(nn.LayerNorm(32)))
