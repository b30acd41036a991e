"""Distmp's transformer and transformers' Llama and Qwen3: the same logits, in both directions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distmp import cli
from distmp.checkpoint import store
from distmp.errors import ConfigError
from distmp.export.files import write
from distmp.export.weights import load_weights
from distmp.models import llama
from distmp.models.architecture import TRANSFORMER, architecture
from distmp.models.settings import ModelConfig
from distmp.models.transformer import Transformer, TransformerConfig
from tests.reference import assert_same_bits

transformers = pytest.importorskip("transformers")
AUTO = transformers.AutoModelForCausalLM

PLAIN = TransformerConfig(61, 64, 2, 32, 4, 24)
CASES = {
    "plain": PLAIN,
    "grouped": TransformerConfig(61, 64, 2, 32, 4, 24, tied_head=False, key_value_heads=2),
    "one group": TransformerConfig(61, 64, 2, 32, 4, 24, key_value_heads=1, norm_epsilon=1e-3),
    "base": TransformerConfig(61, 64, 2, 32, 4, 24, rotary_base=500.0),
    "qwen3": TransformerConfig(61, 64, 2, 32, 4, 24, key_value_heads=2, qk_norm=True),
}


def spread(model: Transformer) -> Transformer:
    """Make logits depend on every weight: larger ones, and norms that are not one."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else parameter * 8)
    return model


def tokens() -> Tensor:
    return torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))


def exported(directory: Path, model: Transformer) -> Path:
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    path = store.save(
        directory / "run", 1, tensors, {"model": architecture(model, ModelConfig())}, keep=1
    )
    options = [f"--to={directory / 'llama'}", "--format=transformers"]
    with mock.patch("distmp.export.export.write", partial(write, max_shard_size=10_000)):
        assert cli.main(["export", str(path), *options]) == 0
    return directory / "llama"


@pytest.mark.parametrize("case", CASES)
def test_an_exported_transformer_has_the_same_logits_in_transformers(
    case: str, tmp_path: Path
) -> None:
    model = spread(Transformer(CASES[case]))
    directory = exported(tmp_path, model)
    assert len(list(directory.glob("*.safetensors"))) > 1
    theirs, report = AUTO.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(theirs).__name__ == f"{'Qwen3' if case == 'qwen3' else 'Llama'}ForCausalLM"
    found, expected = theirs(tokens()).logits, model(tokens())
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_weights_of_transformers_load_into_the_transformer(case: str, tmp_path: Path) -> None:
    described = llama.describe(CASES[case], "float32")
    torch.manual_seed(5)
    theirs = AUTO.from_config(transformers.AutoConfig.for_model(**described))
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    model = Transformer(CASES[case])
    load_weights(model, tmp_path)
    found, expected = model(tokens()), theirs(tokens()).logits
    assert (found - expected).abs().max() < 1e-5 + 1e-4 * expected.abs().max()


def test_a_part_of_a_matrix_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = exported(tmp_path, Transformer(PLAIN))
    weights = {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    del weights["model.layers.1.self_attn.k_proj.weight"]
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load_weights(Transformer(PLAIN), directory)


def test_both_ways_keep_the_bits(tmp_path: Path) -> None:
    model = spread(Transformer(CASES["grouped"]))
    again = Transformer(CASES["grouped"])
    load_weights(again, exported(tmp_path, model))
    assert_same_bits(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = gelu for silu"),
        ({"num_attention_heads": 2}, "num_attention_heads = 2 for 4"),
        ({"rope_theta": 7.0}, r"rope_theta = 7\.0 for 10000\.0"),
        ({"attention_bias": True}, "attention_bias = True for False"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_a_configuration_that_differs_is_refused(changed: dict[str, Any], message: str) -> None:
    described = llama.describe(PLAIN, "float32")
    llama.check_same(described, PLAIN, "directory")
    llama.check_same({**described, "max_position_embeddings": 7}, PLAIN, "directory")
    with pytest.raises(ConfigError, match=message):
        llama.check_same({**described, **changed}, PLAIN, "directory")


def test_a_configuration_may_lack_what_has_a_default() -> None:
    """Older ones of transformers do."""
    described = llama.describe(PLAIN, "float32")
    for key in ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_scaling"):
        del described[key]
    llama.check_same(described, PLAIN, "directory")
    with pytest.raises(ConfigError, match="num_key_value_heads = 4 for 2"):
        llama.check_same(described, CASES["grouped"], "directory")


def test_a_description_with_everything_can_be_rebuilt() -> None:
    for config in CASES.values():
        described = architecture(Transformer(config), ModelConfig())
        assert described.pop("model_type") == TRANSFORMER
        assert TransformerConfig(**described) == config


def test_settings_that_do_not_fit_are_one_message() -> None:
    message = r"^model\.options\.key_value_heads = 3: does not divide model\.options\.heads = 5"
    with pytest.raises(ConfigError, match=message):
        ModelConfig(options={"key_value_heads": 3})
    other = ModelConfig(size="8b", options={"heads": 64}).transformer(10, 10)
    assert other.key_value_heads is None
    assert ModelConfig(size="8b").transformer(10, 10).key_value_heads == 8
