"""Measure the errors of the precision policies: `python -m benchmarks.precision`.

On a CPU it takes less than two minutes to measure the error of each reduction of precision alone,
and how much the losses of a small language model differ from FP32 in 50 steps under each policy.
`--device cuda` measures only the losses, because the errors depend only on number formats. For time
and memory under each policy, see `python -m benchmarks.policies`.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.device import CPU, parser
from benchmarks.report import machine, save, sized
from benchmarks.tables import precision
from distmp import Engine, PrecisionPolicy, policy
from distmp.models.loss import next_token_loss
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.precision import PRESETS

FP32, BF16 = torch.float32, torch.bfloat16
MICROBATCHES = (8, 64, 512)
STEPS, SEQUENCES, LENGTH = sized(50, 2), 16, 64
# Common changes of the presets.
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
        print(f"saved to {save('precision-errors-cpu', errors)}\n")
    training = {"machine": machine(device), "steps": STEPS, "losses": measure_training(device)}
    print(precision.precision_training(training))
    print(f"saved to {save(f'precision-training-{device.type}', training)}")
    return 0


def measure_errors() -> dict[str, float]:
    """Return the relative error of each reduction of precision by its name."""
    gradients = microbatch_gradients(max(MICROBATCHES))
    errors = {}
    for count in MICROBATCHES:
        exact = gradients[:count].double().sum(0)
        errors[f"accumulate {count}"] = error(running_sum(gradients[:count], BF16), exact)
        errors[f"accumulate {count} in FP32"] = error(running_sum(gradients[:count], FP32), exact)
    # Ranks send sums of microbatches, which are not 16-bit numbers any more.
    sent = gradients.float().view(64, 8, -1).sum(1)
    exact = sent.double().sum(0)
    received = sent.to(BF16).float()
    errors["reduce once"] = error(received.sum(0), exact)
    machines = received.view(8, 8, -1).sum(1).to(BF16).float()
    errors["reduce machines"] = error(machines.sum(0), exact)
    errors["reduce ring"] = error(running_sum(sent.to(BF16), BF16), exact)
    errors["param lost"] = lost_updates()
    errors["buffer mean"] = running_mean_error()
    errors["output"] = logits_error()
    errors["tf32"] = products_error(13)  # 23 mantissa bits in FP32, 10 in TF32
    errors["bf16 products"] = products_error(16)
    return errors


def error(computed: Tensor, exact: Tensor) -> float:
    """Return |computed - exact| / |exact|."""
    return float((computed.double() - exact).norm() / exact.norm())


def running_sum(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum sequentially along the first dimension, rounding to `dtype` after each addition."""
    total = torch.zeros_like(terms[0], dtype=dtype)
    for term in terms:
        total += term.to(dtype)
    return total


def microbatch_gradients(count: int) -> Tensor:
    """Return BF16 gradients of a weight for microbatches of a regression, shape (count, size)."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(BF16)
    weight = next(net.parameters())
    gradients = []
    for _ in range(count):
        x = torch.randn(4, 32, generator=generator).to(BF16)
        y = x[:, :8] + 1  # a learnable target, so that gradients have a common direction
        loss = F.mse_loss(net(x), y)
        gradients.append(torch.autograd.grad(loss, weight)[0].flatten())
    return torch.stack(gradients)


def lost_updates(lr: float = 3e-4, std: float = 0.02) -> float:
    """Return the share of BF16 weights, N(0, std), that an update of Adam does not change."""
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
    """Return the error of the loss's gradient if logits from N(0, 4) are rounded to BF16."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 1000, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(1000, (256,), generator=generator)

    def gradient(values: Tensor) -> Tensor:
        leaf = values.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf, targets), leaf)[0]

    return error(gradient(logits.to(BF16).double()), gradient(logits))


def products_error(dropped_bits: int) -> float:
    """Return the error of an FP32 matrix product whose inputs lose their lowest bits."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 256, 256, generator=generator)
    return error(rounded(x, dropped_bits) @ rounded(y, dropped_bits), x.double() @ y.double())


def rounded(x: Tensor, dropped_bits: int) -> Tensor:
    """Round FP32 numbers to nearest, dropping their lowest bits."""
    unit = 1 << dropped_bits
    bits = x.view(torch.int32).to(torch.int64) + unit // 2
    return (bits // unit * unit).to(torch.int32).view(torch.float32)


def measure_training(device: torch.device) -> dict[str, dict[str, float]]:
    """Return the last loss and the largest relative difference from FP32 of each policy."""
    reference = losses(policy("fp32"), device)
    results = {}
    # `benchmarks.narrow_formats` compares those with fewer than 16 bits.
    wide = [name for name, preset in PRESETS.items() if not preset.has_low_precision_matmuls]
    for name in (*wide, *VARIANTS):
        measured = losses(policy(name), device)
        differences = [abs(a - b) / b for a, b in zip(measured, reference, strict=True)]
        results[name] = {"last": measured[-1], "apart": max(differences)}
    return results


def losses(precision_policy: PrecisionPolicy, device: torch.device) -> list[float]:
    """Train on the bytes of a file of Python's library; return the loss of every step."""
    text = Path(typing.__file__).read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(1)
    engine = Engine(
        Transformer(MODEL),
        next_token_loss,
        lambda named: torch.optim.AdamW(named, lr=1e-3, fused=True),
        policy=precision_policy,
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
