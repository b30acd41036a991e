"""What a step costs after backward: unscale, check, clip, step (`python -m benchmarks.step_tail`).

The ways take turns on the same parameters and gradients, which are set anew before each turn. What
a way costs beyond the bare fused step is compared with torch's own (unscale, clip, fused step), and
with the floor: one read of the gradients at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import figures
from benchmarks.report import alternating, machine, save
from distmp.buckets.layout import DEFAULT_BUCKET_BYTES
from distmp.scaling import (
    DistributedGradScaler,
    GradientPart,
    LossScale,
    LossScaleConfig,
    decide,
    measure,
)
from distmp.scaling.norms import chunk_norms

SCALE = 2.0**16
MAX_NORM = 1.0


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
        total = measure([part], one, one, stop=False, device=self.device)
        verdict = decide(total, self.loss_scale.value, 1.0, MAX_NORM)
        self.optimizer.grad_scale = verdict.grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = verdict.found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        self.loss_scale.update(verdict.overflow, verdict.empty)
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
    device = torch.device(arguments.device)
    work = Work(arguments.elements, arguments.parameter_size, device)
    ways: dict[str, Callable[[], None]] = {
        "bare fused AdamW": work.bare,
        "torch: unscale, clip, step": work.stock,
        "Engine": work.engine,
        "DistributedGradScaler.clip_grad_norm_": work.distributed_grad_scaler,
        "norm alone": work.norm,
        "copy": work.copy,
    }
    milliseconds = _measure(work, ways, arguments.rounds)
    result = {
        "machine": {**machine(), "threads": arguments.threads},
        "elements": arguments.elements,
        "parameters": len(work.parameters),
        "milliseconds": milliseconds,
    }
    print(figures.step_tail(result))
    print(f"kept in {save(f'step-tail-{device.type}', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=2**25, help="gradient elements")
    parser.add_argument("--parameter-size", type=int, default=2**20, help="elements of a parameter")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each way")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def _measure(
    work: Work, ways: dict[str, Callable[[], None]], rounds: int
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for name, counts in alternating(list(ways), rounds, warm_up=2):
        work.refresh()
        elapsed = _timed(ways[name], work.device)
        if counts:
            taken[name].append(1000 * elapsed)
    return taken


def _timed(way: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
