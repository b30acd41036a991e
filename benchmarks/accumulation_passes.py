"""What accumulating 8 microbatches costs: `python -m benchmarks.accumulation_passes`.

One process with one thread, no reduction: autograd hands bfloat16 gradients, prepared beforehand,
to parameters one by one, and the ways put their sum into flat FP32 buffers. The ways take turns;
their CPU time counts, which is what a single thread takes on a quiet machine.

- `Fp32GradBuckets`: the first microbatch copies, the others add.
- `main_grad`: the buffer is set to zero, a hook on every parameter adds its gradient, and a last
  pass scales the sum, as data-parallel wrappers with a `main_grad` do that. The gradient comes to
  the hook as bfloat16, or as float32 if `grad_dtype` says so.
- in place: the buffer is set to zero, `.grad` is a view of it (with `grad_dtype` float32) that
  autograd adds to, and a last pass scales the sum.
- autograd alone: the gradients are dropped as they come. This is in all of the other times.

All ways but the last give the same sum, which is checked. `--device cuda` takes a larger model, and
the time between two events of the stream instead of CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import elapsed, parse, parser
from benchmarks.report import in_turns, machine, save
from benchmarks.tables import accumulation
from distmp import Fp32GradBuckets
from distmp.models.build import build_model
from distmp.models.settings import ModelConfig

MICROBATCHES = 8
SIZES = {"cpu": "22m", "cuda": "350m"}
SCALE = 0.5  # a power of two, so that the sums can be compared bit by bit


class _Use(torch.autograd.Function):
    """Stands for a layer: gives its parameter a gradient that was prepared, and passes on."""

    @staticmethod
    def forward(ctx: Any, passing: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return passing.clone()

    @staticmethod
    def backward(ctx: Any, passing: Tensor) -> tuple[Tensor, Tensor, None]:
        return passing, ctx.gradient, None


class AccumulationMethod(ABC):
    """A way to accumulate, with parameters of its own.

    Args:
        gradients: Of one microbatch, bfloat16, in the order of the parameters.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = gradients
        self.parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]

    @abstractmethod
    def accumulate(self) -> None:
        """Take all microbatches of a step."""

    @abstractmethod
    def sums(self) -> list[Tensor]:
        """Return the accumulated gradients, scaled as this way leaves them."""

    def backward(self) -> None:
        """Run one microbatch."""
        passing = torch.zeros((), device=self._gradients[0].device, requires_grad=True)
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            passing = _Use.apply(passing, parameter, gradient)
        passing.backward()


class Buckets(AccumulationMethod):
    """distmp's; nothing is scaled, because the optimizer's kernel divides."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        named = [(str(index), parameter) for index, parameter in enumerate(self.parameters)]
        self._buckets = Fp32GradBuckets(named, None)

    def accumulate(self) -> None:
        self._buckets.begin_step()
        for index in range(MICROBATCHES):
            self._buckets.begin_microbatch(last=index == MICROBATCHES - 1)
            self.backward()
            self._buckets.end_microbatch()
        self._buckets.finish()

    def sums(self) -> list[Tensor]:
        found = self._buckets.gradients()
        return [found[str(index)] * SCALE for index in range(len(self.parameters))]


class Zeroed(AccumulationMethod):
    """Set to zero, add all, scale."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        elements = sum(gradient.numel() for gradient in gradients)
        self._flat = torch.zeros(elements, device=gradients[0].device)
        self._views = list(_views(self._flat, gradients))
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Lead the gradients of the parameters to the views."""

    def accumulate(self) -> None:
        self._flat.zero_()
        for _ in range(MICROBATCHES):
            self.backward()
        self._flat.mul_(SCALE)

    def sums(self) -> list[Tensor]:
        return self._views


class MainGrad(Zeroed):
    """A hook adds the bfloat16 gradient and frees it."""

    grad_dtype = torch.bfloat16

    def prepare(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad_dtype = self.grad_dtype
            parameter.register_post_accumulate_grad_hook(_adder(view))


class MainGradFp32(MainGrad):
    """A hook adds the gradient that autograd has made FP32."""

    grad_dtype = torch.float32


class InPlace(Zeroed):
    """Autograd itself adds to the view."""

    def prepare(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad_dtype = torch.float32
            parameter.grad = view


class Dropped(AccumulationMethod):
    """Nothing is accumulated."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(_drop)

    def accumulate(self) -> None:
        for _ in range(MICROBATCHES):
            self.backward()

    def sums(self) -> list[Tensor]:
        return []


METHODS: dict[str, type[AccumulationMethod]] = {
    "distmp.Fp32GradBuckets": Buckets,
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
    ways = {name: way(gradients) for name, way in METHODS.items()}
    clock = elapsed if device.type == "cuda" else _cpu_time
    milliseconds = in_turns(
        list(ways),
        arguments.rounds,
        lambda name: 1000 * clock(ways[name].accumulate, device),
        warm_up=2,
    )
    _check(ways)
    result = {
        "machine": machine(device),
        "elements": sum(gradient.numel() for gradient in gradients),
        "parameters": len(gradients),
        "microbatches": MICROBATCHES,
        "milliseconds": milliseconds,
    }
    print(accumulation.accumulation_passes(result))
    print(f"kept in {save(f'accumulation-passes-{device.type}', result)}")
    return 0


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=25)
    made.add_argument("--size", help="transformer whose parameters these are (22m, on a GPU 350m)")
    return parse(made, size=SIZES)


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


def _cpu_time(work: Callable[[], object], _: torch.device) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _check(ways: dict[str, AccumulationMethod]) -> None:
    """Refuse to report on ways that do not compute the same."""
    expected, *others = (way.sums() for way in ways.values())
    for found in filter(None, others):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


if __name__ == "__main__":
    sys.exit(main())
