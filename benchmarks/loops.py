"""Training loops of several frameworks for the same model and microbatches.

All of them use fused AdamW, the mean over the tokens of all ranks, gradient accumulation and
clipping. A framework is imported when its loop is built.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distmp import DistributedGradScaler, Engine
from distmp.models.architecture import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.parallel.blocks import find_blocks

MICROBATCHES, VOCABULARY = 4, 258
MAX_NORM = 1.0
BF16, FP16 = torch.bfloat16, torch.float16


class Work(NamedTuple):
    """The model and data to train.

    Attributes:
        model: The configuration of the transformer.
        device: The device.
        samples: Number of samples per microbatch.
        length: Number of tokens per sample.
    """

    model: ModelConfig
    device: torch.device
    samples: int = 2
    length: int = 128

    @property
    def tokens(self) -> int:
        """Number of tokens per rank and step."""
        return MICROBATCHES * self.samples * self.length

    @property
    def rate(self) -> float:
        """The learning rate: the larger models of GPUs diverge with that of CPUs."""
        return 1e-3 if self.device.type == "cpu" else 1e-4

    def build(self) -> nn.Module:
        """Return the model, the same on every rank."""
        torch.manual_seed(0)
        with self.device:
            return build_model(self.model, VOCABULARY, self.length)

    def microbatches(self, rank: int) -> list[dict[str, Tensor]]:
        """Return the microbatches of a rank, which differ between ranks."""
        generator = torch.Generator().manual_seed(rank)
        shape = (MICROBATCHES, self.samples, self.length + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(self.device)
        return [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens]

    def mean_loss(self, model: nn.Module, microbatch: dict[str, Tensor]) -> Tensor:
        """Return a microbatch's contribution to the mean over all tokens of a rank."""
        return next_token_loss(model, microbatch)[0] / self.tokens


class Loop(ABC):
    """A model that trains on the same microbatches in every step.

    Args:
        work: The model and data.
        dtype: Compute dtype; None is float32.
    """

    def __init__(self, work: Work, dtype: torch.dtype | None = None) -> None:
        self.work = work
        self.dtype = dtype
        self.model = work.build()
        self.microbatches = work.microbatches(dist.get_rank())
        # Losses of the last step's microbatches.
        self.losses: deque[Tensor] = deque(maxlen=MICROBATCHES)

    @abstractmethod
    def step(self) -> None:
        """Train on all microbatches: forward, backward, clip, update."""

    def loss(self) -> float:
        """Return the mean loss over all ranks in the last step; all ranks must call it."""
        total = torch.stack([*self.losses]).sum().double()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def adamw(self) -> torch.optim.Optimizer:
        """Return an optimizer for the current parameters."""
        return torch.optim.AdamW(self.model.parameters(), self.work.rate, fused=True)


class Alone(Loop):
    """Plain torch in FP32 on the microbatches of all ranks, as the reference."""

    def __init__(self, work: Work, ranks: int) -> None:
        super().__init__(work)
        self.microbatches = [one for rank in range(ranks) for one in work.microbatches(rank)]
        self.losses = deque(maxlen=len(self.microbatches))
        self._ranks = ranks
        self._optimizer = self.adamw()

    def step(self) -> None:
        for microbatch in self.microbatches:
            loss = self.work.mean_loss(self.model, microbatch) / self._ranks
            loss.backward()
            self.losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self) -> float:
        return float(torch.stack([*self.losses]).sum().double())


class ByHand(Loop):
    """A wrapper of torch with torch's GradScaler, as in torch's documentation."""

    _optimizer: torch.optim.Optimizer
    _scaler: torch.amp.GradScaler
    _views = False

    def step(self) -> None:
        for index, microbatch in enumerate(self.microbatches):
            loss = self.forward(microbatch, last=index == MICROBATCHES - 1)
            self._scaler.scale(loss).backward()
            self.losses.append(loss.detach())
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=not self._views)

    @abstractmethod
    def forward(self, microbatch: dict[str, Tensor], *, last: bool) -> Tensor:
        """Return the loss of a microbatch; the backward of the last one reduces gradients."""


class TorchDDP(ByHand):
    """DDP with autocast.

    Args:
        work: The model and data.
        dtype: Compute dtype; None is float32.
        views: Whether gradients are views of DDP's buckets; they are set to zero then, because a
            gradient of None is allocated anew by the first microbatch.
    """

    def __init__(self, work: Work, dtype: torch.dtype | None, *, views: bool = False) -> None:
        super().__init__(work, dtype)
        self._views = views
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=views)
        self._optimizer = self.adamw()
        self._scaler = torch.amp.GradScaler(work.device.type, enabled=dtype == FP16)

    def forward(self, microbatch: dict[str, Tensor], *, last: bool) -> Tensor:
        self._ddp.require_backward_grad_sync = last
        with torch.autocast(self.work.device.type, self.dtype, enabled=self.dtype is not None):
            return self.work.mean_loss(self._ddp, microbatch)


class TorchZero(TorchDDP):
    """DDP with torch's ZeroRedundancyOptimizer, in which each rank updates some parameters."""

    def adamw(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=self.work.rate, fused=True
        )


class ScalerOfDistmp(TorchDDP):
    """torch's DDP loop with distmp's scaler instead of torch's."""

    def __init__(self, work: Work, dtype: torch.dtype | None) -> None:
        super().__init__(work, dtype)
        self._scaler = DistributedGradScaler(
            work.device.type, enabled=dtype == FP16, optimizers=[self._optimizer]
        )


class Fsdp2(ByHand):
    """FSDP2 per block, with FP32 reduction in the last microbatch."""

    def __init__(self, work: Work, dtype: torch.dtype | None) -> None:
        super().__init__(work, dtype)
        self._sharded = shard(self.model, dtype)
        self._optimizer = self.adamw()
        self._scaler = torch.amp.GradScaler(work.device.type, enabled=dtype == FP16)

    def forward(self, microbatch: dict[str, Tensor], *, last: bool) -> Tensor:
        self._sharded.set_requires_gradient_sync(last)
        return self.work.mean_loss(self.model, microbatch)


def shard(model: nn.Module, dtype: torch.dtype | None, mesh: Any = None) -> Any:
    """Shard a model per block with FSDP2, with `dtype` compute and FP32 reduction."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in find_blocks(model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Accelerate(Loop):
    """accelerate's loop with `accumulate`, with DDP or FSDP2 with accelerate's wrapping."""

    def __init__(self, work: Work, dtype: torch.dtype | None, *, sharded: bool = False) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin

        super().__init__(work, dtype)
        plugin = None
        if sharded:
            block = type(next(iter(find_blocks(self.model).values()))).__name__
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[block],
            )
        self._accelerator = self.accelerator(
            cpu=work.device.type == "cpu",
            gradient_accumulation_steps=MICROBATCHES,
            fsdp_plugin=plugin,
        )
        self._prepared, self._optimizer = self._accelerator.prepare(self.model, self.adamw())

    def accelerator(self, **arguments: Any) -> Any:
        """Return the accelerator that prepares model and optimizer."""
        from accelerate import Accelerator

        words = {None: "no", BF16: "bf16", FP16: "fp16"}
        return Accelerator(mixed_precision=words[self.dtype], **arguments)

    def step(self) -> None:
        for microbatch in self.microbatches:
            with self._accelerator.accumulate(self._prepared):
                loss = self.work.mean_loss(self._prepared, microbatch)
                # accelerate divides by the number of microbatches itself.
                self._accelerator.backward(MICROBATCHES * loss)
                self.losses.append(loss.detach())
                if self._accelerator.sync_gradients:
                    self._accelerator.clip_grad_norm_(self._prepared.parameters(), MAX_NORM)
                self._optimizer.step()
                self._optimizer.zero_grad()


class AccelerateOfDistmp(Accelerate):
    """The same loop with `distmp.integrations.accelerate.Accelerator`, which changes two lines."""

    def accelerator(self, **arguments: Any) -> Any:
        from distmp.integrations.accelerate import Accelerator

        words = {None: "fp32", BF16: "bf16-autocast", FP16: "fp16-autocast"}
        return Accelerator(words[self.dtype], **arguments)


class Fabric(Loop):
    """Lightning Fabric's loop, with DDP or FSDP2 with its strategy for manual sharding."""

    def __init__(self, work: Work, dtype: torch.dtype | None, *, sharded: bool = False) -> None:
        from lightning_fabric import Fabric as LightningFabric
        from lightning_fabric.plugins.environments import LightningEnvironment
        from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

        super().__init__(work, dtype)
        ranks = dist.get_world_size()
        words = {None: "32-true", BF16: "bf16-mixed", FP16: "16-mixed"}
        precision: Any = "32-true" if sharded else words[dtype]  # FSDP2's policy sets the dtype

        def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
            sharded_model: nn.Module = shard(model, dtype, mesh["data_parallel"])
            return sharded_model

        strategy: Any = DDPStrategy()
        if sharded:
            strategy = ModelParallelStrategy(
                parallelize, data_parallel_size=ranks, tensor_parallel_size=1
            )
        self._fabric = LightningFabric(
            accelerator=work.device.type,
            devices=ranks,
            strategy=strategy,
            precision=precision,
            plugins=LightningEnvironment(),
        )
        self._fabric.launch()
        if sharded:
            self._prepared = self._fabric.setup_module(self.model)
            self._optimizer = self._fabric.setup_optimizers(self.adamw())
        else:
            self._prepared, self._optimizer = self._fabric.setup(self.model, self.adamw())

    def step(self) -> None:
        for index, microbatch in enumerate(self.microbatches):
            inside = index < MICROBATCHES - 1
            with self._fabric.no_backward_sync(self._prepared, enabled=inside):
                loss = self.work.mean_loss(self._prepared, microbatch)
                self._fabric.backward(loss)
                self.losses.append(loss.detach())
        self._fabric.clip_gradients(self._prepared, self._optimizer, max_norm=MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class DeepSpeed(Loop):
    """DeepSpeed's engine with torch's AdamW, and FP32 accumulation if ZeRO supports it."""

    def __init__(self, work: Work, dtype: torch.dtype | None, *, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = work.device.type
        import deepspeed

        super().__init__(work, dtype)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": work.samples,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": stage},
        }
        if dtype is not None:
            config["bf16" if dtype == BF16 else "fp16"] = {"enabled": True}
            if stage:
                config["data_types"] = {"grad_accum_dtype": "fp32"}
        self._engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.adamw(), config=config
        )

    def step(self) -> None:
        for microbatch in self.microbatches:
            loss = self.work.mean_loss(self._engine, microbatch)
            # DeepSpeed divides by the number of microbatches itself.
            self._engine.backward(MICROBATCHES * loss)
            self.losses.append(loss.detach())
            self._engine.step()


class Distmp(Loop):
    """distmp's engine."""

    def __init__(self, work: Work, policy: str, strategy: str, **options: Any) -> None:
        super().__init__(work)
        self._engine = Engine(
            self.model,
            next_token_loss,
            lambda named: torch.optim.AdamW(named, work.rate, fused=True),
            policy=policy,
            strategy=strategy,
            max_norm=MAX_NORM,
            device=work.device,
            **options,
        )

    def step(self) -> None:
        self._outcome = self._engine.step(self.microbatches)

    def loss(self) -> float:
        return self._outcome.numbers.loss
