"""The trainers of Transformers and TRL with distmp's policies, scaler and global means."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import TrainingError, require
from distmp.integrations.accelerate import Accelerator
from distmp.integrations.deferred_scaler import DeferredGradScaler
from distmp.parallel.global_mean import is_sum
from distmp.precision import PolicyLike, PrecisionPolicy
from distmp.scaling.settings import LossScaleConfig

try:
    import transformers
    import transformers.trainer
    from transformers.trainer_pt_utils import find_batch_size
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "distmp.integrations.transformers needs transformers; run pip install 'distmp[trainers]'"
    ) from None

if TYPE_CHECKING:
    _TrainerBase = transformers.Trainer
else:
    _TrainerBase = object

logger = logging.getLogger("distmp")

_IGNORED_LABEL = -100
# Under a policy without a loss scale, the scaler only skips steps with non-finite gradients.
_UNSCALED = LossScaleConfig(dynamic=False, init=1.0)


class TrainerMixin(_TrainerBase):
    """Adds distmp to a trainer of Transformers or TRL: `class MyTrainer(TrainerMixin, SFTTrainer)`.

    - `policy` sets all dtypes. Without it, `bf16` and `fp16` of the training arguments or
      `ACCELERATE_MIXED_PRECISION` select `bf16-autocast` and `fp16-autocast`, otherwise `fp32`.
    - The gradient is that of the mean over all labels (without labels: samples) of all microbatches
      and ranks. `compute_loss` returns the mean of one microbatch, which the mixin weights.
    - All ranks apply or skip a step together, under every policy. A skipped step does not advance
      the learning rate schedule. The log shows `skipped_steps` and, with a loss scale,
      `loss_scale`.
    - Gradients are accumulated and reduced in the dtypes of the policy, FP32 in every preset, under
      DDP and FSDP.

    A trainer that declares `loss_is_scaled_for_ga = True`, such as `GRPOTrainer`, divides its loss
    by global counts itself. The mixin does not change its loss.

    Args:
        *positional: Positional arguments of the trainer.
        policy: An argument of `distmp.policy`, a `PrecisionPolicy` or "auto"; see
            `distmp.integrations.accelerate.Accelerator`.
        loss_scale: Rules of the loss scale, for float16 policies.
        max_consecutive_skips: Raise an error after this many skipped steps in a row; None never
            raises.
        **arguments: Keyword arguments of the trainer.

    Raises:
        ConfigError: If accelerate cannot implement the policy, if `bf16` or `fp16` are set as well,
            or if a training argument bypasses the policy, the scaler or the mean over ranks.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
        >>> from distmp.integrations.transformers import TrainerMixin
        >>> class MyTrainer(TrainerMixin, Seq2SeqTrainer): ...
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
        >>> arguments = Seq2SeqTrainingArguments("runs/tiny", use_cpu=True, report_to=[])
        >>> MyTrainer(LlamaForCausalLM(config), arguments, policy="bf16-autocast").policy.name
        'bf16-autocast'
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        order, trainer = cls.__mro__, transformers.Trainer
        first = trainer not in order or order.index(trainer) > order.index(TrainerMixin)
        problem = "would use the methods of the trainer; name TrainerMixin first"
        require(first, "bases", [base.__name__ for base in cls.__bases__], problem)

    def __init__(
        self,
        *positional: Any,
        policy: PolicyLike | None = None,
        loss_scale: LossScaleConfig | None = None,
        max_consecutive_skips: int | None = 50,
        **arguments: Any,
    ) -> None:
        self._requested_policy = policy
        rules = {"loss_scale": loss_scale, "max_consecutive_skips": max_consecutive_skips}
        self._build_accelerator = functools.partial(_TrainerAccelerator, policy, **rules)
        # The weight of each mean loss, 0-dim FP32, and the number of its labels, if any.
        self._microbatches: deque[tuple[Tensor, Tensor | None]] = deque()
        self._ended_iterator: Iterator[Any] | None = None
        super().__init__(*positional, **arguments)
        known = hasattr(self, "_loss_shifts_labels") and hasattr(self, "loss_is_scaled_for_ga")
        problem = "its Trainer is too old for distmp; run pip install 'distmp[trainers]'"
        require(known, "transformers", transformers.__version__, problem)
        self._loss_shifts_labels |= _uses_default_loss(self.model)
        _check_trainer(self)

    @property
    def policy(self) -> PrecisionPolicy:
        """The precision policy."""
        return self.accelerator.policy

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as the trainer does, but of distmp's class."""
        _check_precision(self.args, self._requested_policy)
        with mock.patch.object(transformers.trainer, "Accelerator", self._build_accelerator):
            super().create_accelerator_and_postprocess()
        problem = (
            f"{type(self).__name__} creates its accelerator in another way; use a trainer of"
            " Transformers or TRL, or distmp.integrations.accelerate in your own loop"
        )
        is_ours = isinstance(self.accelerator, _TrainerAccelerator)
        require(is_ours, "transformers", transformers.__version__, problem)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the microbatches of a step, and keep the weights of their losses.

        If the data of a rank ends before the step is complete, no rank gets microbatches:
        Transformers would not update the weights, and would add these gradients to those of the
        next epoch.
        """
        if self.loss_is_scaled_for_ga:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if epoch_iterator is self._ended_iterator:  # Transformers calls this until `max_steps`
            return [], None
        # Skip the gather of Transformers; the one below replaces it.
        with mock.patch.object(self.args, "average_tokens_across_devices", False):
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        shifted, pixel = self._loss_shifts_labels, _ignored_pixel(self.model)
        counted = [_count(batch, shifted=shifted, pixel=pixel) for batch in batches]
        values = [int(count) for count, _ in counted]
        counts = torch.tensor(values, dtype=torch.int64).to(device)
        sums = [sum(values), len(batches), len(batches) < num_batches]
        own = torch.tensor([sums], dtype=torch.float64).to(device)
        is_first = self.state.global_step == 0
        self.accelerator.averages_losses = is_first and max(values, default=0) > 1
        total, microbatches, ended = self.accelerator.gather(own).sum(0).tolist()  # the only wait
        if ended:
            self._ended_iterator = epoch_iterator
            self._report_incomplete_step(microbatches)
            return [], None
        weights = self._weights(counts, total)
        items = counts.clamp(min=1)
        self._microbatches = deque(
            (weights[index], items[index] if is_labels else None)
            for index, (_, is_labels) in enumerate(counted)
        )
        return batches, None

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Run forward and backward of a microbatch; return its share of the mean loss."""
        if self.loss_is_scaled_for_ga:
            with mock.patch.object(self.accelerator, "loss_weight", 1.0):
                loss = super().training_step(model, inputs, num_items_in_batch)
            self._report_non_finite(loss)
            return loss
        if not self._microbatches:
            raise TrainingError(
                "training_step got a microbatch that get_batch_samples did not return, so its"
                " weight is not known; call super().get_batch_samples()"
            )
        weight, items = self._microbatches.popleft()
        # As if this microbatch were the whole batch, so that its loss is its mean, whether or not
        # the model uses the number of items.
        self.current_gradient_accumulation_steps = 1
        with (
            mock.patch.object(self.args, "average_tokens_across_devices", False),
            mock.patch.object(self.accelerator, "loss_weight", weight),
        ):
            loss = super().training_step(model, inputs, items)
        share = torch.where(weight > 0, loss * weight, torch.zeros_like(loss))
        self._report_non_finite(share)
        return share

    def prediction_step(self, *positional: Any, **arguments: Any) -> Any:
        """Evaluate a batch; its loss is the mean of the batch.

        Transformers would multiply it by the number of ranks, also if the model does not divide by
        the labels of all ranks.
        """
        with mock.patch.object(self.args, "average_tokens_across_devices", False):
            return super().prediction_step(*positional, **arguments)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers of the trainer, the skipped steps and the loss scale."""
        if "loss" in logs:
            logs["skipped_steps"] = self.accelerator.scaler.total_skips
            if self.policy.loss_scale is not None:
                logs["loss_scale"] = self.accelerator.scaler.get_scale()
        super().log(logs, start_time)

    def _save_scaler(self, output_dir: str) -> None:
        """Save the scaler's state, except without a loss scale: Transformers could not load it."""
        if self.policy.loss_scale is not None:
            super()._save_scaler(output_dir)

    def _weights(self, counts: Tensor, total: int) -> Tensor:
        """Return the weights of microbatches: their share of all labels, times the number of ranks.

        DDP and FSDP divide the sum of gradients by the number of ranks.
        """
        if total == 0 and self.accelerator.is_main_process:
            logger.warning(
                "step %d: the loss ignores all labels of all ranks (such as -100), so its gradient"
                " is zero; check the labels of the data",
                self.state.global_step + 1,
            )
        return (counts.double() * self.accelerator.num_processes / max(total, 1)).float()

    def _report_incomplete_step(self, microbatches: int) -> None:
        if microbatches > 0 and self.accelerator.is_main_process:
            logger.warning(
                "step %d: the data of a rank ended before the step was complete, so all ranks end"
                " the epoch without its %d microbatches",
                self.state.global_step + 1,
                microbatches,
            )

    def _report_non_finite(self, loss: Tensor) -> None:
        """Warn about a loss that Transformers leaves out of the log."""
        if self.args.logging_nan_inf_filter and not torch.isfinite(loss):
            logger.warning(
                "step %d: the loss of a microbatch of rank %d is %s; the logged loss excludes it"
                " (logging_nan_inf_filter), and all ranks skip the step",
                self.state.global_step + 1,
                self.accelerator.process_index,
                loss.item(),
            )


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with distmp; see `TrainerMixin`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> config = LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=1,
        ... )
        >>> arguments = TrainingArguments("runs/tiny", use_cpu=True, report_to=[])
        >>> trainer = Trainer(LlamaForCausalLM(config), arguments, policy="fp16-autocast")
        >>> trainer.policy.loss_scale
        'dynamic'
    """


class _TrainerAccelerator(Accelerator):
    """Weights each microbatch's loss; skips steps with non-finite gradients under every policy.

    Attributes:
        loss_weight: Factor of the loss in `backward`; None outside of a training step.
        averages_losses: Whether the next loss should be a mean of several, which is checked.
    """

    def __init__(self, policy: PolicyLike | None, **arguments: Any) -> None:
        if policy is not None:
            arguments["mixed_precision"] = None
        super().__init__(policy, **arguments)
        self.loss_weight: Tensor | float | None = None
        self.averages_losses = False
        if self.scaler is None:
            most_skips = arguments["max_consecutive_skips"]
            self.scaler = DeferredGradScaler(self.device.type, _UNSCALED, most_skips)

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Run backward on the weighted loss."""
        if self.loss_weight is None:
            raise TrainingError(
                "backward was called outside of the trainer's training_step, so the weight of the"
                " loss is not known; override compute_loss, or call super().training_step()"
            )
        if self.averages_losses and is_sum(loss):
            logger.warning(
                "the loss looks like a sum, and it is multiplied by the number of its labels or"
                " samples, so the gradient is too large; return the mean of the microbatch"
            )
        self.averages_losses = False
        super().backward(loss * self.loss_weight, **arguments)


def _uses_default_loss(model: Any) -> bool:
    """Return whether a model has the loss of causal models because Transformers knows no other.

    Transformers (5.23) counts labels of such models as if they were not shifted, for example of
    GPT2LMHeadModel.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    if getattr(base, "loss_type", "") is not None:
        return False
    is_causal = not getattr(base.config, "is_encoder_decoder", False)
    return is_causal and "loss_function" in inspect.unwrap(type(base).forward).__code__.co_names


def _ignored_pixel(model: Any) -> int:
    """Return the label of pixels that a loss does not average; it averages all for one class."""
    config = getattr(model, "config", None)
    label = getattr(config, "loss_ignore_index", _IGNORED_LABEL)  # UperNet
    label = getattr(config, "semantic_loss_ignore_index", label)
    return _IGNORED_LABEL if getattr(config, "num_labels", None) == 1 else label


def _count(batch: Any, *, shifted: bool, pixel: int = _IGNORED_LABEL) -> tuple[Tensor | int, bool]:
    """Return the number of items that the loss of a batch averages, and whether they are labels.

    Args:
        batch: Tensors in mappings, lists or tuples, with one row per sample; or a list of samples.
        shifted: Whether the loss compares the output at each position with the next label.
        pixel: The label that does not count in labels [batch, height, width].
    """
    if isinstance(batch, Mapping):
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch.get("labels")
            if isinstance(labels, Tensor) and shifted:
                labels = labels[..., 1:]
        if isinstance(labels, Tensor):
            # Targets of regression and of several classes; spectrograms are padded with -100.
            if labels.is_floating_point() and labels.dim() < 3:
                return labels.numel(), True
            ignored = pixel if labels.dim() == 3 else _IGNORED_LABEL
            return labels.ne(ignored).sum(), True
    elif isinstance(batch, list) and all(isinstance(sample, Mapping) for sample in batch):
        return len(batch), False
    samples = find_batch_size(batch)
    if samples is None:
        raise TrainingError(
            "a microbatch has no tensor with samples, so the weight of its loss is not known;"
            " let data_collator return tensors"
        )
    return samples, False


def _check_precision(arguments: Any, policy: PolicyLike | None) -> None:
    for name in ("bf16", "fp16"):
        problem = (
            f"policy = {policy!r} is given as well; pass {name}=False (the configurations of TRL"
            " set bf16 by default)"
        )
        require(policy is None or not getattr(arguments, name), name, True, problem)


def _check_trainer(trainer: TrainerMixin) -> None:
    """Refuse what would bypass the policy, the decision of all ranks, or the global mean."""
    arguments, accelerator = trainer.args, trainer.accelerator
    _check_ranks(arguments, accelerator)
    _check_sharding(trainer)
    equal = arguments.average_tokens_across_devices
    problem = "ranks with different numbers of labels would count as equal; remove it"
    require(equal, "average_tokens_across_devices", False, problem)
    problem = (
        "updates weights during backward, before all ranks know whether the gradients are finite;"
        " use another optimizer"
    )
    valid = "lomo" not in arguments.optim and "layerwise" not in arguments.optim
    require(valid, "optim", str(arguments.optim), problem)
    microbatches = accelerator.num_processes * arguments.gradient_accumulation_steps
    problem = (
        "is a mean of the means of microbatches, whatever their number of tokens; use dapo, the"
        " mean over the tokens of all microbatches and ranks"
    )
    valid = microbatches == 1 or getattr(trainer, "loss_type", None) != "bnpo"
    require(valid, "loss_type", "bnpo", problem)


def _check_ranks(arguments: Any, accelerator: _TrainerAccelerator) -> None:
    started = RankEnvironment.from_variables().world_size
    together = started == 1 or accelerator.num_processes > 1
    problem = f"each of the {started} ranks would train a model alone; use True on CPUs"
    require(together, "use_cpu", arguments.use_cpu, problem)
    problem = (
        "a single process would use nn.DataParallel on these GPUs, without the policy; start one"
        " process per GPU with torchrun, or select one GPU"
    )
    require(arguments.n_gpu <= 1, "CUDA_VISIBLE_DEVICES", arguments.n_gpu, problem)
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        size = getattr(parallelism, name, None) or 1
        problem = "ranks that share a sequence do not know how many of its labels they hold; use 1"
        require(size == 1, f"parallelism_config.{name}", size, problem)


def _check_sharding(trainer: TrainerMixin) -> None:
    loaded = getattr(trainer, "is_distributed_loading_by_transformers", False)
    problem = (
        "Transformers shards and reduces in its own dtypes; load the model without it, and set fsdp"
        " in the training arguments"
    )
    require(not loaded, "distributed_config", "in use", problem)
