"""The Trainer's strategy for 16-bit parameters with FP32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from distmp.distributed.world import World
from distmp.errors import ConfigError, nearest
from distmp.integrations.lightning.conversion import Conversion
from distmp.integrations.lightning.packages import bound_class, package_in_use, strategy_class
from distmp.integrations.lightning.precision import MixedPrecision
from distmp.integrations.lightning.replica import MasterWeightsReplica
from distmp.precision.builders import prepare

# The arguments of Lightning's DDPStrategy that do not configure torch's DistributedDataParallel.
_ARGUMENTS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)

# Callbacks of Lightning that compare parameters of the model with those of the optimizer, or write
# to them.
_CALLBACKS = {"BaseFinetuning", "StochasticWeightAveraging", "WeightAveraging"}


class MasterWeightsStrategy:
    """Data parallelism with 16-bit parameters, FP32 master weights and FP32 sums of gradients.

    For `Trainer(strategy=MasterWeightsStrategy(), plugins=MixedPrecision("bf16"))`. The gradients
    of all microbatches are accumulated in FP32 buckets and reduced over ranks in FP32, once per
    step. The optimizer steps FP32 master weights, which are rounded to the model's 16-bit
    parameters after each step. `configure_optimizers` gets the model's parameters as usual; the
    strategy replaces them in the optimizers by their master weights.

    Checkpoints have the FP32 weights under the model's names, and after `fit` the model has FP32
    parameters again. So checkpoints of `strategy="ddp"` with FP32 weights can be resumed, and the
    other way round.

    The object is an instance of Lightning's `DDPStrategy` of the package that is imported.

    Args:
        package: "lightning" or "pytorch_lightning"; None selects the one that is imported.
        **arguments: Arguments of Lightning's `DDPStrategy`, except those of torch's
            `DistributedDataParallel`, which the FP32 buckets replace.

    Raises:
        ConfigError: If an argument configures `DistributedDataParallel`. In `fit`, on all ranks:
            without a `MixedPrecision` plugin with 16-bit parameters, with manual optimization, or
            if an optimizer cannot step master weights.
        ImportError: If Lightning is not installed.
    """

    # Lightning's class and its attributes; `bound_class` sets the first.
    _base: Any
    precision_plugin: Any
    lightning_module: Any
    optimizers: Any
    root_device: Any

    def __new__(cls, *, package: str | None = None, **_: Any) -> MasterWeightsStrategy:
        """Create an instance of a subclass that is a `DDPStrategy` of the package in use."""
        package = package_in_use(package)
        return object.__new__(bound_class(cls, strategy_class(package), package))

    def __init__(self, *, package: str | None = None, **arguments: Any) -> None:
        _check_arguments(arguments)
        self._replica: MasterWeightsReplica | None = None
        self._conversion: Conversion | None = None
        self._last = True
        self._base.__init__(self, **arguments)

    # Set-up, in the order of calls

    def setup(self, trainer: Any) -> None:
        """Set up the model and, to train, its optimizers."""
        plugin = self.precision_plugin
        if not (isinstance(plugin, MixedPrecision) and plugin.policy.casts_parameters):
            given = getattr(plugin, "policy", plugin)
            raise ConfigError(
                "plugins",
                getattr(given, "name", type(given).__name__),
                "has no 16-bit parameters with FP32 master weights; pass plugins=MixedPrecision("
                "'bf16') or 'fp16' of distmp, or use strategy='ddp'",
            )
        _check_callbacks(trainer.callbacks)
        plugin.leave_conversion_to_strategy()
        self._base.setup(self, trainer)
        if self._conversion is None:  # to evaluate
            self._convert_to_evaluate()

    def configure_ddp(self) -> None:
        """Convert the model and put its gradients into FP32 buckets, instead of wrapping it."""
        if not self.lightning_module.automatic_optimization:
            raise ConfigError(
                "automatic_optimization",
                False,
                "lets training_step call backward in any order, but MasterWeightsStrategy has to "
                "know the last microbatch of a step; use strategy='ddp' with an autocast policy, "
                "or distmp.Engine",
            )
        world = World.current(self.root_device)
        policy = self.precision_plugin.policy
        self._replica = MasterWeightsReplica(self.lightning_module, policy, world)
        self._conversion = self._replica.conversion

    def setup_optimizers(self, trainer: Any) -> None:
        """Call `configure_optimizers`, and let the optimizers step the master weights."""
        self._base.setup_optimizers(self, trainer)
        self._running.step_masters(self.optimizers)

    def _convert_to_evaluate(self) -> None:
        module, policy = self.lightning_module, self.precision_plugin.policy
        self._conversion = Conversion(
            module,
            policy,
            module.parameters(),
            lambda: prepare(module, policy, self.root_device.type),
        )

    # A step

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return the context of all microbatches of a step but the last."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a microbatch."""
        self._running.begin_microbatch()
        return self._base.training_step(self, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a microbatch; the last one reduces the gradients over ranks."""
        module, plugin = self.lightning_module, self.precision_plugin
        loss = plugin.pre_backward(closure_loss, module)
        with self._running.backward(loss, last=self._last):
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        result: Tensor = plugin.post_backward(loss, module)  # `on_after_backward` sees the mean
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step the master weights, or skip the step on all ranks, and update the parameters."""
        self._running.begin_optimizer_step()
        output = self._base.optimizer_step(self, optimizer, closure, model, **kwargs)
        scaler = self.precision_plugin.scaler
        self._running.end_step(None if scaler is None else scaler.latest_found_inf)
        return output

    def on_train_end(self) -> None:
        """Refuse weights that a callback has written, because `teardown` would drop them."""
        self._running.check_model()

    @property
    def _running(self) -> MasterWeightsReplica:
        assert self._replica is not None  # the Trainer has called `setup` to fit
        return self._replica

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model with FP32 weights."""
        with nullcontext() if self._conversion is None else self._conversion.in_fp32():
            state: dict[str, Any] = self._base.lightning_module_state_dict(self)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of the model, also into the master weights."""
        with nullcontext() if self._conversion is None else self._conversion.in_fp32():
            self._base.load_model_state_dict(self, checkpoint, strict=strict)
        if self._replica is not None:
            self._replica.publish()

    def teardown(self) -> None:
        """Give the model its FP32 weights, and end as Lightning's strategy does."""
        if self._conversion is not None:
            self._conversion.undo()
        self._conversion = self._replica = None
        self._base.teardown(self)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _ARGUMENTS:
            raise ConfigError(
                name,
                value,
                "is no argument of MasterWeightsStrategy, which has FP32 buckets instead of "
                f"torch's DistributedDataParallel; {nearest(name, _ARGUMENTS)}",
            )
    start_method = arguments.get("start_method", "popen")
    if start_method not in ("popen", "fork"):
        raise ConfigError("start_method", start_method, "cannot be pickled; use 'popen' or 'fork'")


def _check_callbacks(callbacks: Iterable[object]) -> None:
    for callback in callbacks:
        if any(base.__name__ in _CALLBACKS for base in type(callback).__mro__):
            raise ConfigError(
                "callbacks",
                type(callback).__name__,
                "looks for the model's parameters in the optimizer or writes to them, but the "
                "optimizer steps FP32 master weights; use strategy='ddp' with an autocast policy",
            )
