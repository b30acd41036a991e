"""Measures activations and optimizer state of a run on tensors without memory."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.config import RunConfig
from distmp.data.loading import step_batches
from distmp.engine.microbatches import moved
from distmp.optim.stepped import build_on
from distmp.parallel.blocks import prepare_blocks
from distmp.parallel.settings import ParallelConfig
from distmp.parallel.strategy import trainable
from distmp.precision.builders import autocast_of_dtypes, prepare
from distmp.precision.keep import parameters_in_fp32, storage_dtypes
from distmp.precision.policy import PrecisionPolicy
from distmp.training.setup import RunComponents
from distmp.utils.fake_tensors import MAX_REAL_ELEMENTS
from distmp.utils.live_bytes import ACTIVATIONS, PARAMETERS, LiveBytes


def activation_bytes(
    config: RunConfig, parts: RunComponents, policy: PrecisionPolicy, device: torch.device
) -> int:
    """Return the peak of what forward and backward of a microbatch allocate, in bytes.

    Gradients are freed as soon as they are complete, because strategies move them to buffers. Call
    it inside of `FakeTensors`.

    Args:
        config: The configuration of the run.
        parts: Data, model and loss, on any device; the model is not changed.
        policy: The resolved policy.
        device: The device of a rank.
    """
    module = _fake_copy(parts.model, policy, device)
    prepare(module, policy.wide, device.type)
    prepare_blocks(module, ParallelConfig(config.sharding, config.activation_checkpointing))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_free_gradient)
    batch = moved(_batch(config, parts), device)
    with LiveBytes() as live:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        live.label([*module.parameters(), *module.buffers(), *tensors], PARAMETERS)
        live.phase = ACTIVATIONS
        live.start()
        with autocast_of_dtypes(policy, device):
            loss, _ = parts.loss(module, batch)
        loss.float().backward()
    return sum(live.peak.values()) - live.peak.get(PARAMETERS, 0)


def build_fake_optimizer(
    config: RunConfig, model: nn.Module, policy: PrecisionPolicy
) -> torch.optim.Optimizer:
    """Return the optimizer of a run after a step on weights without memory.

    Call it inside of `FakeTensors`.
    """
    kept = parameters_in_fp32(model, policy)
    named = [
        (name, nn.Parameter(torch.empty(p.shape, dtype=_stepped(p, policy, kept))))
        for name, p in trainable(model)
    ]
    for _, parameter in named:
        parameter.grad = torch.empty_like(parameter)
    optimizer = build_on(config.optimizer_factory, named)
    optimizer.step()
    return optimizer


def _stepped(parameter: Tensor, policy: PrecisionPolicy, kept: Collection[int]) -> torch.dtype:
    """Return the dtype of the weight that the optimizer steps."""
    return torch.float32 if id(parameter) in kept else policy.param_dtype


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the memory of the state of an optimizer, in bytes."""
    values = pytree.tree_leaves([*optimizer.state.values()])
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _batch(config: RunConfig, parts: RunComponents) -> Any:
    size = config.batch.microbatch_size
    batches = step_batches(
        parts.datasets.train,
        seed=config.seed,
        first_sample=0,
        global_batch_size=size,
        microbatch_size=size,
        rank=0,
        world_size=1,
    )
    with closing(batches):
        return next(batches)[0]


def _fake_copy(model: nn.Module, policy: PrecisionPolicy, device: torch.device) -> nn.Module:
    """Copy a model to tensors without memory, with parameters in the dtypes of the policy."""
    dtypes = storage_dtypes(model, policy)
    copies: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        empty = torch.empty(parameter.shape, dtype=dtypes[name], device=device)
        copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        small = not buffer.is_floating_point() and buffer.numel() <= MAX_REAL_ELEMENTS
        copies[id(buffer)] = (
            buffer.detach().clone().to(device)
            if small and not buffer.is_meta
            else torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        )
    return copy.deepcopy(model, copies)


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None
