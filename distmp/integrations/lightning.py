"""The precision plugin for Lightning's Trainer and for Fabric."""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Optimizer

from distmp.errors import ConfigError, TrainingError, argument_names, require
from distmp.integrations.deferred_scaler import DeferredGradScaler, unwrapped
from distmp.integrations.step_weights import StepWeights
from distmp.parallel.fsdp_internals import fsdp2_policies
from distmp.parallel.global_mean import warn_about_mean
from distmp.parallel.strategy import check_parameters
from distmp.precision import PolicyLike, PrecisionPolicy, Resolution, keep
from distmp.precision.builders import (
    convert_parameters,
    refuse_low_precision_matmuls,
    refuse_unfreezing,
)
from distmp.precision.notation import LIGHTNING_POLICIES, resolve_without_masters
from distmp.precision.policy import dtype_word
from distmp.scaling.grad_scaler import DistributedGradScaler
from distmp.scaling.local_gradients import parameters
from distmp.scaling.settings import LossScaleConfig, loss_scale_rules, unused_rules
from distmp.utils.dtypes import dtype_name, is_dtensor
from distmp.utils.tensor_trees import floating_point_cast, map_tensors

logger = logging.getLogger("distmp")


def resolved(requested: PolicyLike, device: torch.device) -> Resolution:
    """Return the policy for a distmp policy, a name of Lightning, or "auto".

    Raises:
        ConfigError: If no strategy of Lightning implements it.
    """
    name = LIGHTNING_POLICIES.get(requested, requested) if isinstance(requested, str) else requested
    resolution = resolve_without_masters(name, device)
    refuse_low_precision_matmuls(resolution.policy)
    check_policy(resolution.policy)
    return resolution


def check_policy(policy: PrecisionPolicy) -> None:
    """Refuse fields of a policy that no strategy of Lightning implements.

    Raises:
        ConfigError: Naming the field.
    """
    if policy.param_dtype != torch.float32:
        problem = "would sum its gradients in 16 bits, like its weights; use bf16-autocast"
    elif policy.reduce_dtype != torch.float32:
        problem = "reduces gradients in 16 bits; use reduce=fp32"
    elif policy.output_dtype != torch.float32:
        problem = "returns 16-bit outputs; use output=fp32, and cast in your loss"
    elif policy.casts_parameters and (policy.keep_fp32 or policy.buffer_dtype is not None):
        problem = "sets keep_fp32 or buffer for 16-bit parameters; set them with fully_shard"
    elif policy.loss_scale is not None and policy.compute_dtype != torch.float16:
        problem = "scales the loss although it does not compute in float16; remove loss_scale"
    else:
        return
    raise ConfigError("policy", policy.name, f"{problem}, or use distmp.Engine")


def prepare_module(module: nn.Module, policy: PrecisionPolicy, device_type: str) -> None:
    """Apply the policy to a module that Lightning has not wrapped yet; changed in place.

    Raises:
        ConfigError: If the policy cannot convert the module.
    """
    if policy.casts_parameters:
        return  # fully_shard does it; see `check_parallel`
    check_parameters(module, policy)
    if not any(is_dtensor(parameter) for parameter in module.parameters()):
        convert_parameters(module, policy)
    keep.cast_buffers(module, policy)
    keep.keep_in_fp32(module, policy, device_type)
    refuse_unfreezing(module)


def check_parallel(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Refuse a model whose parameters are gathered, reduced or updated in other dtypes.

    Args:
        model: The model as Lightning's strategy trains it.
        policy: The policy of the plugin.

    Raises:
        ConfigError: Naming the policy of `fully_shard`, or the parameter.
    """
    refuse_deepspeed(model)
    if not any(isinstance(part, FSDPModule) for part in model.modules()):
        problem = (
            f"has {dtype_name(policy.compute_dtype)} parameters and FP32 master weights, which "
            f"need ModelParallelStrategy and fully_shard; use them, or "
            f"{dtype_word(policy.compute_dtype)}-autocast"
        )
        require(not policy.casts_parameters, "policy", policy.name, problem)
        return
    _check_fsdp2_policies(model, policy)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_sharded(name, parameter)


def refuse_deepspeed(engine: object) -> None:
    """Refuse an engine of DeepSpeed in the place of a model or an optimizer.

    Raises:
        ConfigError: For such an engine.
    """
    problem = (
        "it casts, reduces and scales on its own, so the policy and the scaler would not apply; use"
        " DDP or ModelParallelStrategy, or Lightning's own precision"
    )
    is_deepspeed = type(engine).__module__.startswith("deepspeed")
    require(not is_deepspeed, "strategy", "deepspeed", problem)


def _check_fsdp2_policies(model: nn.Module, policy: PrecisionPolicy) -> None:
    wanted = policy.compute_dtype if policy.casts_parameters else torch.float32
    for given in fsdp2_policies(model):
        gathered = given.param_dtype or torch.float32
        reduced = given.reduce_dtype or gathered
        problem = (
            f"gathers {dtype_name(gathered)} and reduces in {dtype_name(reduced)}, but the policy "
            f"{policy.name} gathers {dtype_name(wanted)} and reduces in "
            f"{dtype_name(policy.reduce_dtype)}; call fully_shard(module, "
            f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype_name(wanted)}, "
            "reduce_dtype=torch.float32))"
        )
        valid = (gathered, reduced) == (wanted, policy.reduce_dtype)
        require(valid, "mp_policy", given, problem)


def _check_sharded(name: str, parameter: Tensor) -> None:
    problem = (
        "is not sharded although other parameters are, so its gradients are not averaged over "
        "ranks; call fully_shard on the module that holds all of them, too"
    )
    require(is_dtensor(parameter), "model", name, problem)
    problem = (
        f"is sharded in {dtype_name(parameter.dtype)}, but the policy trains FP32 weights; "
        "call .float() on the model before fully_shard"
    )
    require(parameter.dtype == torch.float32, "model", name, problem)


# `Precision` of a package of Lightning, in the subclass that `MixedPrecision` creates.
_Base: Any = object
# The Trainer's and Fabric's module of each package. Their classes are separate, and a Trainer
# accepts only plugins of its own package. Its plugins are plugins of Fabric, too.
_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))


class MixedPrecision(_Base):  # type: ignore[misc]
    """Precision plugin for `Trainer(plugins=...)` and `Fabric(plugins=...)`.

    All ranks apply or skip a step together, also with sharded parameters and fused optimizers.
    Clipping uses the norm of the unscaled gradient over all ranks. In the Trainer, schedulers with
    interval "step" do not advance after a skipped step.

    The object is an instance of `Precision` of the package that is imported, `lightning` or
    `pytorch_lightning` with `lightning_fabric`. The policy sets torch's TF32 switches of the
    process until `teardown`, which the Trainer calls.

    Args:
        policy: An argument of `distmp.policy`; "16-mixed", "bf16-mixed" and "32-true" are
            `fp16-autocast`, `bf16-autocast` and `fp32`; "auto" is what the device supports. 16-bit
            parameters with FP32 master weights (`bf16`, `fp16`) need `fully_shard`.
        device: Device type of the model, "cuda" or "cpu"; None selects "cuda" if there is one.
        loss_scale: Rules of the loss scale, for float16 policies.
        max_consecutive_skips: Raise an error after this many skipped steps in a row; None never
            raises.
        package: "lightning.pytorch", "pytorch_lightning" or "lightning_fabric"; None selects the
            one that is imported.

    Attributes:
        policy: The precision policy.
        policy_reason: Why this policy was selected, as text.
        scaler: A `distmp.DistributedGradScaler` for float16 policies, otherwise None.

    Raises:
        ConfigError: If Lightning cannot implement the policy. At the first step, on all ranks: if
            the model is on another device or sharded with other dtypes than the policy's.
        ImportError: If Lightning is not installed.

    Example:
        >>> import lightning
        >>> from distmp.integrations.lightning import MixedPrecision
        >>> precision = MixedPrecision("16-mixed", "cpu")
        >>> precision.policy.name, precision.scaler.get_scale()
        ('fp16-autocast', 65536.0)
    """

    precision: str
    _package: str

    def __new__(cls, *_: Any, package: str | None = None, **__: Any) -> MixedPrecision:
        """Create an instance of a subclass that is a `Precision` of the package in use.

        The Trainer stores the state in its checkpoints under the name of the class;
        "MixedPrecision" is that of Lightning's own plugin, so its checkpoints can be resumed.
        """
        package = package or _package_in_use()
        module = importlib.import_module(f"{package}.plugins.precision")
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_package": package}
        bound: type[MixedPrecision] = type(cls.__name__, (cls, module.Precision), names)
        return object.__new__(bound)

    @argument_names()
    def __init__(
        self,
        policy: PolicyLike,
        device: str | None = None,
        *,
        loss_scale: LossScaleConfig | None = None,
        max_consecutive_skips: int | None = 50,
        package: str | None = None,
    ) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device or default).type
        self.policy, self.policy_reason = resolved(policy, torch.device(self.device))
        # Lightning displays it.
        names = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
        self.precision = names.get(self.policy.compute_dtype, "32-true")
        if unused := unused_rules(self.policy.loss_scale, loss_scale):
            logger.warning("precision %s: %s", self.policy.name, unused)
        rules = loss_scale_rules(self.policy.loss_scale, loss_scale)
        self.scaler: DeferredGradScaler | None = None
        if rules is not None:
            self.scaler = DeferredGradScaler(self.device, rules, max_consecutive_skips)
        # Clips gradients that are unscaled already.
        self._clipper = DistributedGradScaler(self.device, enabled=False)
        self._weights = StepWeights()
        self._switches = ExitStack()
        self._in_trainer = False
        self._unchecked: list[nn.Module] = []
        self._backwards = 0
        # By id of an optimizer with unscaled gradients: the value of `_backwards` at that time.
        self._unscaled: dict[int, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the subclass, for launchers that start processes."""
        return _restored, (type(self).__bases__[0], self._package, vars(self))

    def register(self, *optimizers: Optimizer) -> None:
        """Make optimizers of one backward apply or skip together; see `DistributedGradScaler`.

        Do not register optimizers that have separate backward passes, as in a GAN.
        """
        if self.scaler is not None:
            self.scaler.register(*optimizers)

    def weighted_loss(self, loss_sum: Tensor, weight: Tensor | float) -> Tensor:
        """Return the loss of a microbatch, such that a step has the gradient of the global mean.

        The gradient is that of the sum of all losses divided by the sum of all weights, over all
        microbatches and ranks of a step. Use it for every microbatch of every rank, with one
        optimizer, and do not divide the result, which causes a warning. After `zero_grad` without a
        step, the weight of the removed gradients still counts, so the next step would be too small:
        to skip a microbatch, do not call this method for it. A step waits for the device, to read
        the sum of weights.

        Args:
            loss_sum: 0-dim sum of the losses of the samples or tokens of this microbatch. A loss
                that autograd has computed as a mean causes a warning.
            weight: Number of these samples or tokens, 0 or more.

        Returns:
            The loss for backward, 0-dim; its value is the mean loss of this microbatch. If the
            weight of all microbatches and ranks is 0, the gradients are 0.

        Raises:
            ConfigError: If `loss_sum` is not a 0-dim tensor, or `weight` not one number.
        """
        loss = self._weights.loss(loss_sum, weight)
        warn_about_mean("weighted_loss", loss_sum, weight)
        return loss

    # Hooks of forward

    @argument_names()
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Apply the policy to a module; changed in place."""
        self._switches.close()
        self._switches.enter_context(keep.product_switches(self.policy))
        # Fabric does not call `teardown`, and at the end of the process torch cannot be called.
        weakref.finalize(self, self._switches.close)
        prepare_module(module, self.policy, self.device)
        self._unchecked.append(module)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast, if the policy uses it."""
        if not self.policy.autocast:
            return nullcontext()
        # Within one context of the Trainer a weight may be used with and without gradients, and
        # autocast would cache a copy without a graph.
        cache = torch.is_autocast_cache_enabled() and not self._in_trainer
        return torch.autocast(self.device, dtype=self.policy.compute_dtype, cache_enabled=cache)

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs of a Fabric module to FP32, as the policy specifies.

        A batch of the Trainer also contains targets, and stays unchanged.
        """
        if self._in_trainer or not self.policy.cast_inputs or self.policy.casts_parameters:
            return data
        return map_tensors(floating_point_cast(torch.float32), data)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs of a Fabric module to FP32."""
        return map_tensors(floating_point_cast(self.policy.output_dtype), data)

    # Hooks of backward

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the Trainer's hooks `on_before_backward`, with the loss before scaling."""
        return super().pre_backward(tensor, module) if self._in_trainer else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss."""
        kind = tensor.device.type
        problem = f"the loss is on {kind}; pass its device type"
        require(kind == self.device, "device", self.device, problem)
        self._backwards += 1
        # Lightning's automatic optimization divides by `accumulate_grad_batches`.
        automatic = self._in_trainer and model.automatic_optimization
        divided_by = model.trainer.accumulate_grad_batches if automatic else None
        self._weights.count_backward(tensor, divided_by)
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        if self._in_trainer:
            super().backward(tensor, model, *args, **kwargs)
        else:
            tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the Trainer's hooks `on_after_backward`."""
        return super().post_backward(tensor, module) if self._in_trainer else tensor

    # Hooks of the optimizer

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Prepare for the Trainer, which calls this before it trains or evaluates."""
        problem = (
            "its precision plugins have no _after_closure, where distmp unscales gradients; run pip"
            " install 'distmp[trainers]' for a version that distmp is tested with"
        )
        require(hasattr(super(), "_after_closure"), "package", None, problem)
        self._in_trainer = True
        self._unchecked = []
        self._weights, self._unscaled = StepWeights(), {}  # each `fit` has new optimizers
        check_parallel(model, self.policy)
        for config in lr_schedulers:
            by_step = config.interval == "step" and not config.reduce_on_plateau
            # With a higher frequency, one skipped step would omit those of all batches between.
            if self.scaler is not None and by_step and config.frequency == 1:
                _follow(config.scheduler, self.scaler)
        return model, optimizers, lr_schedulers

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the optimizer, or skip the step on all ranks."""
        refuse_deepspeed(optimizer)  # Fabric passes the engine
        while self._unchecked:  # Fabric shards modules after `convert_module`
            check_parallel(self._unchecked.pop(), self.policy)
        self._check_closure(optimizer)
        step = self._step_in_trainer if self._in_trainer else self._step_in_fabric
        try:
            return step(optimizer, **kwargs)
        finally:
            self._weights.begin_step()

    def _step_in_fabric(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        def compute() -> Any:
            result = None if closure is None else closure()
            self._check_closure(optimizer)  # the closure may be the first to use `weighted_loss`
            self._weights.compare_use()
            if self._weights.in_use:
                self.unscale_gradients(optimizer)
                self._unscaled.pop(id(optimizer), None)
            return result

        if closure is not None and self.scaler is None:
            return optimizer.step(compute)
        result = compute()
        output = self._step(optimizer)
        return output if closure is None else result

    def _check_closure(self, optimizer: Any) -> None:
        weighted = self._weights.in_use and not self._in_trainer
        problem = (
            "computes several gradients in one step, which can be neither scaled nor weighted; use "
            "bf16-autocast or fp32 and mean losses"
        )
        valid = not isinstance(optimizer, LBFGS) or not (self.scaler is not None or weighted)
        require(valid, "optimizer", type(optimizer).__name__, problem)

    def _step_in_trainer(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:  # its closure calls `_after_closure`
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # there was no loss
            return None
        self._after_closure(model, optimizer)
        return self._step(optimizer, **kwargs)

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Unscale gradients, call the Trainer's hooks `on_before_optimizer_step`, and clip.

        The Trainer has no public hook between backward and these hooks, which read gradients.
        """
        self.unscale_gradients(optimizer)
        super()._after_closure(model, optimizer)
        if self.scaler is None:
            self._unscaled.pop(id(optimizer), None)

    def _step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._check_unscaled(optimizer)
        self._unscaled.pop(id(optimizer), None)
        if self.scaler is None:
            return optimizer.step(**kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    # Gradients

    def main_params(self, optimizer: Any) -> Iterator[Tensor]:
        """Yield the parameters to clip: none if all ranks will skip the step.

        Fabric clips by default with torch's `error_if_nonfinite=True`, and the first overflow of a
        dynamic loss scale would end the run.
        """
        unscaled = id(optimizer) in self._unscaled
        if unscaled and self.scaler is not None and self.scaler.will_skip(optimizer):
            return
        yield from parameters(optimizer)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the norm of the unscaled gradient over all ranks, for the Trainer."""
        self.unscale_gradients(unwrapped(optimizer))
        self._clipper.clip_grad_norm_(unwrapped(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each value of the unscaled gradient, for the Trainer."""
        self.unscale_gradients(unwrapped(optimizer))
        super().clip_grad_by_value(unwrapped(optimizer), clip_val)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale gradients and divide them by the weights, unless that was done for this step.

        Fabric calls it before it clips gradients.
        """
        self._weights.compare_use()
        if self.scaler is None and not self._weights.in_use:
            return
        if id(optimizer) in self._unscaled:
            self._check_unscaled(optimizer)
            return
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        self._weights.divide(optimizer)
        self._unscaled[id(optimizer)] = self._backwards

    def _check_unscaled(self, optimizer: Any) -> None:
        if self._unscaled.get(id(optimizer), self._backwards) != self._backwards:
            raise TrainingError(
                f"a backward followed after the gradients of {type(optimizer).__name__} were "
                "unscaled for clipping, so they are a mix of scaled and unscaled ones; step every "
                "optimizer that was clipped before the next backward (after an overflow, step() "
                "skips the step itself)"
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty for a policy without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this plugin, or of Lightning's for float16."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Restore torch's TF32 switches."""
        self._switches.close()


def _package_in_use() -> str:
    imported = [next((m for m in both if m in sys.modules), None) for both in _PACKAGES]
    found = [module for module in imported if module is not None]
    problem = (
        f"{' and '.join(found) or 'no package of Lightning'} is imported, and classes of its "
        "packages differ; import Trainer or Fabric first, or pass package='lightning.pytorch' or "
        "package='pytorch_lightning', from which you import it"
    )
    require(len(found) == 1, "package", None, problem)
    return found[0]


def _restored(cls: type[MixedPrecision], package: str, state: dict[str, Any]) -> MixedPrecision:
    plugin = cls.__new__(cls, package=package)
    plugin.__dict__.update(state)
    return plugin


def _follow(scheduler: Any, scaler: DeferredGradScaler) -> None:
    """Make `scheduler.step` do nothing after a skipped step of its optimizer.

    The class changes and not the object, because a scheduler stores its attributes in checkpoints.
    """
    original = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        # The optimizer may be inside of the one that the scaler steps.
        known = id(self.optimizer) in scaler._flags
        if not (scaler.was_skipped(self.optimizer) if known else scaler.step_skipped):
            original.step(self, *args, **kwargs)

    names = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    scheduler.__class__ = type(original.__name__, (original,), names)
