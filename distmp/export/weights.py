"""Loads a folder of safetensors into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from distmp.errors import ConfigError, listed
from distmp.models.architecture import CONFIG_FILE, TRANSFORMER, read, rebuild
from distmp.models.transformer import Transformer

SETTING = "model.weights"


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Load the weights in a folder of safetensors, or in one such file, into a model.

    Values are converted to the dtypes of the model's tensors. A tied weight may be stored under any
    of its names.

    Args:
        model: All its parameters and persistent buffers are overwritten.
        folder: A folder from `distmp export` or another program, with the names of the model's
            `state_dict`; or a file.

    Raises:
        ConfigError: If the weights do not fit; one message lists all misfits, and the model is
            unchanged.
    """
    files = _files(Path(folder))
    try:
        _fill(model, folder, files)
    except (OSError, SafetensorError) as error:
        raise ConfigError(SETTING, str(folder), f"cannot be read: {error}") from error


def load_model(folder: str | Path) -> nn.Module:
    """Return distmp's transformer from an exported folder, in FP32 on the CPU.

    Raises:
        ConfigError: If the folder has another kind of model, or its weights do not fit.
    """
    model = rebuild(folder)
    load_weights(model, folder)
    return model


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        problem = "has no *.safetensors" if path.is_dir() else "does not exist"
        raise ConfigError(SETTING, str(path), f"{path.absolute()} {problem}")
    return files


def _fill(model: nn.Module, folder: str | Path, files: list[Path]) -> None:
    state = model.state_dict(keep_vars=True)
    stored: dict[str, Any] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        stored.update((name, opened) for name in opened.keys())  # noqa: SIM118 - no dictionary
    problems = [*_misfits(state, stored), *_other_dimensions(model, Path(folder))]
    if problems:
        raise ConfigError(SETTING, str(folder), f"does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, opened in stored.items():
            state[name].copy_(opened.get_tensor(name))


def _misfits(state: Mapping[str, Tensor], stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each kind of misfit."""
    # By identity: a tied weight has several names and needs one of them.
    filled = {id(state[name]) for name in stored if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    unknown = [name for name in stored if name not in state]
    shapes = []
    for name, opened in stored.items():
        if name in state:
            shape = opened.get_slice(name).get_shape()
            if shape != [*state[name].shape]:
                shapes.append(f"{name} {shape} for {[*state[name].shape]}")
    for problem, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes)):
        if names:
            yield f"{problem}: {listed(names)}"


def _other_dimensions(model: nn.Module, folder: Path) -> Iterator[str]:
    """Yield dimensions that differ but do not change shapes, such as the number of heads."""
    if not isinstance(model, Transformer) or not (folder / CONFIG_FILE).is_file():
        return
    described, own = read(folder), asdict(model.config)
    if described.pop("model_type") == TRANSFORMER:
        for name, value in described.items():
            # The weights do not depend on the longest sequence.
            if name != "sequence_length" and own.get(name, value) != value:
                yield f"{name} = {value} for {own[name]}"
