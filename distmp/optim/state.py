"""Saves and loads the state of any torch optimizer under the names of its parameters."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import CheckpointError, listed, require
from distmp.optim.adamw import AdamW
from distmp.optim.muon import Muon
from distmp.precision.policy import SIXTEEN_BIT
from distmp.scaling.local_gradients import parameters
from distmp.utils.flat_shard import FlatShard, global_shape

# The optimizers whose fused kernels DTensor can call (torch 2.13).
FUSED_WHEN_SHARDED = (torch.optim.Adam, torch.optim.AdamW, Muon)
# State that torch's optimizers keep as one number per parameter of any shape.
_COUNTS = ("step", "mu_product", "eta", "mu")
# The optimizers, subclasses included, whose kernels need this state in the dtype of the parameter.
_KERNELS = (*FUSED_WHEN_SHARDED, optim.SGD, optim.Adagrad, optim.Adamax, optim.NAdam, optim.RAdam)
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
# State that an option of torch's optimizers needs.
_OPTION_KEYS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
# Appended to the key of a number of Python.
_NUMBER = "#number"

logger = logging.getLogger("distmp")


def prepare_for_device_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer unscales and skips on the device, and prepare it for that.

    torch's fused optimizers do, with their attributes `grad_scale` and `found_inf`. For SGD, see
    `start_momentum`.

    If the fused kernel does not support the parameters, the optimizer is switched to another one:
    only that of Adam supports sharded parameters, and that of SGD on CPUs updates 16-bit parameters
    wrongly (torch 2.13: errors above the size of the update, and uninitialized momentum).

    Raises:
        ConfigError: For fused SGD with dampening, whose first update would differ.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and (kind := _unfit_for_fused(optimizer)):
        logger.info("%s of %s parameters is not fused", type(optimizer).__name__, kind)
        for group in optimizer.param_groups:
            group["fused"] = None
        return False
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    start_momentum(optimizer)
    return True


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set the momentum of fused SGD to zero where it has none, which gives the same first update.

    Otherwise it is not initialized if the first step with momentum is skipped, and the next one
    reads it (torch 2.13).

    Raises:
        ConfigError: For dampening, with which the first update would differ.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["momentum"]:
            dampening = group["dampening"]
            problem = "fused SGD with dampening cannot skip its first step; set fused to false"
            require(not dampening, "optim.options.dampening", dampening, problem)
            for parameter in group["params"]:
                if optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _unfit_for_fused(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the kind of parameters that the optimizer's fused kernel does not support, if any."""
    # A DTensor is such a subclass; importing DTensor for the check would take half a second.
    is_sharded = any(map(is_traceable_wrapper_subclass, parameters(optimizer)))
    if is_sharded and not isinstance(optimizer, FUSED_WHEN_SHARDED):
        return "sharded"
    on_cpu = {each.dtype for each in parameters(optimizer) if each.device.type == "cpu"}
    if isinstance(optimizer, torch.optim.SGD) and not on_cpu.isdisjoint(SIXTEEN_BIT):
        return "16-bit"
    return None


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the live state tensors by `parameter name/key`, and copies of numbers.

    Args:
        optimizer: Any torch optimizer whose state consists of tensors and numbers.
        names: Name of each parameter by its `id`.

    Raises:
        CheckpointError: If a state is neither a tensor nor a number, or the optimizer has added it
            to `state_dict`, so that it would be lost.
    """
    for parameter in optimizer.state:
        if id(parameter) not in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} has a state of {parameter!r}, not a parameter; use "
                "another optimizer, or a subclass that keeps it in its groups"
            )
    if lost := optimizer.state_dict().keys() - {"param_groups", "state"}:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() has {listed(sorted(lost))}, which is not "
            "saved; keep it in the state of parameters, or as numbers in groups"
        )
    state = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if value is None:
                continue
            if is_number(value):
                key, value = f"{key}{_NUMBER}", number_tensor(value)
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key!r} of {names[id(parameter)]!r} as "
                    f"{type(value).__name__}; only tensors and numbers can be saved: use another "
                    "optimizer, or a subclass that keeps a tensor"
                )
            state[f"{names[id(parameter)]}/{key}"] = value
    return state


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python, or a tuple of numbers."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, int | float) for part in parts)


def number_tensor(number: Any) -> Tensor:
    """Return a number or a tuple of numbers as a tensor: FP64, int64 or bool."""
    return torch.from_numpy(np.asarray(number))


def to_number(tensor: Tensor) -> Any:
    """Return the number or the tuple of numbers in a tensor."""
    return tuple(tensor.tolist()) if tensor.dim() else tensor.item()


def restore_numbers(optimizer: torch.optim.Optimizer) -> None:
    """Replace the tensors that `create_state` has created for numbers by the numbers."""
    for values in optimizer.state.values():
        for key in [key for key in values if str(key).endswith(_NUMBER)]:
            values[key.removesuffix(_NUMBER)] = to_number(values.pop(key))


def check_state(state: object) -> None:
    """Check that an object is a state of an engine, a mapping of names to tensors.

    Raises:
        CheckpointError: If it is not; the message names its type.
    """
    expected = "pass what engine.state_dict() returns, a mapping of names to tensors"
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a {type(state).__name__} cannot be loaded; {expected}")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name!r} of the state is a {type(value).__name__}; {expected}")
    if "engine/counts" not in state:
        raise CheckpointError(
            f"the mapping of {len(state)} tensors is not a state of an engine; {expected}"
        )


def check_shapes(state: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Check that the tensors of a state fit those that it is copied into.

    Raises:
        CheckpointError: If one does not; the message names it.
    """
    for name, tensor in live.items():
        value = state[name]
        if _described(value) != _described(tensor):
            raise CheckpointError(
                f"{name!r} is {_described(value)} in the state and {_described(tensor)} in this "
                "engine; load the state of the same model and rank, or a checkpoint (engine.save), "
                "which is sharded again"
            )


def _described(tensor: Tensor) -> str:
    """Return as text the shape of a full tensor, and which part of it this rank holds."""
    kind = "a DTensor" if is_traceable_wrapper_subclass(tensor) else "a tensor"
    if isinstance(tensor, FlatShard):
        kind = f"the elements {tensor.start} to {tensor.start + tensor.numel()} of a tensor"
    return f"{kind} of the shape {tuple(global_shape(tensor))}"


def inherits_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the `step` of an optimizer is that of torch or distmp."""
    step = inspect.unwrap(type(optimizer).step)
    return step.__module__.startswith(("torch.optim", "distmp.optim"))


def create_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    stored: Mapping[str, tuple[torch.Size, torch.dtype]],
    shapes: Mapping[str, torch.Size] | None = None,
) -> list[str]:
    """Create state tensors to load into, with shape and sharding of their parameters.

    They have the stored dtypes, or those of their parameters where torch's kernels need these.
    Removes the state of parameters without a stored state: they had not been updated then. Call
    `restore_numbers` when the tensors have their values.

    Args:
        optimizer: A new optimizer, or one that returns to an earlier state.
        names: Name of each parameter by its `id`.
        stored: Shape and dtype of each stored state, by its name in `named_state`.
        shapes: Shape of each full parameter by name, if the optimizer updates shards of them.

    Returns:
        Names of parameters with a stored state that the optimizer does not have.
    """
    owners = {
        names[id(parameter)]: (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")
    calls_super = "__class__" in inspect.unwrap(type(optimizer).step).__code__.co_freevars
    runs_kernel = isinstance(optimizer, _KERNELS) and (inherits_step(optimizer) or calls_super)
    left_out: dict[str, None] = {}
    keys = state_keys(stored)
    for name, (parameter, _) in owners.items():
        if name not in keys:
            optimizer.state.pop(parameter, None)
    for entry, (shape, dtype) in stored.items():
        name, key = entry.rsplit("/", 1)
        if name not in owners:
            left_out[name] = None
            continue
        parameter, group = owners[name]
        state = optimizer.state[parameter]
        if isinstance(optimizer, AdamW) and not state:
            state.update(optimizer.new_state(parameter))
        if key in state or isinstance(optimizer, AdamW):
            continue
        state.pop(key.removesuffix(_NUMBER), None)
        is_count = not shape and (key in _COUNTS or key.endswith(_NUMBER))
        uses_dtype = is_of_torch or (runs_kernel and key in _MOMENTS)
        if dtype.is_floating_point and uses_dtype and not is_count:
            dtype = parameter.dtype
        full = parameter.shape if shapes is None else shapes[name]
        if shape == full and not is_count:
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # Step counts: torch keeps them on the host unless a device kernel reads them.
            on_device = shape or group.get("fused") or group.get("capturable")
            device = parameter.device if on_device else "cpu"
            state[key] = torch.zeros(shape, dtype=dtype, device=device)
    return list(left_out)


def state_keys(stored: Iterable[str]) -> dict[str, set[str]]:
    """Return the keys of the stored state of each parameter, by its name."""
    keys: dict[str, set[str]] = {}
    for entry in stored:
        name, _, key = entry.rpartition("/")
        keys.setdefault(name, set()).add(key)
    return keys


def check_complete(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], stored: Iterable[str]
) -> None:
    """Check that a state has what the options of a torch optimizer need, before it is loaded.

    Parameters of one group and number of dimensions need the same keys.

    Args:
        optimizer: The optimizer; only those of torch are checked.
        names: Name of each parameter by its `id`.
        stored: Names of the stored states, as in `named_state`.

    Raises:
        CheckpointError: If the state of a parameter is incomplete.
    """
    keys = state_keys(stored)
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")
    for group in optimizer.param_groups if is_of_torch else ():
        known: dict[int, set[str]] = {}
        for parameter in group["params"]:
            name = names[id(parameter)]
            own = keys.get(name)
            if own is None:
                continue
            _check_options(group, name, own)
            others = known.setdefault(parameter.dim(), own)
            if own != others:
                raise CheckpointError(
                    f"the state has {listed(sorted(own))} of {name}, but of others in its group "
                    f"{listed(sorted(others))}; load another checkpoint"
                )


def _check_options(group: Mapping[str, Any], name: str, keys: set[str]) -> None:
    for option, key in _OPTION_KEYS.items():
        if group.get(option) and key not in keys:
            raise CheckpointError(
                f"the state has no {key} of {name}, which {option} = {group[option]} needs; set it "
                "(optim.options in the trainer) as in the saved optimizer, or load only the "
                "weights: engine.load(directory, optimizer=False), or in the trainer a new run "
                "with model.weights, from `distmp export`"
            )


def never_updated(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], stored: Iterable[str]
) -> list[str]:
    """Return the names of parameters without a stored state in groups where others have one.

    Args:
        optimizer: The optimizer with these groups.
        names: Name of each parameter by its `id`.
        stored: Names of the stored states, as in `named_state`.
    """
    updated = state_keys(stored).keys()
    missing = []
    for group in optimizer.param_groups:
        own = [names[id(tensor)] for tensor in group["params"]]
        if not updated.isdisjoint(own):
            missing += [name for name in own if name not in updated]
    return missing
