"""Building an optimizer that steps exactly the tensors it was built for."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from distmp.errors import ConfigError, TrainingError, listed
from distmp.optim.build import NamedParameters, OptimizerFactory
from distmp.optim.checks import check_kind

_EXAMPLE = "lambda named_parameters: torch.optim.AdamW(named_parameters, lr=1e-3)"


def build_on(factory: OptimizerFactory, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Build an optimizer on named tensors and check that it steps them.

    Args:
        factory: Called with `parameters`.
        parameters: `[(name, tensor), ...]`, what is to be stepped.

    Raises:
        ConfigError: If `factory` is an optimizer already, cannot be called so, returns something
            else, or returns an optimizer of a kind that the engine cannot step, or one that leaves
            out some of the tensors, has one twice, or steps others.
    """
    if isinstance(factory, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer",
            type(factory).__name__,
            "is built already, on tensors that may not be those that are stepped (FP32 master "
            f"weights, shards); pass a function that builds it: {_EXAMPLE}",
        )
    optimizer = _call(factory, parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer",
            type(optimizer).__name__,
            f"the function returned this; return a torch.optim.Optimizer: {_EXAMPLE}",
        )
    check_kind(optimizer)
    _check_tensors(optimizer, parameters)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "optimizer", "differentiable=True", "keeps graphs of updates; leave the argument out"
        )
    return optimizer


class SteppedTensors:
    """Watches that an optimizer goes on to step what it was built on, and only when it is told to.

    Args:
        optimizer: It.
        parameters: What it steps, with names.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> None:
        self.optimizer = optimizer
        self._parameters: list[tuple[str, Tensor]] = []
        self._is_stepping = False
        self.add(parameters)
        optimizer.register_step_pre_hook(self._refuse_step)

    def add(self, parameters: NamedParameters) -> None:
        """Take note of tensors that were given to the optimizer in addition."""
        self._parameters += parameters
        self._groups = self.optimizer.param_groups
        self._stepped = self._found()
        # Which kernel a group was built for; a loaded state brings its own.
        self._fused = [group.get("fused") for group in self._groups]

    def step(self) -> None:
        """Step the optimizer."""
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse another optimizer, or one with other tensors in its groups.

        Raises:
            ConfigError: Naming what is missing, foreign or there twice.
        """
        if optimizer is not self.optimizer:
            raise ConfigError(
                "engine.optimizer",
                type(optimizer).__name__,
                "was put in the place of the optimizer that the engine has built; build a new "
                "engine, or change the rates in engine.optimizer.param_groups",
            )
        if self._found() != self._stepped:
            _check_tensors(optimizer, self._parameters)
        if optimizer.param_groups is not self._groups:  # by optimizer.load_state_dict
            for group, fused in zip(optimizer.param_groups, self._fused, strict=True):
                if "fused" in group:
                    group["fused"] = fused
            self._groups = optimizer.param_groups

    def _found(self) -> list[int]:
        groups = self.optimizer.param_groups
        return [id(tensor) for group in groups for tensor in group["params"]]

    def _refuse_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise TrainingError(
                "engine.optimizer.step() was called outside of engine.step(), which steps the "
                "optimizer by itself, with gradients of all ranks; leave the call out"
            )


def _call(factory: OptimizerFactory, parameters: NamedParameters) -> Any:
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        inspect.signature(factory).bind(parameters)
    except TypeError as error:
        raise ConfigError(
            "optimizer", name, f"is called with one argument, [(name, tensor), ...]: {_EXAMPLE}"
        ) from error
    except ValueError:  # a callable of C code does not tell its signature
        return factory(parameters)
    try:
        return factory(parameters)
    except (AttributeError, TypeError) as error:
        if isinstance(error, ConfigError) or "tuple" not in str(error):
            raise
        raise ConfigError(
            "optimizer",
            name,
            f"does not take what it is called with, [(name, tensor), ...] ({error}); build groups "
            "as [{'params': [(name, tensor), ...]}, ...] or take the tensors out: "
            "[tensor for _, tensor in named_parameters]",
        ) from error


def _check_tensors(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> None:
    kind = type(optimizer).__name__
    names = {id(tensor): name for name, tensor in parameters}
    counts = Counter(id(tensor) for group in optimizer.param_groups for tensor in group["params"])
    foreign = [
        f"one of shape {tuple(tensor.shape)}"
        for group in optimizer.param_groups
        for tensor in group["params"]
        if id(tensor) not in names
    ]
    if foreign:
        raise ConfigError(
            "optimizer",
            kind,
            f"steps {len(foreign)} tensors that the engine does not train ({listed(foreign)}), so "
            "what it changes would be lost; build it on the tensors that the function is called "
            f"with, not on model.parameters(): {_EXAMPLE}",
        )
    if twice := [names[key] for key, count in counts.items() if count > 1]:
        raise ConfigError(
            "optimizer", kind, f"would step {listed(twice)} more than once; put each in one group"
        )
    if missing := [name for key, name in names.items() if key not in counts]:
        raise ConfigError(
            "optimizer",
            kind,
            f"does not step {listed(missing)}; put every tensor that the function is called with "
            "into a group, and freeze what is not to be trained (requires_grad_(False)) before "
            "the engine is built",
        )
