"""The pages on precision policies agree with the code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from benchmarks.figures import ROOT
from distmp import Engine, PrecisionPolicy
from distmp.config import RunConfig
from distmp.errors import ConfigError
from distmp.precision import PRESETS, policy
from distmp.precision.keep import WORDS
from distmp.precision.policy import FIELDS
from distmp.utils.dtypes import dtype_name
from distmp.utils.settings import from_mapping
from tests.reference import make_engine, plain_sgd

PAGE = (ROOT / "docs" / "precision.md").read_text()
LOW_PRECISION = (ROOT / "docs" / "low-precision.md").read_text()


def rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines[2:]
    ]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_presets_table_agrees_with_code() -> None:
    table = {row[0].strip("`"): row[1:] for row in rows("Presets")}
    assert list(table) == [
        name for name, preset in PRESETS.items() if not preset.has_low_precision_matmuls
    ]
    for name, (held, updated, computed, reduced, accumulated, scale, _) in table.items():
        preset = PRESETS[name]
        assert held == dtype_name(preset.module_dtype)
        assert updated == ("FP32 master weights" if preset.has_masters else "the parameters")
        assert computed.startswith(dtype_name(preset.compute_dtype))
        assert ("per operation" in computed) == preset.autocast
        assert ("TF32" in computed) == preset.tf32
        assert reduced == dtype_name(preset.reduce_dtype)
        assert accumulated == dtype_name(preset.accumulate_dtype)
        number = preset.loss_scale if isinstance(preset.loss_scale, float) else 0
        assert scale == (f"fixed at {number:g}" if number else preset.loss_scale or "none")


def test_low_precision_presets_table_agrees_with_code() -> None:
    table = {row[0].strip("`"): row[1:-1] for row in rows("Presets", LOW_PRECISION)}
    assert table == {
        name: [
            *(preset.forward_format, preset.grad_format, preset.wgrad_format, preset.scaling),
            ", ".join(preset.hp),
        ]
        for name, preset in PRESETS.items()
        if preset.has_low_precision_matmuls
    }


def bytes_per_parameter(preset: PrecisionPolicy) -> float:
    """Train a step and count the memory that stays: parameters, buckets, masters and moments."""
    model = nn.Linear(512, 512, bias=False)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().sum(), 1

    engine = make_engine(model=model, loss=loss, policy=preset, attribution=False)
    engine.step([torch.ones(1, 512)])
    kept: list[Tensor] = [model.weight, *engine._setup.strategy.gradients()[0].tensors]
    for _, weight in engine._setup.strategy.optimizer_parameters():
        state: dict[str, Any] = engine.optimizer.state[weight]
        kept += [weight, state["exp_avg"], state["exp_avg_sq"]]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    return sum(storage.nbytes() for storage in memory.values()) / model.weight.numel()


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_per_parameter_agree_with_page(name: str) -> None:
    every = [*rows("Presets"), *rows("Presets", LOW_PRECISION)]
    (told,) = [float(row[-1]) for row in every if row[0] == f"`{name}`"]
    preset = PRESETS[name]
    # The model of one layer has neither a head nor blocks.
    preset = replace(preset, hp=()) if preset.has_low_precision_matmuls else preset
    assert bytes_per_parameter(preset) == pytest.approx(told, rel=0.01)


def test_policy_examples_load() -> None:
    for block in blocks("yaml"):
        from_mapping(RunConfig, yaml.safe_load(block))
    for text in re.findall(r'--precision.policy "(.*?)"|`policy: (.*?)`', PAGE):
        if "auto" not in text:
            policy("".join(text))


def test_page_names_every_key_and_word() -> None:
    named = [row[0] for row in (*rows("Change a policy"), *rows("Keys", LOW_PRECISION))]
    assert sorted(key.strip("`") for key in named) == sorted(FIELDS.keys() - {"name"})
    section = PAGE.partition("## Modules kept in FP32")[2]
    assert all(f"`{word}`" in section for word in WORDS)


def test_functions_for_other_tools_exist() -> None:
    import distmp.precision.builders as builders
    import distmp.precision.keep as switches

    named = re.findall(r"`(?:with )?(\w+)\((?:module, )?policy", PAGE)
    assert len(named) >= 5
    assert all(hasattr(builders, name) or hasattr(switches, name) for name in named)


def test_tied_head_behaves_as_on_page() -> None:
    """The default model's tied head is no module; there is a message, and a way to have one."""
    from distmp.models.transformer import Transformer, TransformerConfig

    sizes = {"vocabulary_size": 8, "sequence_length": 4, "layers": 1, "dimension": 8}
    for tied in (True, False):
        model = Transformer(TransformerConfig(**sizes, heads=1, hidden=8, tied_head=tied))
        own = policy("bf16,keep_fp32=head")

        def build(model: nn.Module = model, own: PrecisionPolicy = own) -> Engine:
            return make_engine(model=model, optimizer=plain_sgd, policy=own)

        if tied:
            with pytest.raises(ConfigError, match="'head': matches no module of the model"):
                build()
        else:
            assert build().module.head.weight.dtype == torch.float32
