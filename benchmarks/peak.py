"""How much of what a GPU could do at the most a measurement reaches.

The work of a step is what its matrix products and attention need, forward and backward, counted by
`torch.utils.flop_counter` while a model without values runs on the meta device: the work of the
model, whatever a loop computes beside it, with attention as if no position were masked. It is the
same for every way, and known without a GPU.
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
from distmp.models.build import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig
from distmp.precision import PrecisionPolicy, policy
from distmp.precision.switches import product_switches

# FLOP/s of dense products, without sparsity, by the name that torch has for the GPU: in 16 bits,
# TF32, and FP32 without tensor cores. Source: NVIDIA's datasheets of H100 (SXM and PCIe), H200
# (SXM), A100, L40S and L4; what they give with sparsity only is halved. What is not here is
# measured.
_DATASHEETS = (
    (r"\bH100 PCIe", (756e12, 378e12, 51e12)),
    (r"\bG?H[12]00\b(?!.* NVL)", (989e12, 494e12, 67e12)),
    (r"\bA100\b", (312e12, 156e12, 19.5e12)),
    (r"\bL40S\b", (362e12, 183e12, 91.6e12)),
    (r"\bL4\b", (121e12, 60e12, 30.3e12)),
)
# What a policy computes with, and a policy that does.
_POLICIES = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
_PRODUCT_SIZE = 8192
_COPY_BYTES = 2**30
_REPETITIONS = 10


def peak(device: torch.device) -> dict[str, Any]:
    """Return what a GPU could do, as JSON can hold it. Takes a few seconds.

    Returns:
        "flops": FLOP/s by kind of product (bfloat16, float16, tf32, float32). "source": Where they
        are from. "product": FLOP/s of a large product of random numbers, by kind, and "bandwidth":
        bytes/s of a copy, read and written; both measured here.
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
    """Return the peaks of a GPU by kind of product, or None if they are not known here.

    Args:
        name: As `torch.cuda.get_device_name` has it.
    """
    for pattern, (sixteen_bits, tf32, float32) in _DATASHEETS:
        if re.search(pattern, name):
            known = (sixteen_bits, sixteen_bits, tf32, float32)
            return dict(zip(_POLICIES, known, strict=True))
    return None


def kind_of(chosen: PrecisionPolicy) -> str:
    """Return the kind of product that a policy computes with."""
    return "tf32" if chosen.tf32 else str(chosen.compute_dtype).removeprefix("torch.")


def share(flops: float, seconds: float, found: dict[str, Any], kind: str) -> float:
    """Return the share of the peak, 0 to 1, that so much work in so many seconds is.

    Args:
        flops: Floating-point operations, a multiplication and an addition counting as two.
        seconds: That they took.
        found: What `peak` has returned.
        kind: As `kind_of` says.
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
        samples: Sequences in the microbatch.
        length: Tokens in each.
        vocabulary: Number of token ids.
    """
    with torch.device("meta"):
        model = build_model(ModelConfig(size=size), vocabulary, length)
        tokens = torch.zeros(samples, length, dtype=torch.int64)
    return model_flops(model, next_token_loss, {"inputs": tokens, "targets": tokens})


def model_flops(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> int:
    """Return the work of forward and backward of a model on the meta device on one microbatch.

    Args:
        model: All of its parameters are on the meta device.
        loss: Returns the loss sum and its weight.
        batch: What `loss` is given, on the meta device.
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
