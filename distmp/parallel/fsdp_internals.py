"""What FSDP keeps to itself: the one file in which distmp touches private attributes of torch.

Needed for what has no public way (torch 2.13): gradients that wait for the last microbatch are to
be added up in FP32, nothing of an abandoned step may reach the next one, and which parameters had
a gradient is to be known.
tests/parallel/test_fsdp_internals.py says when torch has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from distmp.errors import SetupError

# Versions of torch that the tests have passed on; see the README.
TESTED = ("2.10", "2.11", "2.13", "2.15")
GROUP_ATTRIBUTES = ("fsdp_params", "_partial_reduce_output")
PARAMETER_ATTRIBUTES = ("_unsharded_param", "unsharded_accumulated_grad", "sharded_param")
# With it torch 2.15 lets autograd sum the uses of a weight in 16 bits, to save a cast.
_GRADIENT_TYPES = "_set_unsharded_grad_dtypes"


def check(model: nn.Module) -> None:
    """Refuse a torch whose FSDP2 is built in another way.

    Args:
        model: Sharded, each of its groups gathered at least once.

    Raises:
        SetupError: Naming what is missing.
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
    """Make the gradient of every gathered parameter FP32, whatever the parameter's type is.

    Then autograd itself adds up in FP32, over uses of a weight within one backward as well as over
    microbatches; and all gradients of a group have one type, whichever microbatch they are from
    (FSDP2 fails on a mixture, pytorch#196996).
    """
    for parameter in _gathered_parameters(model):
        if parameter.is_floating_point():  # also of one that may be unfrozen later
            parameter.grad_dtype = torch.float32
    for group in _groups(model):
        if hasattr(group, _GRADIENT_TYPES):
            setattr(group, _GRADIENT_TYPES, _leave_as_they_are)


def reduce_what_is_unused(model: nn.Module, used: Callable[[nn.Parameter], None]) -> None:
    """Count a parameter without a gradient on this rank as zero: another rank may have one.

    Left to itself FSDP2 reduces what each rank has, which fails, or adds the gradients of different
    parameters. `set_reduce_scatter_unused_params` of torch 2.13 makes zeros in the type of the
    gathered parameter, which cannot be reduced together with FP32 gradients.

    Args:
        model: Sharded.
        used: Called behind each backward for each parameter, sharded, that has had a gradient on
            this rank since the last reduction.
    """
    for group in _groups(model):
        group.post_backward = functools.partial(_post_backward, group, used)


def _post_backward(group: Any, used: Callable[[nn.Parameter], None], *unused: Any) -> None:
    """Do what FSDP2 does behind a backward, with zeros for parameters without a gradient."""
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
    """Forget gradients that wait for a reduction, which `zero_grad` does not see."""
    for group in _groups(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter._unsharded_param.grad = None
            if _keeps_a_sum(parameter):
                parameter.unsharded_accumulated_grad = None


def waiting_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of this rank that wait for a reduction."""
    waiting = [group._partial_reduce_output for group in _groups(model)]
    for group in _groups(model):
        for parameter in group.fsdp_params:
            waiting.append(parameter._unsharded_param.grad)
            if _keeps_a_sum(parameter):
                waiting.append(parameter.unsharded_accumulated_grad)
    return [gradient for gradient in waiting if gradient is not None]


def views_of_last_forward(unit: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Give the parameters of an FSDP1 unit and what its last forward has used in their places.

    These are views of the flat parameter of which autograd knows, so a hook on one of them is
    called if, and only if, backward has a gradient of that parameter.

    Args:
        unit: A `FullyShardedDataParallel`, with `use_orig_params`.
    """
    handle: Any = unit._handle
    if handle is None:  # without any parameter of its own
        return
    flat = handle.flat_param
    for parameter, view in zip(flat._params, flat._tensors, strict=True):
        if view is not None:
            yield parameter, view


def reshard_fsdp1(unit: nn.Module) -> None:
    """Free the gathered parameters of an FSDP1 unit, as the end of a backward does.

    Args:
        unit: A `FullyShardedDataParallel`. Nothing happens if its parameters are not gathered.
    """
    handle: Any = unit._handle
    if handle is not None:
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


def _gathered_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for group in _groups(model):
        for parameter in group.fsdp_params:
            yield parameter._unsharded_param


def _groups(model: nn.Module) -> Iterator[Any]:
    """Give FSDP2's groups of parameters, each of which is gathered and reduced as a whole."""
    seen: set[int] = set()
    for part in model.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there is at most one
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _has_gradient(parameter: Any) -> bool:
    if parameter._unsharded_param.grad is not None:
        return True
    return _keeps_a_sum(parameter) and parameter.unsharded_accumulated_grad is not None


def _keeps_a_sum(parameter: Any) -> bool:
    """Whether gradients of earlier microbatches stand beside `.grad`; in torch 2.15 they do not."""
    return "unsharded_accumulated_grad" in vars(parameter)


def _leave_as_they_are(defer_upcast: bool) -> None:
    """Stand in for FSDP2's method: gradients keep the type that `accumulate_in_fp32` gave them."""


def _missing(holder: Any, names: tuple[str, ...]) -> list[str]:
    return [f"{type(holder).__name__}.{name}" for name in names if not hasattr(holder, name)]
