"""Builds an optimizer, and checks that it updates exactly the tensors that it was built for."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_all_optimizers

from distmp.distributed.failing_together import Ranks
from distmp.errors import ConfigError, TrainingError, listed, require
from distmp.optim.adamw import AdamW, match_memory_formats
from distmp.optim.factories import NamedParameters, OptimizerFactory
from distmp.optim.learning_rates import check_kind
from distmp.optim.muon import Muon
from distmp.optim.state import inherits_step
from distmp.precision.policy import PrecisionPolicy
from distmp.scaling import local_gradients
from distmp.utils.dtypes import is_dtensor
from distmp.utils.tensor_trees import version_counters

logger = logging.getLogger("distmp")

_EXAMPLE = "lambda named_parameters: torch.optim.AdamW(named_parameters, lr=1e-3)"


def build_on(factory: OptimizerFactory, parameters: NamedParameters) -> torch.optim.Optimizer:
    """Build an optimizer on named tensors and check that it updates them.

    Args:
        factory: Function that is called with `parameters` and returns the optimizer.
        parameters: The tensors to update, `[(name, tensor), ...]`.

    Raises:
        ConfigError: If `factory` cannot be called with `parameters`, does not return an optimizer,
            or one that the engine does not support, or that lacks a tensor, has one twice, or has
            others.
    """
    try:
        optimizer: Any = factory(parameters)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        problem = f"cannot be called with [(name, tensor), ...] ({error}); pass a function that "
        raise ConfigError("optimizer", name, f"{problem}builds it: {_EXAMPLE}") from error
    kind = type(optimizer).__name__
    problem = f"the function returned this; return a torch.optim.Optimizer: {_EXAMPLE}"
    require(isinstance(optimizer, torch.optim.Optimizer), "optimizer", kind, problem)
    check_kind(optimizer)
    initialized = hasattr(optimizer, "_optimizer_step_post_hooks")
    problem = "takes no hooks; call super().__init__(params, defaults) in its __init__"
    require(initialized, "optimizer", kind, problem)
    has_rates = all("lr" in group for group in optimizer.param_groups)
    require(has_rates, "optimizer", kind, "has a parameter group without 'lr'; add the rate")
    _check_tensors(optimizer, parameters)
    are_copies = not all(isinstance(tensor, nn.Parameter) for _, tensor in parameters)
    are_empty = are_copies and not all(group["params"] for group in optimizer.param_groups)
    if are_empty and Ranks(None).rank == 0:
        logger.warning(
            "a parameter group of %s is empty; the function that builds it gets FP32 copies or "
            "shards, so choose tensors by name or shape, not among model.parameters()",
            kind,
        )
    keeps_graphs = any(group.get("differentiable") for group in optimizer.param_groups)
    problem = "keeps graphs of updates; remove the argument"
    require(not keeps_graphs, "optimizer", "differentiable=True", problem)
    return optimizer


class OptimizerTensors:
    """Checks that an optimizer keeps its tensors, and is only stepped by the engine.

    Args:
        optimizer: The optimizer.
        parameters: The tensors that it updates, `[(name, tensor), ...]`.
        model: Its trained parameters are these tensors, or copies, in the same order.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: NamedParameters, model: nn.Module
    ) -> None:
        self.optimizer = optimizer
        self._parameters = parameters
        # The updated tensors, and those that forward reads: copies, and frozen parameters.
        self._weights = {*(tensor for _, tensor in parameters), *model.parameters()}
        # Parameters whose `.grad` the optimizer does not read, and those whose `.grad` is rounded
        # for it, so that a later write to it is lost, too.
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        pairs = [(p, t) for p, (_, t) in zip(trained, parameters, strict=True) if p is not t]
        self._unread = [parameter for parameter, _ in pairs]
        self._rounded = [p for p, tensor in pairs if tensor.dtype != torch.float32]
        self._gradients: list[int] = []
        self.forget_writes()
        self._is_stepping = False
        self._groups = optimizer.param_groups
        self._updated = self._tensor_ids()
        # The kernel that each group was built for; loading a state overwrites the flag.
        self._fused = [group.get("fused") for group in self._groups]
        self._has_other_step = not inherits_step(optimizer)
        optimizer.register_step_pre_hook(self._refuse_step)
        # Before hooks of the user, which may clear gradients.
        optimizer.register_step_post_hook(self._end_step)

    def step(self) -> None:
        """Step the optimizer.

        Raises:
            TrainingError: If a hook has assigned a gradient that the optimizer does not read.
        """
        self._gradients = self._gradient_ids()
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False

    def exchange(self) -> None:
        """Exchange shards of Muon as in a step that is skipped, without hooks."""
        assert isinstance(self.optimizer, Muon)
        self.optimizer.step_matrices()
        self._version = self.versions()

    def runs_other_code(self) -> bool:
        """Return whether `step` runs hooks, or a step, of other code than torch and distmp."""
        hooks = chain(
            self.optimizer._optimizer_step_pre_hooks.values(),
            self.optimizer._optimizer_step_post_hooks.values(),
            of_all_optimizers._global_optimizer_pre_hooks.values(),
            of_all_optimizers._global_optimizer_post_hooks.values(),
        )
        ours = ("distmp.", "torch.")  # torch.profiler has a hook
        has_hook = any(not str(hook.__module__).startswith(ours) for hook in hooks)
        # torch's schedulers replace it to count calls.
        step = vars(self.optimizer).get("step")
        is_replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
        return has_hook or is_replaced or self._has_other_step

    def forget_writes(self) -> None:
        """Count `writes` from 0 on."""
        self._writes, self._version = 0, self.versions()

    def writes(self) -> int:
        """Return how often weights were written to in place, except by the optimizer.

        Publishing writes to copies, too, equally often on every rank.
        """
        version = self.versions()
        self._writes += version - self._version
        self._version = version
        return self._writes

    def versions(self) -> int:
        """Return how often weights were written to in place, by any code."""
        return sum(version_counters(self._weights))

    def step_in_place(self) -> None:
        """Step the optimizer, and check that it has written to the memory of its tensors.

        A fused kernel does, so it needs no check. Parameters of the model itself may be replaced;
        master weights and shards are views of memory that the engine reads.

        Raises:
            ConfigError: If the optimizer has replaced the memory of a master weight or a shard.
        """
        # Not `data_ptr`, which is the same for all DTensors.
        storages = [tensor.untyped_storage() for _, tensor in self._parameters]
        self.step()
        for (name, tensor), storage in zip(self._parameters, storages, strict=True):
            replaceable = isinstance(tensor, nn.Parameter) and not is_dtensor(tensor)
            if tensor.untyped_storage()._cdata != storage._cdata and not replaceable:
                raise ConfigError(
                    "optimizer",
                    type(self.optimizer).__name__,
                    f"replaces the memory of {name!r} (.data =), so its update would be lost; "
                    "write to tensors in place (copy_, add_)",
                )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the optimizer is the same and has the same tensors in its groups.

        Raises:
            ConfigError: If not; the message names tensors that are missing, foreign or duplicate.
        """
        problem = (
            "replaces the optimizer that the engine has built; build a new engine, or change the "
            "rates in engine.optimizer.param_groups"
        )
        is_same = optimizer is self.optimizer
        require(is_same, "engine.optimizer", type(optimizer).__name__, problem)
        if self._tensor_ids() != self._updated:
            _check_tensors(optimizer, self._parameters)
        if optimizer.param_groups is not self._groups:  # replaced by load_state_dict
            for group, fused in zip(optimizer.param_groups, self._fused, strict=True):
                if "fused" in group:
                    group["fused"] = fused
                if fused:
                    match_memory_formats(group["params"], optimizer.state)
            self._groups = optimizer.param_groups

    def _tensor_ids(self) -> list[int]:
        return list(map(id, local_gradients.parameters(self.optimizer)))

    def _gradient_ids(self) -> list[int]:
        """Return what changes if other code assigns a gradient that the optimizer does not read."""
        rounded = [getattr(parameter.grad, "_version", -1) for parameter in self._rounded]
        return [*rounded, *map(id, map(attrgetter("grad"), self._unread))]

    def _end_step(self, *_: object) -> None:
        self._version = self.versions()
        if self._gradient_ids() != self._gradients:
            raise TrainingError(
                "a step pre-hook of the optimizer has changed .grad of model.parameters(), where "
                "the optimizer does not read it; change the tensors of engine.gradients() in place"
            )

    def _refuse_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise TrainingError(
                "engine.optimizer.step() was called outside of engine.step(), which steps the "
                "optimizer with the gradients of all ranks; remove the call"
            )


def _check_tensors(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> None:
    names = {id(tensor): name for name, tensor in parameters}
    held = [*local_gradients.parameters(optimizer)]
    counts = Counter(map(id, held))
    foreign = [f"one of shape {tuple(each.shape)}" for each in held if id(each) not in names]
    if foreign:
        problem = (
            f"updates {len(foreign)} tensors that the engine does not train ({listed(foreign)}), "
            "so its updates would be lost; build it on the tensors that the function is called "
            f"with, not on model.parameters(): {_EXAMPLE}"
        )
    elif twice := [names[key] for key, count in counts.items() if count > 1]:
        problem = f"would update {listed(twice)} more than once; put each in one group"
    elif missing := [name for key, name in names.items() if key not in counts]:
        problem = (
            f"does not step {listed(missing)}; put every tensor that the function is called with "
            "into a group, and freeze parameters that are not trained (requires_grad_(False)) "
            "before the engine is built"
        )
    else:
        return
    raise ConfigError("optimizer", type(optimizer).__name__, problem)


def set_rounding(optimizer: torch.optim.Optimizer, policy: PrecisionPolicy) -> None:
    """Set the rounding of an optimizer to that of a policy.

    Raises:
        ConfigError: If it cannot, or was built to round stochastically under another policy.
    """
    if not isinstance(optimizer, AdamW):
        problem = (
            f"needs an optimizer that rounds, which {type(optimizer).__name__} does not; use "
            "distmp.optim.AdamW, or remove it"
        )
        fits = not policy.stochastic_rounding
        require(fits, "precision.policy.stochastic_rounding", True, problem)
        return
    problem = (
        f"contradicts the policy {policy.name!r}; use 'bf16-pure,stochastic_rounding=true', or "
        "remove the argument"
    )
    agrees = policy.stochastic_rounding or not optimizer.stochastic_rounding
    require(agrees, "optimizer", "stochastic_rounding=True", problem)
    optimizer.stochastic_rounding = policy.stochastic_rounding


# Optimizers whose update of an element depends only on the history of that element.
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Words in the names of optimizers that use full matrices or norms of full parameters.
NOT_ELEMENTWISE = ("adafactor", "lamb", "lars", "muon", "shampoo", "soap")


def build_on_shards(
    factory: OptimizerFactory,
    shards: Sequence[tuple[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    *,
    quiet: bool = False,
) -> torch.optim.Optimizer:
    """Build an optimizer on shards, in the groups that the factory chooses for full parameters.

    The factory receives placeholders with the shapes of the full parameters, so that rules such as
    "no weight decay for vectors" work; they take no memory. Then the shards replace them.

    Args:
        factory: Builds the optimizer on `[(name, tensor), ...]`.
        shards: This rank's shard of each flattened parameter, by name: 1-dim, possibly empty.
        shapes: Shape of each full parameter.
        quiet: Do not log, because another rank does.

    Raises:
        ConfigError: If the update of an element depends on other elements.
    """
    placeholders = [
        (name, shard.new_zeros(()).expand(shapes[name]).requires_grad_()) for name, shard in shards
    ]
    optimizer = build_on(factory, placeholders)
    _check_elementwise(optimizer, quiet=quiet)
    shard_of = {id(p): shard for (_, p), (_, shard) in zip(placeholders, shards, strict=True)}
    for group in optimizer.param_groups:
        group["params"] = [shard_of[id(parameter)] for parameter in group["params"]]
    if optimizer.state:  # some, such as Adagrad, create it immediately, with the wrong shape
        for group in optimizer.param_groups:
            group.pop("param_names", None)
        return type(optimizer)(optimizer.param_groups, **optimizer.defaults)
    return optimizer


def _check_elementwise(optimizer: torch.optim.Optimizer, *, quiet: bool) -> None:
    kind = type(optimizer)
    # Muon exchanges shards; distmp's AdamW updates each element alone.
    bases = (base for base in (*ELEMENTWISE, AdamW, Muon) if issubclass(kind, base))
    if any(inspect.unwrap(kind.step) is inspect.unwrap(base.step) for base in bases):
        return
    name = kind.__name__
    # Such as Lookahead: the optimizer inside would keep the placeholders.
    wraps = any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values())
    known = any(word in name.lower() for word in NOT_ELEMENTWISE)
    problem = (
        f"{name} needs full parameters, but a rank has only a shard of each; use strategy ddp "
        "without shard_optimizer, or AdamW or distmp.optim.Muon"
    )
    may_fit = not (known or wraps or kind.__module__.startswith("torch.optim"))
    require(may_fit, "shard_optimizer", True, problem)
    if not quiet:
        logger.warning(
            "shard_optimizer passes flat shards of parameters to %s: this is correct only if it "
            "updates every element independently",
            name,
        )
