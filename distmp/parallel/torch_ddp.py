"""The buckets under torch's own wrapper (`ddp-torch`)."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distmp.distributed.world import World, keep_until_exit
from distmp.parallel.replicated import Replicated
from distmp.parallel.strategy import AccumulationSettings, group_of
from distmp.precision.policy import PrecisionPolicy


class TorchDistributedDataParallel(Replicated):
    """`Replicated` with the module inside `torch.nn.parallel.DistributedDataParallel`.

    For code that needs DDP's wrapper: its graph splitting for `torch.compile`, or libraries that
    look for it. The numbers are those of `Replicated`, since the FP32 buckets take and reduce every
    gradient. DDP's own reducer rests, as inside `no_sync()`: it would reduce in the parameters'
    type, and a communication hook in its place sees only what backward has summed in 16 bits.

    Args:
        module: The model, see `Replicated`; `self.module` is the wrapper.
        policy: See `Replicated`.
        world: The ranks.
        settings: See `Replicated`.

    Raises:
        ConfigError: Without a process group, which DDP needs.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        world: World,
        settings: AccumulationSettings | None = None,
    ) -> None:
        group = group_of(world, "ddp-torch")
        super().__init__(module, policy, world, settings)
        wrapper = _wrapper(module, world)
        wrapper.require_backward_grad_sync = False
        keep_until_exit(group)
        self.module = wrapper

    @property
    def model(self) -> nn.Module:
        wrapped = self.module.module
        assert isinstance(wrapped, nn.Module)
        return wrapped


def _wrapper(module: nn.Module, world: World) -> DistributedDataParallel:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 renamed it and warns about the old name. Buffers are the engine's business.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        module,
        process_group=world.group,
        init_sync=False,  # rank 0's parameters are everywhere already
        gradient_as_bucket_view=True,
        **{buffers: False},  # type: ignore[arg-type]
    )
