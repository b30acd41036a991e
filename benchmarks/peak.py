"""Compute the share of a GPU's peak performance that a measurement reaches.

The work of a step is the FLOPs of its matrix products and attention in forward and backward,
counted by `torch.utils.flop_counter` with the model on the meta device. It is the work of the
model, independent of the loop, with attention as if no position were masked. It is the same for
every method, and computed without a GPU.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.device import elapsed
from distmp.models.architecture import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.precision import PrecisionPolicy, policy
from distmp.precision.keep import product_switches

# FLOP/s of dense products by torch's name of the GPU: in 16 bits, TF32, and FP32 without tensor
# cores. Source: NVIDIA's datasheets of H100 (SXM and PCIe), H200 (SXM), A100, L40S and L4; values
# that are given only with sparsity are halved. Other GPUs are measured.
_DATASHEETS = (
    (r"\bH100 PCIe", (756e12, 378e12, 51e12)),
    (r"\bG?H[12]00\b(?!.* NVL)", (989e12, 494e12, 67e12)),
    (r"\bA100\b", (312e12, 156e12, 19.5e12)),
    (r"\bL40S\b", (362e12, 183e12, 91.6e12)),
    (r"\bL4\b", (121e12, 60e12, 30.3e12)),
)
# Kind of product: a policy that uses it.
_POLICIES = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
_PRODUCT_SIZE = 8192
_COPY_BYTES = 2**30
_REPETITIONS = 10


def peak(device: torch.device) -> dict[str, Any]:
    """Return the peak performance of a GPU as JSON values. Takes a few seconds.

    Returns:
        "flops": peak FLOP/s by kind of product (bfloat16, float16, tf32, float32). "source": source
        of these numbers. "product": measured FLOP/s of a large product of random numbers, by kind.
        "bandwidth": measured bytes/s of a copy, read and written.
    """
    measured = {kind: _product(kind, device) for kind in _POLICIES}
    bandwidth = _bandwidth(device)
    torch.cuda.empty_cache()  # ranks of the benchmark need the memory
    known = datasheet(torch.cuda.get_device_name(device))
    return {
        "flops": known or measured,
        "source": "NVIDIA's datasheet, dense" if known else f"products of {_PRODUCT_SIZE}^3 here",
        "product": measured,
        "bandwidth": bandwidth,
    }


def datasheet(name: str) -> dict[str, float] | None:
    """Return the peak FLOP/s of a GPU by kind of product, or None if unknown.

    Args:
        name: Name of the GPU from `torch.cuda.get_device_name`.
    """
    for pattern, (sixteen_bits, tf32, float32) in _DATASHEETS:
        if re.search(pattern, name):
            known = (sixteen_bits, sixteen_bits, tf32, float32)
            return dict(zip(_POLICIES, known, strict=True))
    return None


def kind_of(chosen: PrecisionPolicy) -> str:
    """Return the kind of product that a policy uses."""
    return "tf32" if chosen.tf32 else str(chosen.compute_dtype).removeprefix("torch.")


def share(flops: float, seconds: float, found: dict[str, Any], kind: str) -> float:
    """Return the share of the peak performance that a measurement reaches, from 0 to 1.

    Args:
        flops: Number of floating-point operations; a multiply-add counts as two.
        seconds: Measured time.
        found: The result of `peak`.
        kind: Kind of product, see `kind_of`.
    """
    return flops / seconds / float(found["flops"][kind])


def count(work: Callable[[], object]) -> int:
    """Return the floating-point operations of the matrix products and attention in `work`."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def transformer_flops(size: str, samples: int, length: int, vocabulary: int) -> int:
    """Return the work of forward and backward of distmp's transformer on one microbatch.

    Args:
        size: Named size (`distmp.models.settings.SIZES`).
        samples: Number of sequences in the microbatch.
        length: Number of tokens per sequence.
        vocabulary: Number of token ids.
    """
    with torch.device("meta"):
        model = build_model(ModelConfig(size=size), vocabulary, length)
        tokens = torch.zeros(samples, length, dtype=torch.int64)
    return model_flops(model, next_token_loss, {"inputs": tokens, "targets": tokens})


def model_flops(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> int:
    """Return the work of forward and backward of a model on the meta device on one microbatch.

    Args:
        model: A model with all parameters on the meta device.
        loss: Returns the loss sum and its weight.
        batch: The microbatch for `loss`, on the meta device.
    """
    return count(lambda: loss(model, batch)[0].backward())


def _product(kind: str, device: torch.device) -> float:
    chosen = policy(_POLICIES[kind])
    left, right = torch.randn(
        2, _PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=chosen.compute_dtype
    )
    with product_switches(chosen):
        return 2 * _PRODUCT_SIZE**3 / _median(lambda: left @ right, device)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _median(lambda: target.copy_(source), device)


def _median(work: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        work()
    return statistics.median(elapsed(work, device) for _ in range(_REPETITIONS))
