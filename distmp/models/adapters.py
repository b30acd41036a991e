"""Adds adapters of peft to a model (setting `model.peft`): low-rank updates of linear layers.

The model keeps its class. peft replaces each selected layer by one that holds it, so
`q_proj.weight` becomes `q_proj.base_layer.weight`, and peft adds `q_proj.lora_A.default.weight` and
`q_proj.lora_B.default.weight`, which are trained. All other parameters are frozen.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from distmp.errors import ConfigError, listed, nearest, require
from distmp.precision.keep import parameters_in_fp32
from distmp.precision.policy import PrecisionPolicy
from distmp.utils.deferred import record_more
from distmp.utils.imports import require_package
from distmp.utils.tensor_trees import tied_parameters

SETTING = "model.peft"
# peft's name for the only adapter of a model.
_ADAPTER = "default"
_MARKS = (".lora_A.", ".lora_B.")


# The settings of peft's `LoraConfig` that `model.peft` may set. Biases are not trained.
# Initializations that read the weights of the model are not supported: weights are loaded after the
# adapters are created.
KNOWN = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "init_lora_weights",
)


def check_settings(values: Mapping[str, Any]) -> None:
    """Check the settings of `model.peft`; peft checks their values.

    Raises:
        ConfigError: If peft is not installed, or a setting is unknown.
    """
    require_package(SETTING, dict(values), "peft", "hf")
    for name, value in values.items():
        require(name in KNOWN, f"{SETTING}.{name}", value, nearest(str(name), KNOWN))
    initialization = values.get("init_lora_weights", True)
    valid = initialization is True or initialization == "gaussian"
    require(valid, f"{SETTING}.init_lora_weights", initialization, "use true or 'gaussian'")
    # peft accepts values under which adapters train nothing.
    pattern = values.get("alpha_pattern")
    patterns = pattern.values() if isinstance(pattern, Mapping) else ()
    for alpha in (values.get("lora_alpha", 1), *patterns):
        valid = not isinstance(alpha, int | float) or 0 < alpha < math.inf
        require(valid, f"{SETTING}.lora_alpha", alpha, "use a finite number above 0")
    dropout = values.get("lora_dropout", 0)
    valid = not isinstance(dropout, int | float) or 0 <= dropout < 1
    require(valid, f"{SETTING}.lora_dropout", dropout, "use 0 or more, and less than 1")


def add_adapters(model: nn.Module, values: Mapping[str, Any], seed: int) -> None:
    """Freeze a model and add adapters to it, in place.

    Args:
        model: The model. Its parameters may be on the meta device (`build_deferred`); then those of
            the adapters are, too.
        values: The setting `model.peft`.
        seed: Seed of the adapters' initial values.

    Raises:
        ConfigError: If peft refuses the settings, or selects no layer or one that is not a plain
            linear layer.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    check_settings(values)
    is_hugging_face = hasattr(getattr(model, "config", None), "model_type")
    forwards = {name: type(part).forward for name, part in model.named_modules()}
    tied = tied_parameters(model)
    if any(_layers(model)):
        raise ConfigError(SETTING, dict(values), "the model has adapters already; remove either")
    valid = is_hugging_face or values.get("target_modules") is not None
    hint = f"name layers to adapt; {_linear_layers(forwards)}"
    require(valid, f"{SETTING}.target_modules", None, hint)
    in_layers = _in_layers(values, model, forwards)
    try:
        config = peft.LoraConfig(task_type="CAUSAL_LM" if is_hugging_face else None, **in_layers)
        # Adapters are created on the meta device; `_create` gives them memory. peft would move them
        # to the device of the layer, which torch refuses for fake tensors.
        move = mock.patch.object(LoraLayer, "_move_adapter_to_device_of_base_layer")
        with warnings.catch_warnings(record=True) as caught, torch.device("meta"), move:
            peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError, KeyError, re.error) as error:
        first_line = str(error).strip().partition("\n")[0]
        problem = f"refused by peft: {first_line}; {_linear_layers(forwards)}"
        raise ConfigError(SETTING, dict(values), problem) from error
    _check_selection(model, values, forwards)
    for warning in caught:
        # A setting selects nothing.
        if re.search("ignored|no modules were excluded", str(warning.message)):
            raise ConfigError(SETTING, dict(values), f"refused: {warning.message}")
    _check_layers(model, values, forwards, tied)
    model.requires_grad_(False)
    record_more(
        model, lambda: _create(model, values.get("init_lora_weights", True)), seed, stored_name
    )


def _in_layers(
    values: Mapping[str, Any], model: nn.Module, forwards: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Replace `layers_to_transform` by a regular expression.

    The index of a layer is the first number in its name. peft searches behind the first dot, so it
    does not find `blocks.0`, and takes the 1 of `blocks.0.experts.1`.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    kind = getattr(getattr(model, "config", None), "model_type", "")
    targets = values.get("target_modules") or DEFAULTS.get(kind)
    indices = values.get("layers_to_transform")
    if indices in (None, []) or not isinstance(targets, list | tuple | set):
        return values
    ends = "|".join(re.escape(str(each)) for each in targets)
    patterns = []
    for index in indices if isinstance(indices, list | tuple) else [indices]:
        patterns.append(rf"([^.\d][^.]*\.)*{index}\.(.*\.)?({ends})")
        found = any(re.fullmatch(patterns[-1], name) for name in forwards)
        problem = f"selects no layer; {_linear_layers(forwards)}"
        require(found, f"{SETTING}.layers_to_transform", index, problem)
    return {**values, "target_modules": "|".join(patterns), "layers_to_transform": None}


def _linear_layers(forwards: Mapping[str, Any]) -> str:
    linear = {name for name, forward in forwards.items() if forward is nn.Linear.forward}
    names = sorted({name.rpartition(".")[2] for name in linear})
    return f"the model has the linear layers {listed(names)}"


def _check_selection(
    model: nn.Module, values: Mapping[str, Any], forwards: Mapping[str, Any]
) -> None:
    """Refuse names that select nothing, which peft accepts if another one selects."""
    adapted = [name for name, _ in _layers(model)]
    choices = {"target_modules": adapted, "exclude_modules": [*forwards]}
    for setting, names in choices.items():
        value = values.get(setting)
        for entry in value if isinstance(value, list | tuple) else ():
            if not any(f".{name}".endswith(f".{entry}") for name in names):
                problem = f"selects no layer; {_linear_layers(forwards)}"
                raise ConfigError(f"{SETTING}.{setting}", entry, problem)


def _check_layers(
    model: nn.Module,
    values: Mapping[str, Any],
    forwards: Mapping[str, Any],
    tied: set[nn.Parameter],
) -> None:
    """Refuse layers whose update would be ignored, or could not be merged."""
    from peft.tuners.lora import Linear

    for name, layer in _layers(model):
        base = layer.get_base_layer()
        if type(layer) is not Linear:
            problem = f"is a {type(base).__name__}"
        elif isinstance(base, nn.Linear) and forwards.get(name) is not nn.Linear.forward:
            problem = f"computes more than a product ({type(base).__name__})"
        elif base.weight in tied:
            problem = "shares its weight with another layer, which would not get the update"
        else:
            continue
        raise ConfigError(
            SETTING,
            dict(values),
            f"{name} {problem}; leave it out of target_modules, which may name linear layers with "
            "a weight of their own",
        )


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, part in model.named_modules():
        if isinstance(part, LoraLayer):
            yield name, part


def _create(model: nn.Module, initialization: bool | str) -> None:
    """Allocate the adapters of a model in FP32, with peft's initial values."""
    for _, layer in _layers(model):
        for part in (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]):
            part.weight = nn.Parameter(torch.empty(part.weight.shape, dtype=torch.float32))
        layer.reset_lora_parameters(_ADAPTER, initialization)


def round_frozen(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Hold the frozen parameters of a model in the compute dtype, if the policy casts parameters.

    Strategies keep the dtype of frozen parameters, so no rank has FP32 copies of them. Modules that
    the policy keeps in FP32 stay in FP32.
    """
    if not policy.casts_parameters:
        return
    kept = parameters_in_fp32(model, policy)
    for parameter in model.parameters():
        frozen = not parameter.requires_grad and parameter.is_floating_point()
        if frozen and id(parameter) not in kept:
            parameter.data = parameter.data.to(policy.compute_dtype)


def is_adapter(name: str) -> bool:
    """Return whether a name in `state_dict` is that of an adapter's parameter."""
    return any(mark in f".{name}" for mark in _MARKS)


def stored_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(".base_layer.", ".").removeprefix("base_layer.")


def exported_name(name: str) -> str:
    """Return the name of an adapter's parameter in adapter_model.safetensors."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def describe(model: nn.Module, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json, as values that JSON can represent.

    Args:
        model: A model after `add_adapters`.
        base: Name of the model without adapters in it.
    """
    config: dict[str, Any] = model.peft_config[_ADAPTER].to_dict()  # type: ignore[index,union-attr]
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}
    return plain | {"base_model_name_or_path": base, "inference_mode": True}
