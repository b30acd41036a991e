"""What every precision policy costs in precision: `python -m benchmarks.precision`.

Measures, on a CPU in less than two minutes: the error of each way to save bits by itself, and how
far the losses of a small language model go from those in FP32 in 50 steps under each policy.
`--device cuda` measures the second; the first is of number formats and the same everywhere. Time
and memory under each policy: `python -m benchmarks.policies`.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device import CPU, parser
from benchmarks.report import machine, save
from benchmarks.tables import precision
from distmp import Engine, PrecisionPolicy, policy
from distmp.models.loss import next_token_loss
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.precision import PRESETS

FP32, BF16 = torch.float32, torch.bfloat16
MICROBATCHES = (8, 64, 512)
STEPS, SEQUENCES, LENGTH = 50, 16, 64
# Beside the presets: what people change in them.
VARIANTS = ("bf16,keep_fp32=norm|head", "bf16-autocast,keep_fp32=head", "fp16,keep_fp32=norm|head")
MODEL = TransformerConfig(
    vocabulary_size=256,
    sequence_length=LENGTH,
    layers=2,
    dimension=64,
    heads=2,
    hidden=128,
    tied_head=False,
)


def main() -> int:
    device = parser(__doc__).parse_args().device
    torch.manual_seed(0)
    if device == CPU:
        errors = {"machine": machine(device), "errors": measure_errors()}
        print(precision.precision_errors(errors))
        print(f"kept in {save('precision-errors-cpu', errors)}\n")
    training = {"machine": machine(device), "steps": STEPS, "losses": measure_training(device)}
    print(precision.precision_training(training))
    print(f"kept in {save(f'precision-training-{device.type}', training)}")
    return 0


def measure_errors() -> dict[str, float]:
    """Return the relative error of each saving by its name."""
    gradients = microbatch_gradients(max(MICROBATCHES))
    found = {}
    for count in MICROBATCHES:
        exact = gradients[:count].double().sum(0)
        found[f"accumulate {count}"] = error(running_sum(gradients[:count], BF16), exact)
        found[f"accumulate {count} in FP32"] = error(running_sum(gradients[:count], FP32), exact)
    # Ranks send sums of their microbatches, which are no 16-bit numbers any more.
    sent = gradients.float().view(64, 8, -1).sum(1)
    exact = sent.double().sum(0)
    found["reduce once"] = error(sent.to(BF16).float().sum(0), exact)
    found["reduce ring"] = error(running_sum(sent.to(BF16), BF16), exact)
    found["param lost"] = lost_updates()
    found["buffer mean"] = running_mean_error()
    found["output"] = logits_error()
    found["tf32"] = products_error(13)  # 23 bits after the point in FP32, 10 in TF32
    found["bf16 products"] = products_error(16)
    return found


def error(found: Tensor, exact: Tensor) -> float:
    """Return |found - exact| / |exact|."""
    return float((found.double() - exact).norm() / exact.norm())


def running_sum(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum along the first dimension, one after the other, rounding to `dtype` each time."""
    total = torch.zeros_like(terms[0], dtype=dtype)
    for term in terms:
        total += term.to(dtype)
    return total


def microbatch_gradients(count: int) -> Tensor:
    """Return the BF16 gradients of one weight for microbatches of a regression, (count, size)."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(BF16)
    weight = next(net.parameters())
    gradients = []
    for _ in range(count):
        x = torch.randn(4, 32, generator=generator).to(BF16)
        y = x[:, :8] + 1  # something to learn, so that gradients agree
        loss = F.mse_loss(net(x), y)
        gradients.append(torch.autograd.grad(loss, weight)[0].flatten())
    return torch.stack(gradients)


def lost_updates(lr: float = 3e-4, std: float = 0.02) -> float:
    """Return the share of BF16 weights, N(0, std), that an update of Adam's usual size leaves."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(2**16, generator=generator) * std).to(BF16)
    updates = torch.randn(2**16, generator=generator).clamp(-1, 1) * lr
    return float((weights + updates.to(BF16) == weights).double().mean())


def running_mean_error(batches: int = 1000) -> float:
    """Return the error of a BF16 running mean after many batches of mean 3 and variance 1."""
    generator = torch.Generator().manual_seed(0)
    norm, exact = nn.BatchNorm1d(64).to(BF16), nn.BatchNorm1d(64).double()
    for _ in range(batches):
        x = 3 + torch.randn(32, 64, generator=generator)
        norm(x.to(BF16))
        exact(x.double())
    assert norm.running_mean is not None
    assert exact.running_mean is not None
    return error(norm.running_mean, exact.running_mean)


def logits_error() -> float:
    """Return the error of the loss's gradient if logits, N(0, 4), are rounded to BF16."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 1000, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(1000, (256,), generator=generator)

    def gradient(values: Tensor) -> Tensor:
        leaf = values.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf, targets), leaf)[0]

    return error(gradient(logits.to(BF16).double()), gradient(logits))


def products_error(dropped_bits: int) -> float:
    """Return the error of an FP32 matrix product whose inputs lose their last bits."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 256, 256, generator=generator)
    return error(rounded(x, dropped_bits) @ rounded(y, dropped_bits), x.double() @ y.double())


def rounded(x: Tensor, dropped_bits: int) -> Tensor:
    """Round FP32 numbers to nearest, without their last bits."""
    unit = 1 << dropped_bits
    bits = x.view(torch.int32).to(torch.int64) + unit // 2
    return (bits // unit * unit).to(torch.int32).view(torch.float32)


def measure_training(device: torch.device) -> dict[str, dict[str, float]]:
    """Return by policy: the last loss, and the largest relative distance from the one in FP32."""
    expected = losses(policy("fp32"), device)
    found = {}
    for name in (*PRESETS, *VARIANTS):
        seen = losses(policy(name), device)
        apart = [abs(a - b) / b for a, b in zip(seen, expected, strict=True)]
        found[name] = {"last": seen[-1], "apart": max(apart)}
    return found


def losses(chosen: PrecisionPolicy, device: torch.device) -> list[float]:
    """Train on the bytes of a file of Python's library; return the loss of every step."""
    text = Path(typing.__file__).read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(1)
    engine = Engine(
        Transformer(MODEL),
        next_token_loss,
        lambda named: torch.optim.AdamW(named, lr=1e-3, fused=True),
        policy=chosen,
        max_norm=1.0,
        attribution=False,
        device=device,
    )
    generator = torch.Generator().manual_seed(2)

    def batch() -> dict[str, Tensor]:
        starts = torch.randint(len(tokens) - LENGTH - 1, (SEQUENCES // 2,), generator=generator)
        rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}

    return [engine.step([batch(), batch()]).numbers.loss for _ in range(STEPS)]


if __name__ == "__main__":
    sys.exit(main())
