"""Reads and writes models of Hugging Face transformers in directories: `model.name: hf:DIRECTORY`.

Nothing is downloaded, and no code from a directory is run: weights are read only from safetensors,
and `trust_remote_code` is always false.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distmp.errors import ConfigError, listed, nearest, require
from distmp.models.huggingface_files import CONFIG_FILE, locate
from distmp.models.linear_cross_entropy import LossHead
from distmp.models.loss import arguments_of
from distmp.models.settings import ModelConfig
from distmp.utils.processes import is_out_of_memory

logger = logging.getLogger("distmp")

ADAPTER_CONFIG = "adapter_config.json"
# Buffers that files of earlier versions of transformers have, and models compute.
_COMPUTED_BUFFERS = (r"inv_freq$", r"(^|\.)position_ids$")


def build(
    name: str, options: Mapping[str, Any], vocabulary_size: int | None, sequence_length: int
) -> nn.Module:
    """Build a causal language model, on torch's default device, with random FP32 parameters.

    Args:
        name: `hf:DIRECTORY` or `hf:FILE.json`.
        options: Values that replace those in the configuration file.
        vocabulary_size: Number of token ids in the data; None if it is unknown.
        sequence_length: Length of the data's samples, in tokens.

    Raises:
        ConfigError: If transformers cannot build it, or the model is too small for the data.
    """
    path = locate(name)
    with _quiet(), _refusals(name):
        config = _read_config(path, options)
        _check_size(name, config, vocabulary_size, sequence_length)
        model = _auto_model().from_config(config, trust_remote_code=False, dtype=torch.float32)
        return _prepared(model)


def weights_directory(name: str) -> Path | None:
    """Return the directory of the weights of a model; None for a model with random weights.

    Raises:
        ConfigError: If the weights are not safetensors.
    """
    path = locate(name)
    error = partial(ConfigError, "model.name", name)
    if path.suffix == ".json":
        return None
    if (path / ADAPTER_CONFIG).exists():
        raise error(
            "has adapters of peft, which are not loaded; merge them into the model (peft's "
            "merge_and_unload) and name the directory of the result"
        )
    # An index without its files is an error, not a model with random weights.
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return path
    if pickles := sorted(file.name for file in path.glob("*.bin")):
        raise error(
            f"has its weights in {pickles[0]}, which can run code when it is read; convert them to "
            f"safetensors, or name {path / CONFIG_FILE} for random weights"
        )
    return None


def load(config: ModelConfig) -> tuple[nn.Module, list[str]]:
    """Build the full model, and load the weights in its directory with transformers.

    Returns:
        The model, and the names of weights that it does not have.

    Raises:
        ConfigError: If transformers cannot load it, or weights do not fit.
    """
    path = locate(config.name)
    with _quiet(), _refusals(config.name):
        model, report = _auto_model().from_pretrained(
            str(path),
            config=_read_config(path, config.options),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
        )
        # transformers fills these with random values.
        _refuse(config, report["missing_keys"], "of the model are not in the directory")
        other = [name for name, *_ in report["mismatched_keys"]]
        _refuse(config, other, "of the directory have other shapes than in the model")
        return _prepared(model), [*map(str, report["unexpected_keys"])]


def refuse_unused(model: nn.Module, unknown: Sequence[str], config: ModelConfig) -> None:
    """Refuse weights in the directory of a model that the model does not have.

    Args:
        model: The model.
        unknown: Names in the directory that are not in its `state_dict`.
        config: Section `model`.

    Raises:
        ConfigError: With their names.
    """
    ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),)
    pattern = re.compile("|".join((*ignored, *_COMPUTED_BUFFERS)))
    unused = [key for key in unknown if not pattern.search(key)]
    _refuse(config, unused, "of the directory are not in the model")


def _refuse(config: ModelConfig, names: Sequence[str], problem: str) -> None:
    """Refuse weights that `model.unmatched_weights` does not allow."""
    patterns = config.unmatched_weights
    refused = sorted(n for n in names if not any(fnmatchcase(n, each) for each in patterns))
    if not refused:
        return
    cause = f"model.options = {dict(config.options)}" if config.options else f"its {CONFIG_FILE}"
    raise ConfigError(
        "model.name",
        config.name,
        f"weights {problem}: {listed(refused)}; correct {cause}, or allow it with "
        f"model.unmatched_weights, patterns of names such as {refused[0].rpartition('.')[0]}.*",
    )


def _prepared(model: nn.Module) -> nn.Module:
    if "use_cache" in arguments_of(model):
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    return model.train()


def prepare_loss(model: nn.Module) -> bool:
    """Let a model compute the next-token loss without a tensor of all logits.

    The model's call then takes `targets`, and the `logits` of its output are the loss sum, see
    `LossHead`.

    Args:
        model: A model from `build` or `load`.

    Returns:
        False, and the model is unchanged, if its last layer is not a plain linear layer without
        bias, or the model changes the logits, for example by a soft cap.

    Raises:
        ConfigError: If transformers would add a load-balancing loss.
    """
    balances = getattr(model.config.get_text_config(), "output_router_logits", False)  # type: ignore[union-attr,operator]
    problem = (
        "adds a load-balancing loss in transformers, which the loss next_token leaves out; set "
        "model.options: {output_router_logits: false}, or model.loss to a function that adds it"
    )
    require(not balances, "model.options.output_router_logits", balances, problem)
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or head.bias is not None or not _returns_output(model, head):
        return False
    head.__class__ = LossHead
    model.get_input_embeddings().own_group = True
    model.register_forward_pre_hook(_set_targets, with_kwargs=True)
    model.takes_targets = True
    return True


def _returns_output(model: nn.Module, head: nn.Module) -> bool:
    """Return whether the logits of a model are the unchanged output of its last layer."""
    outputs: list[Tensor] = []
    handle = head.register_forward_hook(lambda _, args, output: outputs.append(output))
    on_meta = {
        name: tensor.detach().to("meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    try:
        with torch.no_grad(), _quiet():
            tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
            # With a cache, models skip the search for packed sequences, which reads values.
            cache = {"use_cache": True} if "use_cache" in arguments_of(model) else {}
            result = torch.func.functional_call(model, on_meta, (tokens,), cache)
    except Exception as error:  # noqa: BLE001  (models run any code)
        logger.info("%s does not run on the meta device: %s", type(model).__name__, error)
        return False
    finally:
        handle.remove()
    return len(outputs) == 1 and result.logits is outputs[0]


def _set_targets(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # Set in every call, so that a call without targets returns logits. Kept until the next one,
    # because activation checkpointing calls the layer again.
    targets = kwargs.pop("targets", None)
    model.get_output_embeddings().targets = targets  # type: ignore[operator]
    return args, kwargs


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the content of config.json of a model of transformers."""
    values: dict[str, Any] = json.loads(model.config.to_json_string())  # type: ignore[union-attr,operator]
    # FSDP gives a model a class of its own.
    return values | {"architectures": [type(model).__name__.removeprefix("FSDP")]}


def _read_config(path: Path, options: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    local = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(str(path), **local)
    values, _ = config.get_config_dict(str(path), **local)
    for option in options.keys() - values.keys():
        known = [key for key in config.to_dict() if not key.startswith("_")]
        problem = f"{type(config).__name__} has no such value; {nearest(option, known)}"
        # attn_implementation and its like are private attributes.
        valid = hasattr(config, option) or hasattr(config, f"_{option}")
        require(valid, f"model.options.{option}", options[option], problem)
    # Not by `from_pretrained`, which sets options on the finished configuration: values that it
    # derives from others, such as head_dim, would stay those of the file.
    names = {"rope_scaling": "rope_parameters"} if hasattr(config, "rope_parameters") else {}
    names |= config.attribute_map
    stored, own = (
        {names.get(key, key): value for key, value in each.items()} for each in (values, options)
    )
    return type(config).from_dict(_merged(stored, own))


def _merged(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values in nested dictionaries."""
    both = values.keys() & options.keys()
    nested = [k for k in both if isinstance(values[k], dict) and isinstance(options[k], dict)]
    return {**values, **options, **{key: _merged(values[key], options[key]) for key in nested}}


def _check_size(name: str, config: Any, vocabulary_size: int | None, sequence_length: int) -> None:
    text = config.get_text_config()
    limits = {
        "vocab_size": (vocabulary_size or 0, "token ids in the data"),
        "max_position_embeddings": (sequence_length, "tokens in a sample (data.sequence_length)"),
    }
    for key, (needed, what) in limits.items():
        value = getattr(text, key, None)
        problem = (
            f"has {key} = {value} for {needed} {what}; change the data, or set model.options: "
            f"{{{key}: {needed}}} for a model with random weights"
        )
        require(not isinstance(value, int) or value >= needed, "model.name", name, problem)


def _auto_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn errors of transformers, which are of any type, into one of `model.name`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or is_out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError("model.name", name, f"refused by transformers: {first_line}") from error


def _without_cache(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Disable the cache of keys and values, which training never reads."""
    return args, {"use_cache": False, **kwargs}


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars and reports of transformers, which every rank would print."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
