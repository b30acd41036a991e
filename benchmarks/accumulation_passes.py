"""Measure the cost of accumulating 8 microbatches: `python -m benchmarks.accumulation_passes`.

One process with one thread and without reduction: autograd passes precomputed bfloat16 gradients to
the parameters, and the methods sum them into flat FP32 buffers. The methods take turns, and their
CPU time is measured.

- `Fp32GradBuckets`: the first microbatch copies, the others add. `backward_context` gets the loss,
  or it does not and autograd converts the gradients to FP32 first.
- `main_grad`: the buffer is zeroed, a hook on every parameter adds its gradient, and a last pass
  scales the sum, as in data-parallel wrappers with a `main_grad`. The hook receives the gradient in
  bfloat16, or in float32 with `grad_dtype`.
- in place: the buffer is zeroed, autograd adds to `.grad`, which is a view of it (with `grad_dtype`
  float32), and a last pass scales the sum.
- autograd alone: the gradients are dropped. The other times include this one.

All methods except the last compute the same sum, which is checked. The bytes that copies and sums
read and write are counted from the tensors of each operation. On CPUs, torch makes an intermediate
FP32 copy to add a 16-bit tensor to an FP32 one, which is not counted; a GPU needs none.

`--device cuda` uses a larger model, and the time between two events of the stream instead of CPU
time.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import busy_time, parse, parser
from benchmarks.report import in_turns, machine, save
from benchmarks.tables import accumulation
from benchmarks.traffic import Traffic
from distmp import Fp32GradBuckets
from distmp.models.architecture import build_model
from distmp.models.settings import ModelConfig

MICROBATCHES = 8
SIZES = {"cpu": "22m", "cuda": "350m"}
SCALE = 0.5  # a power of two, so that the sums can be compared bit by bit


class _Use(torch.autograd.Function):
    """Replaces a layer: passes a precomputed gradient to its parameter."""

    @staticmethod
    def forward(ctx: Any, passing: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return passing.clone()

    @staticmethod
    def backward(ctx: Any, passing: Tensor) -> tuple[Tensor, Tensor, None]:
        return passing, ctx.gradient, None


class AccumulationMethod(ABC):
    """Accumulates gradients for its own parameters.

    Args:
        gradients: The bfloat16 gradients of a microbatch, in the order of the parameters.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = gradients
        self.parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]

    @abstractmethod
    def accumulate(self) -> None:
        """Run all microbatches of a step."""

    @abstractmethod
    def sums(self) -> list[Tensor]:
        """Return the accumulated and scaled gradients."""

    def loss(self) -> Tensor:
        """Run the forward of one microbatch."""
        passing = torch.zeros((), device=self._gradients[0].device, requires_grad=True)
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            passing = _Use.apply(passing, parameter, gradient)
        return passing


class Buckets(AccumulationMethod):
    """distmp's buckets, without scaling, because the optimizer's kernel divides."""

    passes_loss = True

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        named = [(str(index), parameter) for index, parameter in enumerate(self.parameters)]
        self._buckets = Fp32GradBuckets(named, None)

    def accumulate(self) -> None:
        self._buckets.begin_step()
        for index in range(MICROBATCHES):
            self._buckets.begin_microbatch(last=index == MICROBATCHES - 1)
            loss = self.loss()
            with self._buckets.backward_context(loss if self.passes_loss else None):
                loss.backward()
            self._buckets.end_microbatch()
        self._buckets.finish()

    def sums(self) -> list[Tensor]:
        sums = self._buckets.gradients()
        return [sums[str(index)] * SCALE for index in range(len(self.parameters))]


class ConvertingBuckets(Buckets):
    """The same, but autograd converts the gradients to FP32 first."""

    passes_loss = False


class Zeroed(AccumulationMethod):
    """Zeroes a buffer, adds all gradients, and scales the sum."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        elements = sum(gradient.numel() for gradient in gradients)
        self._flat = torch.zeros(elements, device=gradients[0].device)
        self._views = list(_views(self._flat, gradients))
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Connect the gradients of the parameters with the views."""

    def accumulate(self) -> None:
        self._flat.zero_()
        for _ in range(MICROBATCHES):
            self.loss().backward()
        self._flat.mul_(SCALE)

    def sums(self) -> list[Tensor]:
        return self._views


class MainGrad(Zeroed):
    """Adds the bfloat16 gradient in a hook and frees it."""

    grad_dtype = torch.bfloat16

    def prepare(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad_dtype = self.grad_dtype
            parameter.register_post_accumulate_grad_hook(_adder(view))


class MainGradFp32(MainGrad):
    """Adds the gradient in a hook, after autograd has converted it to FP32."""

    grad_dtype = torch.float32


class InPlace(Zeroed):
    """Lets autograd add to the view."""

    def prepare(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad_dtype = torch.float32
            parameter.grad = view


class Dropped(AccumulationMethod):
    """Drops the gradients without accumulation."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(_drop)

    def accumulate(self) -> None:
        for _ in range(MICROBATCHES):
            self.loss().backward()

    def sums(self) -> list[Tensor]:
        return []


METHODS: dict[str, type[AccumulationMethod]] = {
    "distmp.Fp32GradBuckets": Buckets,
    "the same without the loss": ConvertingBuckets,
    "memset, main_grad hook, scale": MainGrad,
    "the same with float32 gradients": MainGradFp32,
    "memset, autograd in place, scale": InPlace,
    "autograd alone": Dropped,
}


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    device = arguments.device
    gradients = _gradients(arguments.size, device)
    methods = {name: method(gradients) for name, method in METHODS.items()}
    milliseconds = in_turns(
        list(methods),
        arguments.rounds,
        lambda name: 1000 * busy_time(methods[name].accumulate, device),
        warm_up=2,
    )
    _check(methods)
    elements = sum(gradient.numel() for gradient in gradients)
    result = {
        "machine": machine(device),
        "elements": elements,
        "bytes": {name: _bytes(method) / elements for name, method in methods.items()},
        "parameters": len(gradients),
        "microbatches": MICROBATCHES,
        "milliseconds": milliseconds,
    }
    print(accumulation.accumulation_passes(result))
    print(f"saved to {save(f'accumulation-passes-{device.type}', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, rounds=25)
    options.add_argument("--size", help="size of the transformer (default: 22m, on a GPU 350m)")
    return parse(options, size=SIZES)


def _gradients(size: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = build_model(ModelConfig(size=size), 258, 128)
    return [
        torch.randn(parameter.shape, generator=generator).to(device, torch.bfloat16)
        for parameter in model.parameters()
    ]


def _views(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    for part, tensor in zip(parts, like, strict=True):
        yield part.view(tensor.shape)


def _adder(view: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return torch.no_grad()(add)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _bytes(method: AccumulationMethod) -> float:
    """Return how many bytes copies and sums move, per microbatch."""
    with Traffic() as traffic:
        method.accumulate()
    return traffic.bytes / MICROBATCHES


def _check(methods: dict[str, AccumulationMethod]) -> None:
    """Check that all methods compute the same sums."""
    expected, *others = (method.sums() for method in methods.values())
    for found in filter(None, others):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


if __name__ == "__main__":
    sys.exit(main())
