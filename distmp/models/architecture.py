"""What says how to build a model again, beside its weights (config.json)."""

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
# `model_type` says whose a configuration is; all others are of Hugging Face transformers.
TRANSFORMER = "distmp-transformer"
IMPORT_PATH = "distmp-import-path"


def architecture(model: nn.Module, config: ModelConfig) -> dict[str, Any]:
    """Describe a model that `build_model` has built, as JSON can hold it."""
    if config.is_import_path:
        return {"model_type": IMPORT_PATH, "name": config.name, "options": config.options}
    if config.is_hugging_face:
        return huggingface.configuration(model)
    dimensions: Any = model.config
    return {"model_type": TRANSFORMER, **asdict(dimensions)}


def is_hugging_face(described: Mapping[str, Any]) -> bool:
    """Whether a description is a configuration of Hugging Face transformers."""
    return described.get("model_type") not in (TRANSFORMER, IMPORT_PATH)


def read(folder: str | Path) -> dict[str, Any]:
    """Return the description in a folder; `model_type` is among it.

    Raises:
        ConfigError: If there is no config.json, or it is no such description.
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
    """Build distmp's transformer as config.json in a folder describes it, with random weights.

    No code out of the folder is run, and none that it names: a model by import path is built by
    whoever trusts it, one of Hugging Face by transformers.

    Raises:
        ConfigError: If there is no config.json, or it is of something else.
    """
    described = read(folder)
    kind = described.pop("model_type")
    if kind != TRANSFORMER:
        raise ConfigError(
            "folder",
            str(folder),
            f"is a model of type {kind!r}; only {TRANSFORMER!r} can be built from its config.json",
        )
    try:
        return Transformer(TransformerConfig(**described))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("folder", str(folder), f"cannot be built: {error}") from None
