"""Builds the model and the loss from settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.models import huggingface
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.utils.imports import load_callable

Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""loss(model, batch) -> (loss sum, weight), both 0-dim tensors."""


def build_model(
    config: ModelConfig, vocabulary_size: int | None, sequence_length: int
) -> nn.Module:
    """Build the model of a configuration, on torch's default device.

    Args:
        config: The settings.
        vocabulary_size: Number of token ids in the data; None if it is unknown.
        sequence_length: Length of the data's samples, in tokens.

    Raises:
        ConfigError: If the model is too small for the data, or a user's callable does not return a
            module.
    """
    if config.is_import_path:
        return _build_from_callable(config)
    if config.is_hugging_face:
        return huggingface.build(config.name, config.options, vocabulary_size, sequence_length)
    return Transformer(_transformer_config(config, vocabulary_size, sequence_length))


def build_loss(config: ModelConfig) -> Loss:
    """Return the loss function of a configuration.

    Raises:
        ConfigError: If an import path does not exist or its target is not callable.
    """
    if config.loss == "next_token":
        return next_token_loss
    return load_callable("model.loss", config.loss)


def _transformer_config(
    config: ModelConfig, vocabulary_size: int | None, sequence_length: int
) -> TransformerConfig:
    vocabulary = config.options.get("vocabulary_size", vocabulary_size)
    if vocabulary is None:
        raise ConfigError(
            "model.options.vocabulary_size",
            None,
            "set it: the data does not define the number of token ids",
        )
    if vocabulary_size is not None and vocabulary < vocabulary_size:
        raise ConfigError(
            "model.options.vocabulary_size",
            vocabulary,
            f"the data has {vocabulary_size} token ids; set at least that, or leave it out",
        )
    transformer = config.transformer(vocabulary, sequence_length)
    if transformer.sequence_length < sequence_length:
        raise ConfigError(
            "model.options.sequence_length",
            transformer.sequence_length,
            f"samples have data.sequence_length = {sequence_length} tokens; set at least that, or"
            " leave it out",
        )
    return transformer


def _build_from_callable(config: ModelConfig) -> nn.Module:
    model = config.function()(**config.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model.name",
            config.name,
            f"returned a {type(model).__name__}; return a torch.nn.Module",
        )
    return model
