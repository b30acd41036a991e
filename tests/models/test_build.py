from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.config import load
from distmp.errors import ConfigError
from distmp.models.architecture import build_loss, build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.models.transformer import Transformer, TransformerConfig

HERE = "tests.models.test_build"


def linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def number() -> int:
    return 3


def square_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros(()), torch.ones(())


def count(size: str) -> int:
    with torch.device("meta"):
        model = build_model(ModelConfig(size=size), 257, 256)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "low", "high"),
    [
        ("1m", 0.9e6, 1.2e6),
        ("22m", 21.7e6, 22.0e6),
        # The names include about 50,000 embeddings; here only the parameters of the blocks count.
        ("125m", 84e6, 87e6),
        ("350m", 300e6, 310e6),
        ("1.3b", 1.2e9, 1.3e9),
        # Llama 3 with its vocabulary of 128,256 has 3.2, 8.0 and 70.6 billion.
        ("3b", 2.8e9, 2.9e9),
        ("8b", 6.9e9, 7.1e9),
        ("70b", 68.4e9, 68.6e9),
    ],
)
def test_sizes_have_the_named_number_of_parameters(size: str, low: float, high: float) -> None:
    assert low < count(size) < high


def test_settings_configure_transformer() -> None:
    sizes = {"layers": 1, "heads": 2, "dimension": 8, "hidden": 12}
    config = ModelConfig(size="1m", options={**sizes, "tied_head": False})
    model = build_model(config, 99, 16)
    assert isinstance(model, Transformer)
    assert model.config == TransformerConfig(99, 16, 1, 8, 2, 12, tied_head=False)


def test_vocabulary_and_length_may_exceed_data() -> None:
    model = build_model(
        ModelConfig(options={"vocabulary_size": 320, "sequence_length": 512}), 257, 256
    )
    assert isinstance(model, Transformer)
    assert (model.config.vocabulary_size, model.config.sequence_length) == (320, 512)


@pytest.mark.parametrize(
    ("values", "vocabulary", "setting", "message"),
    [
        ({}, None, "model.options.vocabulary_size", "the data does not define"),
        ({"vocabulary_size": 256}, 257, "model.options.vocabulary_size", "the data has 257"),
        ({"sequence_length": 8}, 257, "model.options.sequence_length", "data.sequence_length = 16"),
    ],
)
def test_models_too_small_for_data_are_refused(
    values: dict[str, Any], vocabulary: int | None, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(ModelConfig(options=values), vocabulary, 16)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("values", "setting", "message"),
    [
        ({"name": "transformr"}, "model.name", "write 'transformer', 'hf:DIRECTORY' or"),
        ({"loss": "mse"}, "model.loss", "write 'next_token' or"),
        ({"size": "2m"}, "model.size", "did you mean '2?2m'"),
        (
            {"name": "m:f", "size": "22m"},
            "model.size",
            "is a size of the transformer, not of 'm:f'",
        ),
        ({"options": {"layers": 0}}, "model.options.layers", "must be from 1 to"),
        ({"options": {"vocabulary_size": 0}}, "model.options.vocabulary_size", "must be from 1 to"),
        ({"options": {"dimension": 128, "heads": 5}}, "model.options.heads", "does not divide"),
        ({"options": {"dimension": 12, "heads": 4}}, "model.options.heads", "heads of even width"),
        (
            {"options": {"tied_heads": 1}},
            "model.options.tied_heads",
            "did you mean 'model.options.tied_head'",
        ),
        ({"options": {"tied_head": "maybe"}}, "model.options.tied_head", "must be true or false"),
        ({"options": {"rotary_base": "many"}}, "model.options.rotary_base", "must be a number"),
        ({"options": {"rotary_base": 0}}, "model.options.rotary_base", "use a number from 1 to"),
        ({"options": {"rotary_base": -1}}, "model.options.rotary_base", "use a number from 1 to"),
        ({"options": {"rotary_base": inf}}, "model.options.rotary_base", "use a number from 1 to"),
        ({"options": {"rotary_base": nan}}, "model.options.rotary_base", "use a number from 1 to"),
        ({"options": {"norm_epsilon": -1}}, "model.options.norm_epsilon", "use a number from 0 to"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any], setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig(**values)
    assert caught.value.setting == setting


def test_callable_gets_its_options() -> None:
    model = build_model(ModelConfig(name=f"{HERE}:linear", options={"width": 7}), None, 16)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "returned a int; return a torch.nn.Module"),
        ("HERE", "is a str; name a function or a class"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_callable_of_wrong_kind_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(ModelConfig(name=f"{HERE}:{name}"), 257, 16)
    assert caught.value.setting == "model.name"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 7, "hieght": 7}, "got an unexpected keyword argument 'hieght'"),
        ({}, "missing a required argument: 'width'"),
    ],
)
def test_unknown_options_are_refused_before_ranks_start(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be called with model\.options") as caught:
        build_model(ModelConfig(name=f"{HERE}:linear", options=options), 257, 16)
    assert f"model.name = '{HERE}:linear': " in str(caught.value)
    assert f"({message}" in str(caught.value)
    if options:
        with pytest.raises(ConfigError) as at_the_start:
            load([f"--model.name={HERE}:linear", "--model.options", str(options)])
        assert str(at_the_start.value) == str(caught.value)


def test_loss_is_built_from_import_path() -> None:
    assert build_loss(ModelConfig()) is next_token_loss
    assert build_loss(ModelConfig(loss=f"{HERE}:square_loss")) is square_loss
    with pytest.raises(ConfigError, match="is a str") as caught:
        build_loss(ModelConfig(loss=f"{HERE}:HERE"))
    assert caught.value.setting == "model.loss"
