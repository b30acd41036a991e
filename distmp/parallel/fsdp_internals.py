"""The only file of distmp that touches private attributes of FSDP.

torch 2.13 has no public API to accumulate gradients in FP32 until the last microbatch, to discard
the gradients of an abandoned step, and to find out which parameters had a gradient.
tests/parallel/test_fsdp_internals.py fails if torch changes these attributes, or if another file
touches them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from distmp.errors import SetupError

# Versions of torch on which the tests have passed; see the README.
TESTED = ("2.10", "2.11", "2.13", "2.15")
GROUP_ATTRIBUTES = ("fsdp_params", "_partial_reduce_output")
PARAMETER_ATTRIBUTES = ("_unsharded_param", "unsharded_accumulated_grad", "sharded_param")
# Method of torch 2.15 that lets autograd sum several uses of a weight in 16 bits, to save a cast.
_SET_GRAD_DTYPES = "_set_unsharded_grad_dtypes"
# Function by which FSDP1 compares the memory of tensors.
SAME_STORAGE = "torch.distributed.fsdp._flat_param._same_storage"
# Function by which FSDP2 divides a parameter into one part for each rank.
CHUNKS = "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty"


def check(model: nn.Module) -> None:
    """Refuse a version of torch whose FSDP2 lacks an attribute that this file uses.

    Args:
        model: A sharded model; each of its groups was gathered at least once.

    Raises:
        SetupError: Naming the missing attributes.
    """
    missing = {name for group in _groups(model) for name in _missing(group, GROUP_ATTRIBUTES)}
    if not missing:
        missing = {
            name
            for group in _groups(model)
            for parameter in group.fsdp_params
            for name in _missing(parameter, PARAMETER_ATTRIBUTES)
        }
    if missing:
        raise SetupError(
            {
                0: f"FSDP2 of torch {torch.__version__} has no {', '.join(sorted(missing))}, which "
                "distmp needs to accumulate in FP32; use a version of torch that distmp is tested "
                f"with ({', '.join(TESTED)}), or strategy = 'ddp'"
            },
            exit_code=2,
        )


def accumulate_in_fp32(model: nn.Module) -> None:
    """Make the gradients of gathered parameters FP32, independent of the parameter's dtype.

    Autograd then sums in FP32, over several uses of a weight in one backward and over microbatches.
    All gradients of a group have one dtype, in every microbatch; FSDP2 fails if they differ
    (pytorch#196996).
    """
    for parameter in _gathered_parameters(model):
        if parameter.is_floating_point():  # frozen parameters too: they may be unfrozen later
            parameter.grad_dtype = torch.float32
    for group in _groups(model):
        if hasattr(group, _SET_GRAD_DTYPES):
            setattr(group, _SET_GRAD_DTYPES, _keep_grad_dtypes)


def reduce_unused_parameters(model: nn.Module, used: Callable[[nn.Parameter], None]) -> None:
    """Make FSDP2 reduce zeros for parameters without a gradient on this rank.

    By default FSDP2 reduces only the gradients that a rank has. If ranks differ, the reduction
    fails or adds the gradients of different parameters. `set_reduce_scatter_unused_params` of torch
    2.13 creates zeros in the dtype of the gathered parameter, which cannot be reduced together with
    FP32 gradients.

    Args:
        model: A sharded model.
        used: Called after each backward with each sharded parameter that has had a gradient on this
            rank since the last reduction.
    """
    for group in _groups(model):
        group.post_backward = functools.partial(_post_backward, group, used)


def _post_backward(group: Any, used: Callable[[nn.Parameter], None], *unused: Any) -> None:
    """Set zeros for parameters without a gradient, then run the post-backward of FSDP2."""
    for parameter in group.fsdp_params:
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is None or not gathered.requires_grad:
            continue
        if _has_gradient(parameter):
            used(parameter.sharded_param)
        elif group.reduce_grads:
            gathered.grad = torch.zeros_like(gathered, dtype=torch.float32)
    type(group).post_backward(group, *unused)


def discard_gradients(model: nn.Module) -> None:
    """Discard gradients that are not reduced yet, which `zero_grad` does not clear."""
    for group in _groups(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter._unsharded_param.grad = None
            if _has_accumulator(parameter):
                parameter.unsharded_accumulated_grad = None


def unreduced_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of this rank that are not fully reduced yet."""
    gradients = [group._partial_reduce_output for group in _groups(model)]
    for group in _groups(model):
        for parameter in group.fsdp_params:
            gradients.append(parameter._unsharded_param.grad)
            if _has_accumulator(parameter):
                gradients.append(parameter.unsharded_accumulated_grad)
    return [gradient for gradient in gradients if gradient is not None]


def views_of_last_forward(unit: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield the parameters of an FSDP1 unit and the tensors that its last forward used for them.

    These tensors are views of the flat parameter in the autograd graph. A hook on such a view is
    called if and only if backward has a gradient of that parameter.

    Args:
        unit: A `FullyShardedDataParallel` with `use_orig_params`.
    """
    handle: Any = unit._handle
    if handle is None:  # the unit has no parameters
        return
    flat = handle.flat_param
    for parameter, view in zip(flat._params, flat._tensors, strict=True):
        if view is not None:
            yield parameter, view


def reshard_fsdp1(unit: nn.Module) -> None:
    """Free the gathered parameters of an FSDP1 unit, as at the end of a backward.

    Args:
        unit: A `FullyShardedDataParallel`; if its parameters are not gathered, nothing happens.
    """
    handle: Any = unit._handle
    if handle is not None:
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


def fsdp2_policies(model: nn.Module) -> Iterator[MixedPrecisionPolicy]:
    """Yield the policy of each parameter group that `fully_shard` has created."""
    for group in _groups(model):
        yield group.mp_policy


def _gathered_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for group in _groups(model):
        for parameter in group.fsdp_params:
            yield parameter._unsharded_param


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups, each of which is gathered and reduced as one unit."""
    seen: set[int] = set()
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 a module has at most one group
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _has_gradient(parameter: Any) -> bool:
    if parameter._unsharded_param.grad is not None:
        return True
    return _has_accumulator(parameter) and parameter.unsharded_accumulated_grad is not None


def _has_accumulator(parameter: Any) -> bool:
    """Return whether gradients may be accumulated outside of `.grad`, as before torch 2.15."""
    return "unsharded_accumulated_grad" in vars(parameter)


def _keep_grad_dtypes(defer_upcast: bool) -> None:
    """Replace FSDP2's method, so that gradients keep the dtype set by `accumulate_in_fp32`."""


def _missing(holder: Any, names: tuple[str, ...]) -> list[str]:
    return [f"{type(holder).__name__}.{name}" for name in names if not hasattr(holder, name)]
