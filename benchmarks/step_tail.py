"""Measure a step after backward: unscale, check, clip, step (`python -m benchmarks.step_tail`).

The methods take turns on the same parameters and gradients, which are reset before each turn. The
cost of a method beyond the bare fused step is compared with torch's (unscale, clip, fused step),
and with the lower bound: one read of the gradients at the bandwidth of a copy.
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
from distmp.scaling.grad_scaler import DistributedGradScaler
from distmp.scaling.loss_scale import LossScale
from distmp.scaling.norms import chunk_norms
from distmp.scaling.settings import LossScaleConfig
from distmp.scaling.step_decision import GradientPart, decide_step, local_stats

SCALE = 2.0**16
MAX_NORM = 1.0
ELEMENTS = {"cpu": 2**25, "cuda": 2**28}


class Work:
    """Parameters whose gradients are views of flat buckets, as in `Engine`.

    Args:
        elements: Number of gradient elements.
        size: Number of elements of each parameter.
        device: Device of the parameters.
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
        """Set the gradients to scaled values, as after backward."""
        torch._foreach_copy_(self.buckets, self._fresh)

    def bare(self) -> None:
        """Run only the optimizer, with unscaled gradients and without clipping."""
        self.optimizer.step()

    def stock(self) -> None:
        """Run torch's documented sequence for scaling with clipping."""
        self.torch_scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.torch_scaler.step(self.optimizer)
        self.torch_scaler.update()

    def engine(self) -> None:
        """Run the work of `Engine` after backward."""
        one = torch.ones((), dtype=torch.float64, device=self.device)
        part = GradientPart(self.buckets, replicas=1)
        total = local_stats([part], [one], [one], stop=False, device=self.device)
        decision = decide_step(total, self.loss_scale.value, 1.0, MAX_NORM)
        self.optimizer.grad_scale = decision.grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = decision.found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        self.loss_scale.update(decision.overflow, decision.empty)
        del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]

    def distributed_grad_scaler(self) -> None:
        """Run the same work with the scaler alone."""
        self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def copy(self) -> None:
        """Read and write the size of the gradients."""
        torch._foreach_copy_(self._fresh, self.buckets)

    def norm(self) -> None:
        """Read the gradients once."""
        chunk_norms(self.buckets)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    work = Work(arguments.elements, arguments.parameter_size, device)
    methods: dict[str, Callable[[], None]] = {
        "bare fused AdamW": work.bare,
        "torch: unscale, clip, step": work.stock,
        "Engine": work.engine,
        "DistributedGradScaler.clip_grad_norm_": work.distributed_grad_scaler,
        "norm alone": work.norm,
        "copy": work.copy,
    }

    def milliseconds(name: str) -> float:
        work.refresh()
        return 1000 * elapsed(methods[name], device)

    result = {
        "machine": {**machine(device), "threads": arguments.threads},
        "elements": arguments.elements,
        "parameters": len(work.parameters),
        "milliseconds": in_turns(list(methods), arguments.rounds, milliseconds, warm_up=2),
    }
    print(steps.step_tail(result))
    print(f"saved to {save(f'step-tail-{device.type}', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, rounds=25)
    options.add_argument("--elements", type=int, help="gradient elements (2^25, on a GPU 2^28)")
    options.add_argument("--parameter-size", type=int, default=2**20, help="elements per parameter")
    options.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parse(options, elements=ELEMENTS)


if __name__ == "__main__":
    sys.exit(main())
