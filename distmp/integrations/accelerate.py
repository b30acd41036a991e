"""Hugging Face accelerate with distmp's policies and loss scaling.

accelerate has one setting for precision, `mixed_precision`. It means autocast with DDP; autocast,
16-bit parameters and 16-bit reduction with FSDP1; and the latter two with FSDP2. This module sets
every field as the policy requires, or refuses the policy.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from distmp.distributed.rank_environment import PRECISION_VARIABLE, is_true, wants_cpu
from distmp.errors import ConfigError, argument_names, nearest, require
from distmp.integrations.deferred_scaler import DeferredGradScaler
from distmp.parallel.strategy import check_parameters
from distmp.precision import PolicyLike, PrecisionPolicy, Resolution, builders, resolve
from distmp.precision.keep import cast_buffers, keep_in_fp32, modules_in_fp32, product_switches
from distmp.precision.notation import resolve_without_masters
from distmp.precision.policy import PRESETS, SIXTEEN_BIT, dtype_word
from distmp.scaling.grad_scaler import refuse_closure
from distmp.scaling.local_gradients import local_gradients, parameters
from distmp.scaling.reduced_flags import GradientVersions
from distmp.scaling.settings import LossScaleConfig, loss_scale_rules, unused_rules
from distmp.utils.autograd import leaves_of
from distmp.utils.dtypes import dtype_name
from distmp.utils.tensor_trees import refuse_shared_memory

try:
    import accelerate
    from accelerate import utils
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ImportError(
        "distmp.integrations.accelerate needs accelerate; run pip install 'distmp[hf]'"
    ) from None

logger = logging.getLogger("distmp")

# Engines that change gradients and loss without the policy and the scaler.
_OTHER_ENGINES = ("deepspeed", "megatron_lm")
# accelerate's `mixed_precision` by the dtype of compute, and the policy for each of its values.
POLICIES = {"no": "fp32", "bf16": "bf16-autocast", "fp16": "fp16-autocast"}
# For models whose parameters became float32.
_HINT = "; policy='bf16-pure,accumulate=bf16' trains bfloat16 parameters as they are"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` with a precision policy and distributed loss scaling.

    A drop-in replacement: a script only changes the import. `mixed_precision` (an argument, an
    option of `accelerate launch`, or an environment variable) selects a policy: "no" is `fp32`,
    "bf16" is `bf16-autocast`, "fp16" is `fp16-autocast`. `policy` selects any other policy, and
    also works with FSDP.

    With a float16 policy `scaler` is a `distmp.DistributedGradScaler`: all ranks apply or skip a
    step together. `step_was_skipped` is correct for fused optimizers, too, so that schedulers do
    not advance, and float16 works on the CPU, where accelerate silently computes in float32.

    Optimizers of one model can be registered to be skipped together:
    `accelerator.scaler.register(...)`. The scale is updated when the next backward starts, once for
    all of them. A scale that cannot be lowered further raises at that time.

    `policy` sets the use of TF32 in the process until `end_training`. With `mixed_precision` the
    setting of the process stays, as in accelerate.

    Args:
        policy: An argument of `distmp.policy` (name of a preset, text, a mapping), a
            `PrecisionPolicy`, or "auto" for what the device supports. None uses `mixed_precision`.
        loss_scale: Rules of the loss scale, for float16 policies.
        max_consecutive_skips: Raise an error after this many skipped steps in a row; None never
            raises.
        **arguments: Keyword arguments of `accelerate.Accelerator`.

    Attributes:
        policy: The precision policy.
        policy_reason: Why this policy was selected, as text.

    Raises:
        ConfigError: If both `policy` and `mixed_precision` are given, or accelerate cannot
            implement the policy. At the step of an optimizer that was not prepared, if a prepared
            model or a loss before the first step has its parameters: their gradients are
            multiplied by the loss scale.

    Example:
        >>> accelerator = Accelerator(mixed_precision="bf16")
        >>> accelerator.policy.name
        'bf16-autocast'
    """

    @argument_names()
    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        loss_scale: LossScaleConfig | None = None,
        max_consecutive_skips: int | None = 50,
        **arguments: Any,
    ) -> None:
        _refuse_other_precision(arguments, policy)
        shards = arguments.get("fsdp_plugin") is not None or is_true("ACCELERATE_USE_FSDP")
        if not torch.accelerator.is_available():
            arguments["cpu"] = True  # otherwise accelerate does not connect CPU ranks
        on_cpu = bool(arguments.get("cpu")) or wants_cpu(os.environ)
        device = torch.device("cuda" if torch.cuda.is_available() and not on_cpu else "cpu")
        self.policy, self.policy_reason = (
            _from_mixed_precision(arguments.get("mixed_precision"), device)
            if policy is None
            else (resolve if shards else resolve_without_masters)(policy, device)
        )
        rules = loss_scale_rules(self.policy.loss_scale, loss_scale)
        arguments["mixed_precision"] = mixed_precision(self.policy)
        arguments["kwargs_handlers"] = [
            *(arguments.get("kwargs_handlers") or ()),
            utils.AutocastKwargs(enabled=self.policy.autocast),
        ]
        if shards:
            arguments["fsdp_plugin"] = fsdp_plugin(self.policy, arguments.get("fsdp_plugin"))
        else:
            check_replicated(self.policy)
        if AcceleratorState._shared_state:
            _check_shared(AcceleratorState().mixed_precision, self.policy)
        if policy is not None:
            _warn_of_launched(arguments["mixed_precision"], self.policy)
        super().__init__(**arguments)
        problem = (
            "accelerate shards only on several GPUs, and would train a whole model on each rank;"
            " remove it, or use distmp.Engine, which shards on CPUs too"
        )
        require(self.shards or not shards, "fsdp_plugin", "in use", problem)
        self.state.distmp_policy = self.policy  # for other Accelerators of this process
        unused = unused_rules(self.policy.loss_scale, loss_scale)
        if unused and self.is_main_process:
            logger.warning("precision %s: %s", self.policy.name, unused)
        self._switches = ExitStack()
        if rules is not None:
            # Gradients outside of prepared models that have the loss scale, with their versions, by
            # the parameters that losses before the first step use.
            self._scaled = WeakTensorKeyDictionary()
            self._switches.callback(_watch_steps(self))
            self.native_amp = True  # accelerate does not set it on the CPU
            self.scaler = DeferredGradScaler(self.device.type, rules, max_consecutive_skips)
        self._follows = policy is None
        if not self._follows:
            self._switches.enter_context(product_switches(self.policy))
            # Many scripts do not call `end_training`, and at the end torch cannot be called.
            atexit.register(self._switches.close)

    @property
    def shards(self) -> bool:
        """Whether FSDP shards the models."""
        return bool(self.distributed_type == utils.DistributedType.FSDP)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers and other objects, as accelerate does."""
        if self.is_fsdp2:
            for module in args:
                if isinstance(module, nn.Module) and not isinstance(module, FSDPModule):
                    self._prepare_for_fsdp2(module)
        return super().prepare(*args, device_placement=device_placement)

    @argument_names()
    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model: the policy sets dtypes of parameters, inputs, compute and outputs."""
        _check_shared(self.mixed_precision, self.policy)
        if not getattr(model, "_is_accelerate_prepared", False):
            self._check_model(model)
            if self.shards:
                prepare_to_shard(model, self.policy, self.device.type, mixed_dtypes=self.is_fsdp2)
            else:
                builders.prepare(model, self.policy, self.device.type)
                if not evaluation_mode:
                    builders.refuse_unfreezing(model)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        if isinstance(prepared, DistributedDataParallel):
            hook = builders.ddp_comm_hook(self.policy)
            if hook is not None:
                prepared.register_comm_hook(None, hook)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer, with an exact `step_was_skipped` for a float16 policy."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if isinstance(self.scaler, DeferredGradScaler):
            prepared.__class__ = _ScaledOptimizer
        return prepared

    def no_sync(self, model: nn.Module) -> Any:
        """Sum gradients without reducing them, if FSDP sums them as the policy does."""
        if self.shards:
            _check_sums(self.policy, 2 if self.is_fsdp2 else 1)
        return super().no_sync(model)

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Run backward; with a loss scale, before the first step, note what is scaled."""
        _check_shared(self.mixed_precision, self.policy)
        super().backward(loss, **arguments)
        if self.policy.loss_scale is not None:
            first = self.scaler._latest_found_inf is None
            if first:
                others = leaves_of(loss).keys() - self._parameters_of_models()
                self._scaled.update(dict.fromkeys(others))
            for leaf in [*self._scaled]:
                if leaf.grad is not None:
                    self._scaled[leaf] = weakref.ref(leaf.grad), leaf.grad._version
            for optimizer in self._optimizers:
                optimizer.watch_gradients(first)

    def clip_grad_norm_(self, parameters: Any, *positional: Any, **arguments: Any) -> Any:
        """Clip the norm, as accelerate does, but unscale only optimizers with these parameters."""
        return self._clip(super().clip_grad_norm_, parameters, *positional, **arguments)

    def clip_grad_value_(self, parameters: Any, *positional: Any, **arguments: Any) -> None:
        """Clip values, as accelerate does, but unscale only optimizers with these parameters."""
        self._clip(super().clip_grad_value_, parameters, *positional, **arguments)

    def _clip(self, clip: Callable[..., Any], clipped: Any, *positional: Any, **named: Any) -> Any:
        # Old gradients of an optimizer with a backward of its own would take part in the decision.
        clipped = [clipped] if isinstance(clipped, Tensor) else list(clipped)
        members = {*clipped}
        having = [each for each in self._optimizers if not members.isdisjoint(parameters(each))]
        with mock.patch.object(self, "_optimizers", having):
            return clip(clipped, *positional, **named)

    def load_state(self, *positional: Any, **arguments: Any) -> None:
        """Load a state; without that of a scaler, the loss scale starts anew."""
        try:
            super().load_state(*positional, **arguments)
        except FileNotFoundError as error:
            if not str(error.filename).endswith(utils.SCALER_NAME):
                raise
            logger.warning("%s is missing, so the loss scale starts anew", error.filename)
            with mock.patch.object(self, "scaler", None):
                super().load_state(*positional, **arguments)
            initial = {"scale": self.scaler._rules.init, "_growth_tracker": 0}
            self.scaler.load_state_dict(initial)

    def end_training(self) -> None:
        """End training, as accelerate does, and restore torch's TF32 switches."""
        # Keep a reference to the process group until the process ends. With torch 2.13, destroying
        # a gloo group deadlocks if torch's DDP holds the last reference: it holds the interpreter
        # lock and waits for a gloo thread that needs the lock.
        atexit.register(lambda group: None, dist.group.WORLD)
        super().end_training()
        self._switches.close()
        atexit.unregister(self._switches.close)

    def _refuse_scaled_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step whose gradients did not go through the scaler."""
        unscaled = [checked.optimizer for checked in self.scaler._inspected.values()]
        if optimizer in unscaled or not self.scaler.has_scaled_gradients:
            return
        # With FSDP, the parameters of models are no leaves of the loss.
        trained = self._parameters_of_models()
        # An optimizer may be inside of another one.
        known = {parameter for each in unscaled for parameter in parameters(each)}
        own = {p for p in parameters(optimizer) if p.grad is not None} - known
        scaled = [
            parameter for parameter in own if parameter in trained or self._is_scaled(parameter)
        ]
        problem = "its gradients are multiplied by the loss scale; pass it to accelerator.prepare"
        valid = not scaled or _only_creates_states(optimizer)
        require(valid, "optimizer", type(optimizer).__name__, problem)

    def _parameters_of_models(self) -> set[nn.Parameter]:
        return {parameter for model in self._models for parameter in model.parameters()}

    def _is_scaled(self, parameter: Tensor) -> bool:
        """Return whether a gradient outside of the models is that of the latest scaled backward."""
        seen, version = self._scaled.get(parameter) or (lambda: None, 0)
        gradient = parameter.grad
        return gradient is not None and (id(gradient), gradient._version) == (id(seen()), version)

    def _check_model(self, model: nn.Module) -> None:
        check_parameters(model, self.policy)
        if self._follows:
            hint = _HINT if any(p.dtype is torch.bfloat16 for p in model.parameters()) else ""
            builders.convert_parameters(model, self.policy, hint, quiet=not self.is_main_process)

    def _prepare_for_fsdp2(self, module: nn.Module) -> None:
        """Prepare the model and apply autocast, which accelerate does only for DDP and FSDP1."""
        self._check_model(module)
        prepare_to_shard(module, self.policy, self.device.type, mixed_dtypes=True)
        if self.policy.autocast:
            module.forward = builders.autocast_context(self.policy, self.device)(module.forward)  # type: ignore[operator]


def _watch_steps(accelerator: Accelerator) -> Callable[[], None]:
    """Watch all optimizers of the process, because others may have the parameters."""
    owner = weakref.ref(accelerator)

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if (accelerator := owner()) is not None:
            accelerator._refuse_scaled_step(optimizer)

    return register_optimizer_step_pre_hook(refuse).remove


def _only_creates_states(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether learning rates are 0, as in the step with which torch creates states."""
    return all(group.get("lr", 1) == 0 for group in optimizer.param_groups)


class _ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Reads from the scaler whether a step was skipped.

    accelerate checks whether `optimizer.step` was called, but a fused optimizer is always called
    and skips on the device.
    """

    _watched: GradientVersions | None = None

    def watch_gradients(self, watches: bool) -> None:
        """Remember the gradients after a backward until the next one or a step, or forget them."""
        now = GradientVersions(self.optimizer, local_gradients(self.optimizer)) if watches else None
        self._watched = now

    def step(self, closure: Any = None) -> None:
        refuse_closure(closure)
        state = self.scaler._per_optimizer_states[id(self.optimizer)]
        has_scaled = self.scaler.has_scaled_gradients and state["stage"] is not OptState.STEPPED
        if not has_scaled and _only_creates_states(self.optimizer):
            self.optimizer.step()  # no iteration, unlike the first step of a warmup from 0
            return
        watched, self._watched = self._watched, None
        is_scaled = id(self.optimizer) not in self.scaler._inspected
        if watched and is_scaled and not watched.are_unchanged():
            logger.warning(
                "gradients of %s changed between backward and step while they were multiplied by"
                " the loss scale; clip them with accelerator.clip_grad_norm_",
                type(self.optimizer).__name__,
            )
        super().step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped, the same on all ranks. Waits for the device."""
        return self.scaler.was_skipped(self.optimizer)


def _from_mixed_precision(argument: Any, device: torch.device) -> Resolution:
    """Return the policy for `mixed_precision`, which is read from the same place as in accelerate.

    Args:
        argument: The argument of the Accelerator; None if it was not given.
        device: The device of the rank.
    """
    if argument is not None:
        setting, word = "mixed_precision", str(argument)
    elif AcceleratorState._shared_state:  # this is not the first Accelerator of the process
        first = AcceleratorState()
        if hasattr(first, "distmp_policy"):
            return Resolution(first.distmp_policy, "that of the first Accelerator")
        setting, word = "mixed_precision of the first Accelerator", first.mixed_precision
    else:
        setting = PRECISION_VARIABLE
        word = os.environ.get(PRECISION_VARIABLE, "no").lower()
    resolution = resolve(policy_of(word, setting), device)
    reason = resolution.reason.replace("given", f"{setting} = {word!r}", 1)
    return Resolution(resolution.policy, reason)


def _refuse_other_precision(arguments: Mapping[str, Any], policy: PolicyLike | None) -> None:
    """Refuse arguments that would override the policy or the scaler."""
    word, problem = arguments.get("mixed_precision"), f"policy = {policy!r} is given as well"
    one = word is None or policy is None
    require(one, "mixed_precision", str(word), f"{problem}; give one of the two")
    problem = (
        "it casts, reduces and scales on its own, so the policy and the scaler would not apply; use"
        " DDP or FSDP, or accelerate's own Accelerator"
    )
    for engine in _OTHER_ENGINES:
        plugins = (arguments.get(f"{engine}_plugin"), arguments.get(f"{engine}_plugins"))
        used = plugins != (None, None) or is_true(f"ACCELERATE_USE_{engine.upper()}")
        require(not used, f"{engine}_plugin", "in use", problem)
    for handler in arguments.get("kwargs_handlers") or ():
        _check_handler(handler)


def _check_handler(handler: utils.KwargsHandler) -> None:
    name = type(handler).__name__
    hook = getattr(handler, "comm_hook", utils.DDPCommunicationHookType.NO)
    if isinstance(handler, utils.AutocastKwargs):
        problem = "the policy defines autocast; remove it"
    elif isinstance(handler, utils.GradScalerKwargs):
        problem = "pass loss_scale=distmp.LossScaleConfig(...) instead"
    elif "Recipe" in name:
        problem = "policies have no 8-bit types; remove it"
    elif hook != utils.DDPCommunicationHookType.NO:
        name = f"{name}(comm_hook={hook})"
        problem = "the policy reduces gradients in float32, this hook does not; remove it"
    else:
        return
    raise ConfigError("kwargs_handlers", name, problem)


def _check_shared(used: str, policy: PrecisionPolicy) -> None:
    """Refuse another precision than that of accelerate's state, which all Accelerators share."""
    problem = (
        f"accelerate has one precision per process, and another Accelerator uses {used!r}; use"
        " another process, or with Transformers, train before you create the next TrainingArguments"
    )
    require(used == mixed_precision(policy), "precision.policy", policy.name, problem)


def _warn_of_launched(used: str, policy: PrecisionPolicy) -> None:
    """Warn that a policy overrides another precision of `accelerate launch`."""
    launched = os.environ.get(PRECISION_VARIABLE, "no")
    if launched not in ("no", used):
        message = "accelerate was launched with mixed_precision %s; the policy %s overrides it"
        logger.warning(message, launched, policy.name)


def policy_of(word: str, setting: str = "mixed_precision") -> PrecisionPolicy:
    """Return the policy for a value of accelerate's `mixed_precision`; it has FP32 weights.

    Args:
        word: "no", "bf16" or "fp16".
        setting: Name of the setting, for the message.

    Raises:
        ConfigError: For other values, such as "fp8", which only distmp.Engine computes.
    """
    require(word in POLICIES, setting, word, nearest(word, POLICIES))
    return PRESETS[POLICIES[word]]


def mixed_precision(policy: PrecisionPolicy) -> str:
    """Return accelerate's `mixed_precision` for a policy: "no", "bf16" or "fp16".

    With "bf16" or "fp16" accelerate updates FP32 weights, which a pure policy does not have.

    Raises:
        ConfigError: If outputs have 16 bits, which accelerate casts to FP32, the loss is scaled for
            FP32 compute, which accelerate would not unscale, weights are rounded stochastically,
            which only the engine configures, or matrix products have fewer bits.
    """
    builders.refuse_low_precision_matmuls(policy)
    problem = "remove it, and pass stochastic_rounding=True to distmp.optim.AdamW"
    setting = "precision.policy.stochastic_rounding"
    require(not policy.stochastic_rounding, setting, True, problem)
    if not (policy.autocast or policy.has_masters):
        scale = policy.loss_scale
        problem = "accelerate unscales gradients only for float16 compute; use reduce=fp32"
        require(scale is None, "precision.policy.loss_scale", scale, problem)
        return "no"
    output = policy.output_dtype
    problem = "accelerate returns outputs in float32; use output=fp32, and cast in your loss"
    require(output == torch.float32, "precision.policy.output", output, problem)
    return dtype_word(policy.compute_dtype)


def check_replicated(policy: PrecisionPolicy) -> None:
    """Refuse a policy with FP32 master weights or FP32 sums for 16-bit parameters.

    Raises:
        ConfigError: For such a policy; the message suggests another one.
    """
    problem = (
        f"has {dtype_name(policy.compute_dtype)} parameters and FP32 master weights, which"
        " accelerate supports only with FSDP; use a policy with autocast, or distmp.Engine"
    )
    require(not policy.has_masters, "precision.policy", policy.name, problem)
    builders.ddp_comm_hook(policy)


def fsdp_plugin(
    policy: PrecisionPolicy,
    plugin: utils.FullyShardedDataParallelPlugin | None = None,
) -> utils.FullyShardedDataParallelPlugin:
    """Set the precision of a policy in a plugin, for FSDP1 and FSDP2.

    `prepare_to_shard` applies the parts that FSDP does not implement.

    Args:
        policy: The precision policy.
        plugin: Plugin with all other settings of FSDP; None uses accelerate's defaults and
            environment variables.

    Returns:
        The plugin, with the reduction dtype of the policy in place of accelerate's 16-bit default.

    Raises:
        ConfigError: If the plugin has another precision.
    """
    plugin = utils.FullyShardedDataParallelPlugin() if plugin is None else plugin
    build = builders.fsdp2_policy if plugin.fsdp_version == 2 else builders.fsdp1_policy
    precision = build(policy)
    given = plugin.mixed_precision_policy
    problem = f"the policy {policy.name} sets it to {precision}; remove it"
    require(given in (None, precision), "fsdp_plugin.mixed_precision_policy", given, problem)
    plugin.mixed_precision_policy = precision
    return plugin


def prepare_to_shard(
    module: nn.Module, policy: PrecisionPolicy, device_type: str, *, mixed_dtypes: bool
) -> None:
    """Apply the parts of a policy that FSDP does not implement, before it shards a module.

    Args:
        module: The root module; changed in place.
        policy: The precision policy.
        device_type: Device type of the module: "cuda", "cpu".
        mixed_dtypes: Whether the parameters of a shard may have several dtypes, as in FSDP2.
            Frozen 16-bit parameters then keep their dtype if the policy computes in 16 bits. FSDP1
            needs one dtype.

    Raises:
        ConfigError: If the policy keeps modules in FP32 among 16-bit parameters: accelerate shards
            all modules in the same way. If parameters share memory, which FSDP separates.
    """
    refuse_shared_memory(module, "fsdp_plugin", "in use")
    if policy.casts_parameters and (kept := modules_in_fp32(module, policy)):
        problem = (
            f"keeps {next(iter(kept))} in FP32 among {dtype_name(policy.compute_dtype)} parameters,"
            " but accelerate shards all modules in the same way; use a policy with autocast, or"
            " distmp.Engine"
        )
        raise ConfigError("precision.policy", policy.name, problem)
    keeps_frozen = mixed_dtypes and policy.compute_dtype in SIXTEEN_BIT
    for parameter in module.parameters():
        unchanged = keeps_frozen and parameter.dtype in SIXTEEN_BIT and not parameter.requires_grad
        if parameter.is_floating_point() and not unchanged:
            parameter.data = parameter.data.to(policy.param_dtype)
    cast_buffers(module, policy)
    keep_in_fp32(module, policy, device_type)
    builders.cast_inputs_and_outputs(module, policy)


def _check_sums(policy: PrecisionPolicy, version: int) -> None:
    """Refuse to sum microbatches, before their reduction, in another dtype than the policy's."""
    unreduced = policy.reduce_dtype if version == 2 else policy.module_dtype
    problem = (
        f"FSDP{version} would sum microbatches in {dtype_name(unreduced)}, the policy "
        f"{policy.name} in {dtype_name(policy.accumulate_dtype)}; set it to True"
    )
    setting = "gradient_accumulation_plugin.sync_each_batch"
    require(unreduced == policy.accumulate_dtype, setting, False, problem)
