"""Weights from others: a folder of safetensors into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from distmp.errors import ConfigError
from distmp.models.architecture import CONFIG_FILE, TRANSFORMER, read, rebuild
from distmp.models.transformer import Transformer

# How many names of a kind an error lists.
LISTED = 5
SETTING = "model.weights"


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill a model with the weights in a folder of safetensors, or in one such file.

    Values are converted to the types of the model's tensors. A tied weight may be there under any
    of its names.

    Args:
        model: All its parameters and persistent buffers are overwritten.
        folder: As `distmp export` or anybody else has left it; names are those of the model's
            `state_dict`.

    Raises:
        ConfigError: One message with everything that does not fit. The model is as it was then.
    """
    files = _files(Path(folder))
    try:
        _fill(model, folder, files)
    except (OSError, SafetensorError) as error:
        raise ConfigError(SETTING, str(folder), f"cannot be read: {error}") from error


def load_model(folder: str | Path) -> nn.Module:
    """Return distmp's transformer as an exported folder has it, in FP32 on the CPU.

    Raises:
        ConfigError: If the folder has no such model, or its weights do not fit.
    """
    model = rebuild(folder)
    load_weights(model, folder)
    return model


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        problem = "has no *.safetensors" if path.is_dir() else "does not exist"
        raise ConfigError(SETTING, str(path), f"{path.absolute()} {problem}")
    return found


def _fill(model: nn.Module, folder: str | Path, files: list[Path]) -> None:
    wanted = model.state_dict(keep_vars=True)
    places: dict[str, Any] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        places.update((name, opened) for name in opened.keys())  # noqa: SIM118 - no dictionary
    problems = [*_misfits(wanted, places), *_other_dimensions(model, Path(folder))]
    if problems:
        raise ConfigError(SETTING, str(folder), f"does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, opened in places.items():
            wanted[name].copy_(opened.get_tensor(name))


def _misfits(wanted: Mapping[str, Tensor], places: Mapping[str, Any]) -> Iterator[str]:
    """Give a phrase for each kind of misfit."""
    # By identity: a tied weight has several names and needs one of them.
    filled = {id(wanted[name]) for name in places if name in wanted}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in filled]
    unknown = [name for name in places if name not in wanted]
    shapes = []
    for name, opened in places.items():
        if name in wanted:
            found = opened.get_slice(name).get_shape()
            if found != [*wanted[name].shape]:
                shapes.append(f"{name} {found} for {[*wanted[name].shape]}")
    for problem, names in (("missing", missing), ("unknown", unknown), ("other shape", shapes)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            yield f"{problem}: {', '.join(islice(names, LISTED))}{more}"


def _other_dimensions(model: nn.Module, folder: Path) -> Iterator[str]:
    """Give what shapes do not show, such as the number of heads, where the folder tells it."""
    if not isinstance(model, Transformer) or not (folder / CONFIG_FILE).is_file():
        return
    described, own = read(folder), asdict(model.config)
    if described.pop("model_type") == TRANSFORMER:
        for name, value in described.items():
            # Nothing is learned of the longest sequence.
            if name != "sequence_length" and own.get(name, value) != value:
                yield f"{name} = {value} for {own[name]}"
