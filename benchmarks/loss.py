"""Measure the next-token loss with and without a tensor of all logits: `python -m benchmarks.loss`.

Three ways to compute the cross entropy of a linear layer's outputs:

- all logits: `linear`, then `cross_entropy` of the FP32 logits.
- distmp: `distmp.models.linear_cross_entropy`.
- torch: `torch.nn.functional.linear_cross_entropy` with its default chunks, on GPUs and where torch
  has it.

Memory: the peak of live tensors in forward and backward of the loss, without its inputs and with
the gradients, at a vocabulary of 131,072. Time: forward and backward of the loss, and of a
transformer with it, at a vocabulary of 50,257; the ways take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device import busy_time, parse, parser
from benchmarks.memory import LiveStorages
from benchmarks.report import in_turns, machine, save, sized
from benchmarks.tables import loss as tables
from distmp.models import transformer
from distmp.models.linear_cross_entropy import linear_cross_entropy
from distmp.models.transformer import Transformer, TransformerConfig

LARGE_VOCABULARY, VOCABULARY = sized((131_072, 50_257), (2048, 1024))
SIZES = {"cpu": "small", "cuda": "large"}
# Tokens for memory, tokens for time, dimension, layers.
SHAPES = {
    "small": sized((4096, 512, 384, 6), (512, 512, 64, 1)),
    "large": (16_384, 16_384, 2048, 8),
}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def of_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy as torch computes it in chunks."""
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = torch.nn.LinearCrossEntropyOptions()
    result: Tensor = F.linear_cross_entropy(
        hidden, weight, targets, reduction="sum", options=options
    )
    return result


LOSSES: dict[str, Loss] = {"all logits": all_logits, "distmp": linear_cross_entropy}
if hasattr(F, "linear_cross_entropy"):
    LOSSES["torch"] = of_torch


def main() -> int:
    options = parser(__doc__, rounds=5)
    options.add_argument("--size", choices=SHAPES, help="shapes (default: small, on a GPU large)")
    arguments: argparse.Namespace = parse(options, size=SIZES)
    device = arguments.device
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES[arguments.size]
    losses = {name: one for name, one in LOSSES.items() if name != "torch" or device.type == "cuda"}
    result = {
        "machine": machine(device),
        "tokens": {"memory": shape[0], "time": shape[1]},
        "dimension": shape[2],
        "vocabulary": {"memory": LARGE_VOCABULARY, "time": VOCABULARY},
        "errors": {name: _errors(loss, device) for name, loss in losses.items()},
        "bytes": {name: _peak(loss, shape, device) for name, loss in losses.items()},
        "milliseconds": _times(losses, shape, device, arguments.rounds),
    }
    print(tables.loss(result))
    print(f"saved to {save(f'loss-{device.type}', result)}")
    return 0


def _inputs(
    tokens: int, dimension: int, vocabulary: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dimension, generator=generator).to(device).requires_grad_()
    weight = torch.randn(vocabulary, dimension, generator=generator).mul_(0.02).to(device)
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    return hidden, weight.requires_grad_(), targets


def _errors(loss: Loss, device: torch.device) -> dict[str, float]:
    """Return the errors of loss and gradients in FP32, relative to those in float64."""
    inputs = _inputs(512, 128, VOCABULARY, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs[:2]]
    exact = F.cross_entropy(F.linear(*wide), inputs[2], reduction="sum")
    exact.backward()
    found = loss(*inputs)
    found.backward()
    pairs = {"loss": (found, exact)} | {
        f"gradient of the {name}": (ours.grad, other.grad)
        for name, ours, other in zip(("input", "weight"), inputs, wide, strict=False)
    }
    return {name: _error(one, other) for name, (one, other) in pairs.items()}


def _error(found: Tensor | None, exact: Tensor | None) -> float:
    assert found is not None
    assert exact is not None
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def _peak(loss: Loss, shape: tuple[int, int, int, int], device: torch.device) -> int:
    hidden, weight, targets = _inputs(shape[0], shape[2], LARGE_VOCABULARY, device)
    with torch.autocast(device.type, torch.bfloat16), LiveStorages() as live:
        loss(hidden, weight, targets).backward()
    return live.peak


def _times(
    losses: dict[str, Loss], shape: tuple[int, int, int, int], device: torch.device, rounds: int
) -> dict[str, dict[str, list[float]]]:
    _, tokens, dimension, layers = shape
    inputs = _inputs(tokens, dimension, VOCABULARY, device)
    length = 512
    config = TransformerConfig(
        VOCABULARY, length, layers, dimension, dimension // 64, 3 * dimension
    )
    model = Transformer(config).to(device)
    batch = torch.randint(VOCABULARY, (tokens // length, length), device=device)

    def step(loss: Loss) -> None:
        def project(hidden: Tensor, weight: Tensor, targets: Tensor, _: object) -> Tensor:
            return loss(hidden.flatten(0, -2), weight, targets.flatten())

        with mock.patch.object(transformer, "project", project):
            model(batch, targets=batch).backward()

    works: dict[str, Callable[[Loss], object]] = {
        "the loss": lambda loss: loss(*inputs).backward(),
        "a transformer with the loss": step,
    }
    return {
        f"{what}, {precision}": in_turns(
            list(losses),
            rounds,
            lambda name, work=work, dtype=dtype: (
                1000  # type: ignore[misc]
                * busy_time(lambda: _under(dtype, device, lambda: work(losses[name])), device)
            ),
        )
        for what, work in works.items()
        for precision, dtype in (("fp32", torch.float32), ("bf16-autocast", torch.bfloat16))
    }


def _under(dtype: torch.dtype, device: torch.device, work: Callable[[], object]) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        work()


if __name__ == "__main__":
    sys.exit(main())
