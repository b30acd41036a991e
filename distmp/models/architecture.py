"""Describes how to rebuild a model, in a config.json next to its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from distmp.errors import ConfigError
from distmp.models import huggingface
from distmp.models.settings import ModelConfig
from distmp.models.transformer import Transformer, TransformerConfig

CONFIG_FILE = "config.json"
# Values of `model_type` for distmp's models; all others belong to Hugging Face transformers.
TRANSFORMER = "distmp-transformer"
IMPORT_PATH = "distmp-import-path"


def architecture(model: nn.Module, config: ModelConfig) -> dict[str, Any]:
    """Return the description of a model from `build_model`, as values that JSON can represent."""
    if config.is_import_path:
        return {"model_type": IMPORT_PATH, "name": config.name, "options": config.options}
    if config.is_hugging_face:
        return huggingface.configuration(model)
    dimensions: Any = model.config
    return {"model_type": TRANSFORMER, **asdict(dimensions)}


def is_hugging_face(described: Mapping[str, Any]) -> bool:
    """Return whether a description is a configuration of Hugging Face transformers."""
    return described.get("model_type") not in (TRANSFORMER, IMPORT_PATH)


def read(folder: str | Path) -> dict[str, Any]:
    """Return the description in a folder; it contains `model_type`.

    Raises:
        ConfigError: If there is no config.json, or it is not such a description.
    """
    file = Path(folder) / CONFIG_FILE
    try:
        described = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("folder", str(folder), f"{file} cannot be read: {error}") from None
    if not isinstance(described, dict) or "model_type" not in described:
        raise ConfigError("folder", str(folder), f"{file} has no 'model_type'")
    return described


def rebuild(folder: str | Path) -> nn.Module:
    """Build distmp's transformer from config.json in a folder, with random weights.

    Runs no code from the folder, and none that config.json names. So it does not build models by
    import path; transformers builds its own models.

    Raises:
        ConfigError: If there is no config.json, or it describes another kind of model.
    """
    described = read(folder)
    kind = described.pop("model_type")
    if kind != TRANSFORMER:
        raise ConfigError(
            "folder",
            str(folder),
            f"has a model of type {kind!r}; only {TRANSFORMER!r} can be built from config.json",
        )
    try:
        return Transformer(TransformerConfig(**described))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("folder", str(folder), f"cannot be built: {error}") from None
