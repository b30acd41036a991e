"""What a step costs after backward: unscale, check, clip, step (`python -m benchmarks.step_tail`).

The ways take turns on the same parameters and gradients, which are set anew before each turn. What
a way costs beyond the bare fused step is compared with torch's own (unscale, clip, fused step), and
with the floor: one read of the gradients at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.device import elapsed, parse, parser
from benchmarks.report import in_turns, machine, save
from benchmarks.tables import steps
from distmp.buckets.layout import DEFAULT_BUCKET_BYTES
from distmp.scaling import (
    DistributedGradScaler,
    GradientPart,
    LossScale,
    LossScaleConfig,
    decide_step,
    local_stats,
)
from distmp.scaling.norms import chunk_norms

SCALE = 2.0**16
MAX_NORM = 1.0
ELEMENTS = {"cpu": 2**25, "cuda": 2**28}


class Work:
    """Parameters whose gradients are views of flat buckets, as those of `Engine` are.

    Args:
        elements: Number of gradient elements.
        size: Elements of each parameter.
        device: Where they live.
    """

    def __init__(self, elements: int, size: int, device: torch.device) -> None:
        self.device = device
        per_bucket = DEFAULT_BUCKET_BYTES // 4 // size * size
        self.buckets = list(torch.zeros(elements, device=device).split(per_bucket))
        self.parameters = [
            nn.Parameter(torch.randn(part.numel(), device=device))
            for bucket in self.buckets
            for part in bucket.split(size)
        ]
        parts = [part for bucket in self.buckets for part in bucket.split(size)]
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part
        self._fresh = [torch.randn_like(bucket) * SCALE for bucket in self.buckets]
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True)
        self.torch_scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        self.scaler = DistributedGradScaler(device.type, init_scale=SCALE)
        for scaler in (self.torch_scaler, self.scaler):
            scaler.scale(torch.ones((), device=device))
        self.loss_scale = LossScale(LossScaleConfig(init=SCALE), device)

    def refresh(self) -> None:
        """Set the scaled gradients that backward would leave."""
        torch._foreach_copy_(self.buckets, self._fresh)

    def bare(self) -> None:
        """Step unscaled gradients, without clipping."""
        self.optimizer.step()

    def stock(self) -> None:
        """Do what torch documents for scaling with clipping."""
        self.torch_scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.torch_scaler.step(self.optimizer)
        self.torch_scaler.update()

    def engine(self) -> None:
        """Do what `Engine` does after backward."""
        one = torch.ones((), dtype=torch.float64, device=self.device)
        part = GradientPart(self.buckets, replicas=1)
        total = local_stats([part], one, one, stop=False, device=self.device)
        decision = decide_step(total, self.loss_scale.value, 1.0, MAX_NORM)
        self.optimizer.grad_scale = decision.grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = decision.found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        self.loss_scale.update(decision.overflow, decision.empty)
        del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]

    def distributed_grad_scaler(self) -> None:
        """Do the same with the scaler by itself."""
        self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def copy(self) -> None:
        """Read and write as many bytes as the gradients have."""
        torch._foreach_copy_(self._fresh, self.buckets)

    def norm(self) -> None:
        """Read the gradients once."""
        chunk_norms(self.buckets)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    work = Work(arguments.elements, arguments.parameter_size, device)
    ways: dict[str, Callable[[], None]] = {
        "bare fused AdamW": work.bare,
        "torch: unscale, clip, step": work.stock,
        "Engine": work.engine,
        "DistributedGradScaler.clip_grad_norm_": work.distributed_grad_scaler,
        "norm alone": work.norm,
        "copy": work.copy,
    }

    def milliseconds(name: str) -> float:
        work.refresh()
        return 1000 * elapsed(ways[name], device)

    result = {
        "machine": {**machine(device), "threads": arguments.threads},
        "elements": arguments.elements,
        "parameters": len(work.parameters),
        "milliseconds": in_turns(list(ways), arguments.rounds, milliseconds, warm_up=2),
    }
    print(steps.step_tail(result))
    print(f"kept in {save(f'step-tail-{device.type}', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=25)
    made.add_argument("--elements", type=int, help="gradient elements (2^25, on a GPU 2^28)")
    made.add_argument("--parameter-size", type=int, default=2**20, help="elements of a parameter")
    made.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parse(made, elements=ELEMENTS)


if __name__ == "__main__":
    sys.exit(main())
