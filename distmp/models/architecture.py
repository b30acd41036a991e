"""Describes how to rebuild a model, in a config.json next to its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from distmp.errors import ConfigError, require
from distmp.models import huggingface
from distmp.models.huggingface_files import CONFIG_FILE
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.utils.imports import load_callable

# The `model_type` of distmp's transformer; all others belong to Hugging Face transformers.
TRANSFORMER = "distmp-transformer"


def described(model: nn.Module) -> dict[str, Any] | None:
    """Return the content of config.json for models that have one which JSON can represent."""
    if isinstance(model, Transformer):
        return {"model_type": TRANSFORMER, **asdict(model.config)}
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        with suppress(TypeError):  # a value of the user's in the configuration
            return huggingface.configuration(model)
    return None


def read(directory: str | Path) -> dict[str, Any]:
    """Return the description in a directory; it contains `model_type`.

    Raises:
        ConfigError: If there is no config.json, or it is not such a description.
    """
    file = Path(directory) / CONFIG_FILE
    try:
        described = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("directory", str(directory), f"{file} cannot be read: {error}") from None
    if not isinstance(described, dict) or "model_type" not in described:
        raise ConfigError("directory", str(directory), f"{file} has no 'model_type'")
    return described


def rebuild(directory: str | Path) -> nn.Module:
    """Build distmp's transformer from config.json in a directory, with random weights.

    Runs no code from the directory, and none that config.json names. So it does not build models by
    import path; transformers builds its own models.

    Raises:
        ConfigError: If there is no config.json, or it describes another kind of model.
    """
    described = read(directory)
    kind = described.pop("model_type")
    problem = f"has a model of type {kind!r}; only {TRANSFORMER!r} can be built from config.json"
    require(kind == TRANSFORMER, "directory", str(directory), problem)
    try:
        return Transformer(TransformerConfig(**described))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("directory", str(directory), f"cannot be built: {error}") from None


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
        hint = "set it: the data does not define the number of token ids"
        raise ConfigError("model.options.vocabulary_size", None, hint)
    transformer = config.transformer(vocabulary, sequence_length)
    samples = f"samples have data.sequence_length = {sequence_length} tokens"
    for name, needed, what in (
        ("vocabulary_size", vocabulary_size or 0, f"the data has {vocabulary_size} token ids"),
        ("sequence_length", sequence_length, samples),
    ):
        value = getattr(transformer, name)
        problem = f"{what}; set at least that, or leave it out"
        require(value >= needed, f"model.options.{name}", value, problem)
    return transformer


def _build_from_callable(config: ModelConfig) -> nn.Module:
    model = config.function()(**config.options)
    problem = f"returned a {type(model).__name__}; return a torch.nn.Module"
    require(isinstance(model, nn.Module), "model.name", config.name, problem)
    return model
